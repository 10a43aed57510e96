//! A checksum behind what travels in kvx's metadata: keys and addresses that were altered on their way would lead to other
//! memory of the peer, and some providers check neither. Who forges the checksum as well is a peer that means harm:
//! against such a peer what holds is the provider's isolation.

use kvx_core::Result;
use kvx_core::wire::{Reader, Writer};

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

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_altered_or_cut_is_refused() {
        let sealed = seal(b"a region's keys".to_vec());
        assert_eq!(open("keys", &sealed).unwrap(), b"a region's keys");
        for len in 0..sealed.len() {
            assert!(open("keys", &sealed[..len]).is_err(), "{len} bytes");
        }
        for at in 0..sealed.len() * 8 {
            let mut altered = sealed.clone();
            altered[at / 8] ^= 1 << (at % 8);
            assert!(open("keys", &altered).is_err(), "bit {at}");
        }
    }
}
