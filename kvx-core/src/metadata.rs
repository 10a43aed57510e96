//! The description of an agent for its peers, as bytes: identity, addresses and regions.
//!
//! The format is a header (magic, the range of versions that the writer supports, total length)
//! followed by sections of tag, length and value. A reader rejects an unknown section with the
//! critical bit and skips other unknown sections, so that newer writers can add information. The
//! size is O(regions).

use std::fmt;
use std::sync::Arc;

use crate::fault_injection::injected;
use crate::identity::{Generation, Identity, Incarnation, Invitation, RegionId, RegionKey};
use crate::memory::DeviceId;
use crate::wire::{Reader, Writer};
use crate::{ErrorKind, MemoryKind, Result};

const MAGIC: [u8; 4] = *b"KVXM";
const REGION_MAGIC: [u8; 4] = *b"KVXR";
/// The versions of the format that this release reads and writes.
const VERSIONS: std::ops::RangeInclusive<u16> = 1..=1;
const CRITICAL: u16 = 0x8000;
const IDENTITY: u16 = 1 | CRITICAL;
const BACKEND: u16 = 2;
const REGION: u16 = 3 | CRITICAL;
const INVITATION: u16 = 4 | CRITICAL;

/// A flag in the byte of the memory kind: peers may only read the region. A reader that does not
/// know the flag sees an unknown kind and rejects the metadata, so that it does not write by
/// mistake.
const READ_ONLY: u8 = 0x80;

const MAX_BYTES: usize = 64 << 20;
const MAX_BACKENDS: usize = 32;
const MAX_REGIONS: usize = 65_536;
const MAX_ADDRESS: usize = 16 << 20;
const MAX_EXPORT: usize = u16::MAX as usize;
/// The maximum memory that parsed regions take, however few bytes encode them.
const MAX_KEPT: usize = 64 << 20;

/// The decoded metadata of an agent.
#[derive(Clone, Debug)]
pub struct Metadata {
    /// The agent's name and incarnation.
    pub identity: Identity,
    /// The number of metadata changes in this incarnation.
    pub generation: Generation,
    /// The terms on which the agent admits peers; `None` if an old release of kvx wrote the
    /// metadata.
    pub invited: Option<AdmissionTerms>,
    /// The agent's open backends and their addresses.
    pub backends: Vec<(Arc<str>, Vec<u8>)>,
    /// The agent's regions.
    pub regions: Vec<Arc<RegionInfo>>,
}

/// The terms on which an agent admits peers.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionTerms {
    /// The invitation that the peer must prove to have.
    pub by: Invitation,
    /// True if the peer must also prove to have the fleet's secret.
    pub with_secret: bool,
}

/// The description of a region in metadata.
#[derive(Clone)]
pub struct RegionInfo {
    /// The region's number.
    pub id: RegionId,
    /// The key that gives access to the region.
    pub key: RegionKey,
    /// The region's name.
    pub name: Arc<str>,
    /// The region's length in bytes.
    pub len: u64,
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The device that holds the memory.
    pub device: DeviceId,
    /// True if peers may only read the region.
    pub read_only: bool,
    /// Additional bytes of each backend that serves the region: the position in
    /// [`Metadata::backends`], and the bytes.
    pub exports: Vec<(u8, Vec<u8>)>,
}

impl fmt::Debug for RegionInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{} ({} bytes of {} memory)", self.name, self.id, self.len, self.kind)
    }
}

impl RegionInfo {
    /// Returns the approximate memory that the description takes.
    fn kept(&self) -> usize {
        let exports =
            self.exports.iter().map(|(_, export)| size_of::<(u8, Vec<u8>)>() + export.len());
        size_of::<Self>() + self.name.len() + exports.sum::<usize>()
    }

    /// Returns the bytes that the backend at `position` exported for the region.
    pub(crate) fn export(&self, position: u8) -> Option<&[u8]> {
        self.exports.iter().find(|(at, _)| *at == position).map(|(_, export)| &export[..])
    }
}

