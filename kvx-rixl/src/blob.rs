//! A NIXL agent's metadata as bytes, validated before NIXL, which trusts its input, reads it.
//!
//! Fields follow the prefix `nixlSerDes|`: a tag, the length of the data in 8 bytes, the data,
//! `|`. The order of the tags is fixed, lengths and numbers are little-endian.

use std::ffi::CStr;

use kvx_core::backend::MAX_NAME;
use kvx_core::backend::wire::{Reader, Writer as _};
use kvx_core::{Error, Result};

use crate::ffi::{MemorySegment, Range};

/// The maximum length of a blob; 44 bytes per region are typical.
pub(crate) const MAX_BLOB: usize = 16 << 20;
/// The maximum length of a name: kvx's own are a name, `@` and 32 digits.
const MAX_AGENT_NAME: usize = MAX_NAME + 33;
const MAGIC: &[u8] = b"nixlSerDes|";
/// The length of a descriptor's fixed part: address, length, device.
const DESCRIPTOR: usize = 24;
/// NIXL's kinds of memory: it crashes on others.
const KINDS: std::ops::RangeInclusive<i32> = 0..=4;

/// The content of a blob.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Blob<'a> {
    /// The agent's name.
    pub(crate) agent: &'a str,
    /// The plugins and their addresses.
    pub(crate) connections: Vec<(&'a str, &'a [u8])>,
    /// The agent's memory: address, length and device, with the plugin's key.
    pub(crate) memory: Vec<BlobMemory<'a>>,
}

/// A range of a peer's memory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BlobMemory<'a> {
    pub(crate) kind: i32,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) device: u64,
    pub(crate) key: &'a [u8],
}

impl BlobMemory<'_> {
    /// Returns the range, if its kind is memory.
    pub(crate) fn range(&self) -> Option<Range> {
        let segment = [MemorySegment::Host, MemorySegment::Device]
            .into_iter()
            .find(|kind| kind.number() == self.kind)?;
        Some(Range { segment, address: self.address, len: self.len, device: self.device })
    }
}

/// Reads a field that holds a name.
fn name<'a>(fields: &mut Reader<'a>, tag: &str) -> Result<&'a str> {
    let data = fields.tagged(tag)?;
    let fits =
        |text: &&str| !text.is_empty() && text.len() <= MAX_AGENT_NAME && !text.contains('\0');
    let name = std::str::from_utf8(data).ok().filter(fits);
    name.ok_or_else(|| fields.malformed(format_args!("the field {tag:?} holds no name")))
}

impl<'a> Blob<'a> {
    /// Parses a blob. Errors: `Malformed`.
    pub(crate) fn read(bytes: &'a [u8]) -> Result<Self> {
        let mut fields = Reader::new("NIXL blob", bytes);
        if bytes.len() > MAX_BLOB {
            return Err(fields
                .malformed(format_args!("{} bytes, at most {MAX_BLOB} are read", bytes.len())));
        }
        fields.word(MAGIC)?;
        let agent = name(&mut fields, "Agent")?;
        let mut blob = Blob { agent, connections: Vec::new(), memory: Vec::new() };
        for _ in 0..fields.tagged_count("Conns", 20)? {
            let plugin = name(&mut fields, "t")?;
            blob.connections.push((plugin, fields.tagged("c")?));
        }
        if fields.tagged("")? != b"MemSection" {
            return Err(fields.malformed("the memory section is missing"));
        }
        for _ in 0..fields.tagged_count("nixlSecElms", 20)? {
            name(&mut fields, "bknd")?;
            if fields.tagged("nixlDList")? != b"nixlSDList" {
                return Err(fields.malformed("a list has an unknown format"));
            }
            let kind = i32::from_le_bytes(fields.tagged_array("t")?);
            if !KINDS.contains(&kind) {
                return Err(fields.malformed(format_args!("no memory is of kind {kind}")));
            }
            for _ in 0..fields.tagged_count("n", 9 + DESCRIPTOR)? {
                let mut data = Reader::new("NIXL descriptor", fields.tagged("")?);
                let (address, len, device) = (data.u64()?, data.u64()?, data.u64()?);
                let key = data.bytes(data.left())?;
                blob.memory.push(BlobMemory { kind, address, len, device, key });
            }
        }
        fields.end()?;
        Ok(blob)
    }
}

/// Returns the blob of an agent with its name only, without connections and memory.
pub(crate) fn of_name(agent: &CStr) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.put_tagged("Agent", agent.to_bytes());
    out.put_tagged("Conns", &0_u64.to_le_bytes());
    out.put_tagged("", b"MemSection");
    out.put_tagged("nixlSecElms", &0_u64.to_le_bytes());
    out
}

/// Returns an error about a blob.
pub(crate) fn malformed(why: &'static str) -> Error {
    Reader::new("NIXL blob", &[]).malformed(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob() -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.put_tagged("Agent", b"prefill");
        out.put_tagged("Conns", &1_u64.to_le_bytes());
        out.put_tagged("t", b"UCX");
        out.put_tagged("c", b"|address\0|");
        out.put_tagged("", b"MemSection");
        out.put_tagged("nixlSecElms", &1_u64.to_le_bytes());
        out.put_tagged("bknd", b"UCX");
        out.put_tagged("nixlDList", b"nixlSDList");
        out.put_tagged("t", &0_i32.to_le_bytes());
        out.put_tagged("n", &2_u64.to_le_bytes());
        for at in [1_u64, 2] {
            let mut descriptor = Vec::new();
            descriptor.extend((at << 20).to_le_bytes());
            descriptor.extend(4096_u64.to_le_bytes());
            descriptor.extend(at.to_le_bytes());
            descriptor.extend(b"key");
            out.put_tagged("", &descriptor);
        }
        out
    }

    #[test]
    fn a_blob_is_parsed_to_its_last_byte() {
        let bytes = blob();
        let read = Blob::read(&bytes).unwrap();
        assert_eq!(
            (read.agent, &read.connections[..]),
            ("prefill", &[("UCX", &b"|address\0|"[..])][..])
        );
        let last = BlobMemory { kind: 0, address: 2 << 20, len: 4096, device: 2, key: b"key" };
        assert_eq!((read.memory.len(), &read.memory[1]), (2, &last));
        for len in 0..bytes.len() {
            assert!(Blob::read(&bytes[..len]).is_err(), "{len}");
        }
        assert!(Blob::read(&[&bytes[..], b"x"].concat()).is_err());
    }

    #[test]
    fn a_name_alone_is_a_blob() {
        let nothing = Blob { agent: "prefill", connections: Vec::new(), memory: Vec::new() };
        assert_eq!(Blob::read(&of_name(c"prefill")).unwrap(), nothing);
    }

    #[test]
    fn memory_of_an_unknown_kind_is_rejected() {
        let bytes = blob();
        let at = bytes.windows(10).position(|word| word == b"nixlSDList").unwrap() + 20;
        for (kind, fits) in [(0, true), (4, true), (5, false), (-1, false)] {
            let altered = [&bytes[..at], &i32::to_le_bytes(kind), &bytes[at + 4..]].concat();
            assert_eq!(Blob::read(&altered).is_ok(), fits, "{kind}");
        }
    }

    #[test]
    fn altered_blobs_never_panic() {
        let (whole, mut random) = (blob(), kvx_testkit::Random::seeded(1));
        for _ in 0..20_000 {
            let mut altered = whole.clone();
            for _ in 0..1 + random.below(4) {
                let at = random.below(altered.len());
                altered[at] = random.word() as u8;
            }
            altered.truncate(random.below(altered.len() + 1));
            Blob::read(&altered).ok();
        }
    }
}
