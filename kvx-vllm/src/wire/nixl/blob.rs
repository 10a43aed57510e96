//! A NIXL agent's metadata, its "blob", as bytes.
//!
//! The text `nixlSerDes|` is followed by fields: a tag, the length of the data in 8 bytes, the
//! data, `|`. The order of the tags is fixed; lengths and numbers are little-endian.

use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{ErrorKind, Result};

const MAGIC: &[u8] = b"nixlSerDes|";
/// The longest blob that is read or written, in bytes. Blobs usually have about 150 bytes per
/// region.
const MAX_BLOB: usize = 16 << 20;
const MAX_NAME: usize = 512;
/// The length of the start of a descriptor: address, length, device.
const DESCRIPTOR: usize = 24;
/// The minimum length of a field without its tag and its data.
const FIELD: usize = 9;

/// The metadata that a NIXL agent sends to its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NixlBlob {
    /// The agent's name.
    pub agent: String,
    /// The agent's backends: the name of each, and its connection data. Partial metadata may have
    /// none.
    pub connections: Vec<(String, Vec<u8>)>,
    /// The agent's registered memory.
    pub sections: Vec<NixlSection>,
}

/// An agent's memory of one type, registered with one backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NixlSection {
    /// The backend's name.
    pub backend: String,
    /// The type of the memory.
    pub kind: NixlMemory,
    /// The ranges, ordered by device and address: NIXL uses a binary search.
    pub memory: Vec<NixlDescriptor>,
}

/// A registered range, with its backend's data for peers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NixlDescriptor {
    /// The device, 0 for host memory.
    pub device: u64,
    /// The start address.
    pub address: u64,
    /// The length in bytes.
    pub len: u64,
    /// The data with which a peer's backend accesses the range.
    pub key: Vec<u8>,
}

/// NIXL's memory types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum NixlMemory {
    /// Host memory.
    Dram = 0,
    /// GPU memory.
    Vram = 1,
    /// A block device.
    Block = 2,
    /// An object store.
    Object = 3,
    /// A file.
    File = 4,
}

impl NixlMemory {
    const ALL: [NixlMemory; 5] = [
        NixlMemory::Dram,
        NixlMemory::Vram,
        NixlMemory::Block,
        NixlMemory::Object,
        NixlMemory::File,
    ];
}

/// Reads a field that holds a name.
fn name(fields: &mut Reader<'_>, tag: &str) -> Result<String> {
    let name = std::str::from_utf8(fields.tagged(tag)?).ok().filter(|name| is_name(name));
    let name = name.map(str::to_owned);
    name.ok_or_else(|| fields.malformed(format_args!("the field {tag:?} holds no valid name")))
}

fn section(fields: &mut Reader<'_>) -> Result<NixlSection> {
    let backend = name(fields, "bknd")?;
    if fields.tagged("nixlDList")? != b"nixlSDList" {
        return Err(fields.malformed("unknown form of descriptor list"));
    }
    let number = i32::from_le_bytes(fields.tagged_array("t")?);
    let kind = NixlMemory::ALL.into_iter().find(|kind| *kind as i32 == number);
    let kind =
        kind.ok_or_else(|| fields.malformed(format_args!("unknown memory type {number}")))?;
    let count = fields.tagged_count("n", FIELD + DESCRIPTOR)?;
    let memory = (0..count).map(|_| descriptor(fields)).collect::<Result<_>>()?;
    Ok(NixlSection { backend, kind, memory })
}

fn descriptor(fields: &mut Reader<'_>) -> Result<NixlDescriptor> {
    let mut data = Reader::new("NIXL descriptor", fields.tagged("")?);
    let (address, len, device) = (data.u64()?, data.u64()?, data.u64()?);
    Ok(NixlDescriptor { device, address, len, key: data.bytes(data.left())?.to_vec() })
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= MAX_NAME && !name.contains('\0')
}

