//! Bytes of UCX's own formats, as they travel in kvx's metadata.
//!
//! UCX reads addresses and keys without being told their length, and trusts them. So they travel with a checksum, which
//! finds whatever altered them on their way, and UCX is shown a copy that zeros follow. Who forges the checksum as well is
//! a peer that means harm: against such a peer UCX's emulated operations offer nothing anyway (`Isolation::Cooperative`).

use kvx_core::Result;
use kvx_core::wire::{Reader, Writer};

/// Zeros behind the bytes that UCX is shown: more than any count in them could skip.
const MARGIN: usize = 4096;

/// Adds a checksum.
pub(crate) fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = checksum(&bytes);
    bytes.put_u64(sum);
    bytes
}

/// The bytes without their checksum. Errors: `Malformed` for bytes that are not what [`seal`] made.
pub(crate) fn open<'a>(what: &'static str, sealed: &'a [u8]) -> Result<&'a [u8]> {
    let mut reader = Reader::new(what, sealed);
    let bytes = reader.bytes(sealed.len().saturating_sub(8))?;
    if reader.u64()? != checksum(bytes) {
        return Err(reader.malformed("its checksum is another"));
    }
    Ok(bytes)
}

/// A copy for UCX to read.
pub(crate) fn with_margin(bytes: &[u8]) -> Vec<u8> {
    let mut copy = Vec::with_capacity(bytes.len() + MARGIN);
    copy.extend_from_slice(bytes);
    copy.resize(bytes.len() + MARGIN, 0);
    copy
}

/// FNV-1a.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_altered_or_cut_is_refused() {
        let sealed = seal(b"a worker's address".to_vec());
        assert_eq!(open("address", &sealed).unwrap(), b"a worker's address");
        for len in 0..sealed.len() {
            assert!(open("address", &sealed[..len]).is_err(), "{len} bytes");
        }
        for at in 0..sealed.len() {
            for bit in 0..8 {
                let mut altered = sealed.clone();
                altered[at] ^= 1 << bit;
                assert!(open("address", &altered).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn zeros_follow_what_ucx_is_shown() {
        let shown = with_margin(b"key");
        assert_eq!((&shown[..3], shown.len()), (b"key".as_slice(), 3 + MARGIN));
        assert!(shown[3..].iter().all(|byte| *byte == 0));
    }
}