impl Metadata {
    /// Encodes the metadata.
    ///
    /// # Errors
    /// `Exhausted` if there are more regions or backends, or longer addresses, than readers accept.
    pub fn encode(&self) -> Result<Vec<u8>> {
        limit("regions", self.regions.len(), MAX_REGIONS)?;
        limit("backends", self.backends.len(), MAX_BACKENDS)?;
        let mut out = Vec::with_capacity(256 + 128 * self.regions.len());
        out.put(&MAGIC);
        out.put_u16(*VERSIONS.start());
        out.put_u16(*VERSIONS.end());
        let total_at = out.len();
        out.put_u32(0);
        section(&mut out, IDENTITY, |out| {
            out.put_identity(&self.identity);
            out.put_u64(self.generation.0);
        });
        if let Some(invited) = &self.invited {
            section(&mut out, INVITATION, |out| {
                out.put(invited.by.bytes());
                out.put_u8(invited.with_secret.into());
            });
        }
        for (name, address) in &self.backends {
            limit("bytes of a backend's address", address.len(), MAX_ADDRESS)?;
            section(&mut out, BACKEND, |out| {
                out.put_name(name);
                out.put_block(address);
            });
        }
        for region in &self.regions {
            check_exports(region)?;
            section(&mut out, REGION, |out| put_region(out, region));
        }
        limit("bytes", out.len(), MAX_BYTES)?;
        let total = out.len() as u32;
        out[total_at..total_at + 4].copy_from_slice(&total.to_le_bytes());
        Ok(out)
    }

    /// Decodes metadata.
    ///
    /// # Errors
    /// `Malformed` if the bytes are not well-formed metadata; `Incompatible` if the writer supports
    /// only other versions, or if a critical section is unknown.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("metadata", bytes);
        if bytes.len() > MAX_BYTES {
            return Err(reader.malformed(format_args!(
                "{} bytes, at most {MAX_BYTES} are allowed",
                bytes.len()
            )));
        }
        if reader.array::<4>()? != MAGIC {
            return Err(reader.malformed(
                "this is not kvx metadata; for the blob of a NIXL or Mooncake agent use \
                 connect_foreign",
            ));
        }
        check_versions(reader.u16()?, reader.u16()?)?;
        let total = reader.u32()? as usize;
        if total != bytes.len() {
            return Err(reader.malformed(format_args!("{} bytes of {total}", bytes.len())));
        }
        let (mut identity, mut invited) = (None, None);
        let (mut backends, mut regions) = (Vec::new(), Vec::<Arc<RegionInfo>>::new());
        let mut kept = 0;
        while reader.left() > 0 {
            let tag = reader.u16()?;
            let mut value = Reader::new("metadata section", reader.block(MAX_BYTES)?);
            match tag {
                IDENTITY if identity.is_none() => {
                    identity = Some((value.identity()?, value.generation()?))
                }
                BACKEND if backends.len() < MAX_BACKENDS => {
                    backends.push((value.name()?, value.block(MAX_ADDRESS)?.to_vec()));
                }
                REGION if regions.len() < MAX_REGIONS => {
                    let region = region(&mut value)?;
                    kept += region.kept();
                    if kept > MAX_KEPT {
                        return Err(value.malformed(format_args!(
                            "its regions take more than {MAX_KEPT} bytes"
                        )));
                    }
                    regions.push(Arc::new(region));
                }
                INVITATION if invited.is_none() => {
                    let by = Invitation::from_bytes(value.array()?);
                    invited = Some(AdmissionTerms { by, with_secret: value.u8()? & 1 != 0 });
                }
                IDENTITY | BACKEND | REGION | INVITATION => {
                    return Err(value.malformed("more sections of a kind than allowed"));
                }
                unknown if unknown & CRITICAL != 0 && !injected("critical") => {
                    return Err(ErrorKind::Incompatible.because(format!(
                        "the peer's metadata needs section {unknown:#x}, which this kvx does not \
                         know: upgrade this kvx"
                    )));
                }
                _ => continue,
            }
            value.end()?;
        }
        let (identity, generation) = identity.ok_or_else(|| reader.malformed("no identity"))?;
        if let Some(region) = regions
            .iter()
            .find(|region| region.exports.iter().any(|(at, _)| usize::from(*at) >= backends.len()))
        {
            return Err(reader.malformed(format_args!(
                "region {} names a backend that the agent does not list",
                region.name
            )));
        }
        let mut ids: Vec<_> = regions.iter().map(|region| region.id).collect();
        ids.sort_unstable();
        if ids.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(reader.malformed("two regions have the same number"));
        }
        Ok(Metadata { identity, generation, invited, backends, regions })
    }

    /// Returns the terms on which the agent admits peers.
    ///
    /// # Errors
    /// `Incompatible` if the metadata has none.
    pub(crate) fn invited(&self) -> Result<AdmissionTerms> {
        self.invited.ok_or_else(|| {
            let why = "the peer's metadata has no invitation, so its agent would not admit this \
                       one: an old release of kvx wrote it; upgrade the peer";
            ErrorKind::Incompatible.because(why)
        })
    }

    /// Returns the position and the address of a backend.
    pub(crate) fn backend(&self, name: &str) -> Option<(u8, &[u8])> {
        let position = self.backends.iter().position(|(known, _)| **known == *name)?;
        Some((position as u8, &self.backends[position].1))
    }
}