impl NixlBlob {
    /// Decodes a blob.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut fields = Reader::new("NIXL metadata", bytes);
        if bytes.len() > MAX_BLOB {
            let why = format!("{} bytes exceed the limit of {MAX_BLOB}", bytes.len());
            return Err(fields.malformed(why));
        }
        fields.word(MAGIC)?;
        let agent = name(&mut fields, "Agent")?;
        let connections = fields.tagged_count("Conns", 2 * FIELD + 2)?;
        let connections = (0..connections)
            .map(|_| Ok((name(&mut fields, "t")?, fields.tagged("c")?.to_vec())))
            .collect::<Result<_>>()?;
        if fields.tagged("")? != b"MemSection" {
            return Err(fields.malformed("the memory section is missing"));
        }
        let sections = fields.tagged_count("nixlSecElms", 4 * FIELD)?;
        let sections = (0..sections).map(|_| section(&mut fields)).collect::<Result<_>>()?;
        fields.end()?;
        Ok(NixlBlob { agent, connections, sections })
    }

    /// Encodes the blob as NIXL 0.10 to 1.5 do.
    ///
    /// # Errors
    /// `Invalid` for an invalid name, `Exhausted` for more bytes than a reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let backends = self.connections.iter().map(|(backend, _)| backend);
        let names = backends.chain(self.sections.iter().map(|section| &section.backend));
        if let Some(name) = names.chain([&self.agent]).find(|name| !is_name(name)) {
            return Err(ErrorKind::Invalid.because(format!(
                "{name:?} is not a valid NIXL name: it must have 1 to {MAX_NAME} bytes, none of \
                 them 0"
            )));
        }
        let mut out = MAGIC.to_vec();
        out.put_tagged("Agent", self.agent.as_bytes());
        out.put_tagged("Conns", &(self.connections.len() as u64).to_le_bytes());
        for (backend, address) in &self.connections {
            out.put_tagged("t", backend.as_bytes());
            out.put_tagged("c", address);
        }
        out.put_tagged("", b"MemSection");
        out.put_tagged("nixlSecElms", &(self.sections.len() as u64).to_le_bytes());
        for section in &self.sections {
            out.put_tagged("bknd", section.backend.as_bytes());
            out.put_tagged("nixlDList", b"nixlSDList");
            out.put_tagged("t", &(section.kind as i32).to_le_bytes());
            out.put_tagged("n", &(section.memory.len() as u64).to_le_bytes());
            for NixlDescriptor { device, address, len, key } in &section.memory {
                let head =
                    [address.to_le_bytes(), len.to_le_bytes(), device.to_le_bytes()].concat();
                out.put_tagged("", &[&head[..], key].concat());
            }
        }
        if out.len() > MAX_BLOB {
            return Err(ErrorKind::Exhausted.because(format!(
                "{} bytes of NIXL metadata exceed the limit of {MAX_BLOB}: register fewer regions",
                out.len()
            )));
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> NixlBlob {
        let range = |at: u64| NixlDescriptor {
            device: at,
            address: at << 20,
            len: 4096,
            key: b"k|y".to_vec(),
        };
        NixlBlob {
            agent: "prefill".into(),
            connections: vec![("KVX".into(), b"|address\0|".to_vec()), ("UCX".into(), Vec::new())],
            sections: vec![
                NixlSection {
                    backend: "KVX".into(),
                    kind: NixlMemory::Dram,
                    memory: vec![range(1), range(2)],
                },
                NixlSection { backend: "UCX".into(), kind: NixlMemory::Vram, memory: Vec::new() },
            ],
        }
    }

    #[test]
    fn what_is_written_is_read_to_its_last_byte() {
        let bytes = sample().encode().unwrap();
        assert_eq!(NixlBlob::decode(&bytes).unwrap(), sample());
        for len in 0..bytes.len() {
            assert_eq!(
                NixlBlob::decode(&bytes[..len]).unwrap_err().kind(),
                ErrorKind::Malformed,
                "{len}"
            );
        }
        assert!(NixlBlob::decode(&[&bytes[..], b"x"].concat()).is_err());
    }

    #[test]
    fn unknown_memory_types_are_rejected() {
        let bytes = sample().encode().unwrap();
        let at = bytes.windows(10).position(|window| window == b"nixlSDList").unwrap() + 20;
        for (kind, fits) in [(0, true), (4, true), (5, false), (-1, false)] {
            let altered = [&bytes[..at], &i32::to_le_bytes(kind), &bytes[at + 4..]].concat();
            assert_eq!(NixlBlob::decode(&altered).is_ok(), fits, "{kind}");
        }
    }

    #[test]
    fn names_that_nixl_cannot_read_are_not_written() {
        for name in ["", "a\0b", &"x".repeat(MAX_NAME + 1)] {
            let blob = NixlBlob { agent: name.into(), ..sample() };
            assert_eq!(blob.encode().unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}