fn limit(what: &str, is: usize, max: usize) -> Result<()> {
    if is <= max {
        return Ok(());
    }
    Err(ErrorKind::Exhausted
        .because(format!("{is} {what} in one agent's metadata, at most {max} are allowed")))
}

fn check_exports(region: &RegionInfo) -> Result<()> {
    let mut exports = region.exports.iter();
    exports
        .try_for_each(|(_, export)| limit("bytes of a region's export", export.len(), MAX_EXPORT))
}

fn section(out: &mut Vec<u8>, tag: u16, write: impl FnOnce(&mut Vec<u8>)) {
    out.put_u16(tag);
    let at = out.len();
    out.put_u32(0);
    write(out);
    let len = (out.len() - at - 4) as u32;
    out[at..at + 4].copy_from_slice(&len.to_le_bytes());
}

/// Encodes the metadata of one region: its owner's incarnation and its section.
///
/// # Errors
/// `Exhausted` if a backend's bytes for the region are too long.
pub(crate) fn encode_region(owner: &Identity, region: &RegionInfo) -> Result<Vec<u8>> {
    check_exports(region)?;
    let mut out = Vec::with_capacity(128);
    out.put(&REGION_MAGIC);
    out.put_u16(*VERSIONS.start());
    out.put_u16(*VERSIONS.end());
    out.put(&owner.incarnation.0);
    section(&mut out, REGION, |out| put_region(out, region));
    Ok(out)
}

/// Decodes the metadata of one region, and the incarnation of its owner.
///
/// # Errors
/// `Malformed` if the bytes are not well-formed; `Incompatible` if the writer supports only other
/// versions.
pub(crate) fn decode_region(bytes: &[u8]) -> Result<(Incarnation, RegionInfo)> {
    let mut reader = Reader::new("a region's metadata", bytes);
    if reader.array::<4>()? != REGION_MAGIC {
        return Err(reader.malformed("these bytes are not from Region::metadata"));
    }
    check_versions(reader.u16()?, reader.u16()?)?;
    let incarnation = Incarnation(reader.array()?);
    let tag = reader.u16()?;
    if tag != REGION {
        return Err(reader.malformed(format_args!("section {tag:#x} instead of a region")));
    }
    let mut value = Reader::new("metadata section", reader.block(MAX_BYTES)?);
    let info = region(&mut value)?;
    value.end()?;
    reader.end()?;
    Ok((incarnation, info))
}

fn check_versions(oldest: u16, newest: u16) -> Result<()> {
    if oldest <= *VERSIONS.end() && newest >= *VERSIONS.start() {
        return Ok(());
    }
    Err(ErrorKind::Incompatible.because(format!(
        "the peer's metadata is of versions {oldest} to {newest}, this kvx reads {} to {}: upgrade \
         the older of the two",
        VERSIONS.start(),
        VERSIONS.end()
    )))
}

fn put_region(out: &mut Vec<u8>, region: &RegionInfo) {
    out.put_region(region.id, &region.key);
    out.put_name(&region.name);
    out.put_u64(region.len);
    out.put_u8(region.kind as u8 | if region.read_only { READ_ONLY } else { 0 });
    if !region.kind.is_host() {
        out.put(&region.device.0);
    }
    out.put_u8(region.exports.len() as u8);
    for (position, export) in &region.exports {
        out.put_u8(*position);
        out.put_u16(export.len() as u16);
        out.put(export);
    }
}

fn region(value: &mut Reader<'_>) -> Result<RegionInfo> {
    let (id, key) = value.region()?;
    let name = value.name()?;
    let len = value.u64()?;
    let kind = value.u8()?;
    let (kind, read_only) = (kind & !READ_ONLY, kind & READ_ONLY != 0);
    let kind = MemoryKind::from_wire(kind)
        .ok_or_else(|| value.malformed(format_args!("unknown memory kind {kind}")))?;
    let device = if kind.is_host() { DeviceId::HOST } else { DeviceId(value.array()?) };
    let count = usize::from(value.u8()?);
    if count > MAX_BACKENDS {
        return Err(
            value.malformed(format_args!("exports for {count} backends, at most {MAX_BACKENDS}"))
        );
    }
    let mut exports = Vec::<(u8, Vec<u8>)>::with_capacity(count);
    for _ in 0..count {
        let position = value.u8()?;
        if exports.last().is_some_and(|(last, _)| *last >= position) {
            return Err(value.malformed("exports out of order"));
        }
        let len = usize::from(value.u16()?);
        exports.push((position, value.bytes(len)?.to_vec()));
    }
    Ok(RegionInfo { id, key, name, len, kind, device, read_only, exports })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(regions: u64) -> Metadata {
        Metadata {
            identity: Identity { name: "prefill-0".into(), incarnation: Incarnation([9; 16]) },
            generation: Generation(3),
            invited: None,
            backends: vec![("SHM".into(), vec![1, 2, 3]), ("TCP".into(), vec![4])],
            regions: (0..regions)
                .map(|id| {
                    Arc::new(RegionInfo {
                        id: RegionId(id),
                        key: RegionKey([id as u8; 16]),
                        name: format!("layer.{id}").into(),
                        len: 100_000 * 4096,
                        kind: if id % 2 == 0 { MemoryKind::Host } else { MemoryKind::Cuda },
                        device: DeviceId([if id % 2 == 0 { 0 } else { 5 }; 16]),
                        read_only: id == 2,
                        exports: vec![(0, vec![7; 9]), (1, vec![])],
                    })
                })
                .collect(),
        }
    }

    #[test]
    fn metadata_survives_the_trip_and_stays_small() {
        let bytes = sample(64).encode().unwrap();
        assert!(bytes.len() < 8 << 10, "{} bytes for 64 regions", bytes.len());
        let back = Metadata::decode(&bytes).unwrap();
        assert_eq!(back.encode().unwrap(), bytes);
        assert_eq!(back.generation, Generation(3));
        assert_eq!(back.backend("TCP"), Some((1, &[4u8][..])));
    }

    /// The bytes that release 0.1 writes, which must stay readable for ever.
    const GOLDEN_0_1: &str = "4b56584d01000100930000000180220000000970726566696c6c2d3009090909090909090909090909090909\
         030000000000000002000b0000000353484d0300000001020302000900000003544350010000000403803900\
         0000000000000000000000000000000000000000000000000000076c617965722e3000006a18000000000002\
         000900070707070707070707010000";

    #[test]
    fn golden_bytes_of_each_release_are_read_and_the_newest_are_written() {
        let hex: String =
            sample(1).encode().unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, GOLDEN_0_1);
        let bytes: Vec<u8> = (0..GOLDEN_0_1.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&GOLDEN_0_1[at..at + 2], 16).unwrap())
            .collect();
        let read = Metadata::decode(&bytes).unwrap();
        assert_eq!(&*read.identity.name, "prefill-0");
        assert_eq!((&*read.regions[0].name, read.regions[0].len), ("layer.0", 100_000 * 4096));
        assert_eq!(read.regions[0].export(0), Some(&[7u8; 9][..]));
    }

    #[test]
    fn few_bytes_that_would_take_much_memory_are_refused() {
        let region = |id: u64, exports: Vec<(u8, Vec<u8>)>| {
            let (key, name, kind, device) =
                (RegionKey([0; 16]), "r".into(), MemoryKind::Host, DeviceId::HOST);
            Arc::new(RegionInfo {
                id: RegionId(id),
                key,
                name,
                len: 1,
                kind,
                device,
                read_only: false,
                exports,
            })
        };
        let backends: Vec<_> =
            (0..MAX_BACKENDS).map(|at| (format!("B{at}").into(), Vec::new())).collect();
        let all = || (0..MAX_BACKENDS as u8).map(|at| (at, Vec::new())).collect::<Vec<_>>();
        let read = |count, exports: &dyn Fn() -> Vec<(u8, Vec<u8>)>| {
            let regions = (0..count).map(|id| region(id, exports())).collect();
            let backends = backends.clone();
            let bytes = Metadata { backends, regions, ..sample(0) }.encode().unwrap();
            Metadata::decode(&bytes).map(drop).map_err(|error| error.to_string())
        };
        let why = read(MAX_REGIONS as u64, &all).unwrap_err();
        assert!(why.contains(&MAX_KEPT.to_string()), "{why}");
        read(MAX_REGIONS as u64, &|| vec![(0, vec![7; 100]), (1, vec![7; 100])]).unwrap();
        // A region must not name a backend twice, nor more backends than there are.
        assert!(
            read(1, &|| vec![(0, Vec::new()), (0, Vec::new())])
                .unwrap_err()
                .contains("out of order")
        );
        assert!(
            read(1, &|| vec![(0, Vec::new()); MAX_BACKENDS + 1])
                .unwrap_err()
                .contains("33 backends")
        );
        read(1, &all).unwrap();
    }

    #[test]
    fn an_invitation_travels_and_metadata_without_one_says_what_to_do() {
        let old = Metadata::decode(&sample(1).encode().unwrap()).unwrap();
        let error = old.invited().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Incompatible);
        assert!(error.to_string().contains("upgrade the peer"), "{error}");
        for with_secret in [false, true] {
            let invited = Some(AdmissionTerms { by: Invitation::from_bytes([5; 32]), with_secret });
            let bytes = Metadata { invited, ..sample(1) }.encode().unwrap();
            let back = Metadata::decode(&bytes).unwrap().invited().unwrap();
            assert_eq!((back.by.bytes(), back.with_secret), (&[5; 32], with_secret));
        }
    }

    #[test]
    fn unknown_sections_are_skipped_unless_critical() {
        let add = |tag: u16| {
            let mut bytes = sample(1).encode().unwrap();
            section(&mut bytes, tag, |out| out.put(b"news"));
            let total = (bytes.len() as u32).to_le_bytes();
            bytes[8..12].copy_from_slice(&total);
            Metadata::decode(&bytes)
        };
        assert!(add(77).is_ok());
        assert_eq!(add(77 | CRITICAL).unwrap_err().kind(), ErrorKind::Incompatible);
    }

    #[test]
    fn other_versions_are_refused_with_both_ranges() {
        let mut bytes = sample(0).encode().unwrap();
        bytes[4..8].copy_from_slice(&[9, 0, 12, 0]);
        let error = Metadata::decode(&bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Incompatible);
        assert!(error.to_string().contains("9 to 12"), "{error}");
    }

    #[test]
    fn every_truncation_and_bit_flip_is_an_error_or_metadata() {
        let bytes = sample(3).encode().unwrap();
        for len in 0..bytes.len() {
            assert_eq!(Metadata::decode(&bytes[..len]).unwrap_err().kind(), ErrorKind::Malformed);
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok(metadata) = Metadata::decode(&flipped) {
                metadata.encode().unwrap();
            }
        }
    }

    #[test]
    fn every_truncation_and_bit_flip_of_a_regions_bytes_is_an_error_or_a_region() {
        let agent = sample(2);
        let bytes = encode_region(&agent.identity, &agent.regions[1]).unwrap();
        let (incarnation, back) = decode_region(&bytes).unwrap();
        assert_eq!(incarnation, agent.identity.incarnation);
        assert_eq!(encode_region(&agent.identity, &back).unwrap(), bytes);
        for len in 0..bytes.len() {
            assert_eq!(decode_region(&bytes[..len]).unwrap_err().kind(), ErrorKind::Malformed);
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok((_, region)) = decode_region(&flipped) {
                encode_region(&agent.identity, &region).unwrap();
            }
        }
    }

    #[test]
    fn a_foreign_blob_says_what_to_call() {
        let error = Metadata::decode(b"nixlSerDes|Agent").unwrap_err();
        assert!(error.to_string().contains("connect_foreign"), "{error}");
    }
}
