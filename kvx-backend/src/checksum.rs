//! A checksum for bytes in a native library's own formats, which kvx's metadata carries.
//!
//! Libraries trust addresses and keys: altered ones lead to other memory of the peer, or crash the
//! process. The checksum detects accidental changes. It does not prove who wrote the bytes: against
//! a hostile peer only the library's isolation helps ([`Isolation`](kvx_core::Isolation)).

use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{ErrorKind, Result};

/// Appends the checksum.
pub fn append(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = fnv1a(&bytes);
    bytes.put_u64(sum);
    bytes
}

/// Verifies and removes the checksum; `what` names the bytes in the error.
///
/// # Errors
/// `Malformed` if the checksum does not match.
pub fn strip<'a>(what: &'static str, sealed: &'a [u8]) -> Result<&'a [u8]> {
    let mut reader = Reader::new(what, sealed);
    let bytes = reader.bytes(sealed.len().saturating_sub(8))?;
    if reader.u64()? != fnv1a(bytes) {
        return Err(reader.malformed("its checksum does not match"));
    }
    Ok(bytes)
}

/// Checks the version of the format in which a peer wrote its address or a region's export.
///
/// # Errors
///
/// `Incompatible` for an unknown version.
pub fn check_form(backend: &'static str, what: &str, found: u8, known: u8) -> Result<()> {
    if found == known {
        return Ok(());
    }
    let why = format!(
        "the peer's {backend} {what} has format {found}, but this release knows {known}: update \
         the older end"
    );
    Err(ErrorKind::Incompatible.because(why).with_backend(backend))
}

/// Runs `decode` on 10,000 random messages. It must reject them without a checksum and survive them
/// with one.
#[cfg(feature = "attacker-for-tests")]
pub fn check_decoder<T>(decode: impl Fn(&[u8]) -> Result<T>) {
    let mut seed = 1_u64;
    let mut random = move || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize
    };
    for _ in 0..10_000 {
        let bytes: Vec<u8> = (0..random() % 64).map(|_| random() as u8).collect();
        assert!(decode(&bytes).is_err(), "{bytes:?} has no checksum");
        decode(&append(bytes)).ok(); // some are addresses
    }
}

/// Returns the 64-bit FNV-1a hash.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn altered_and_truncated_bytes_are_rejected() {
        let sealed = append(b"a worker's address".to_vec());
        assert_eq!(strip("address", &sealed).unwrap(), b"a worker's address");
        for len in 0..sealed.len() {
            assert!(strip("address", &sealed[..len]).is_err(), "{len} bytes");
        }
        for at in 0..sealed.len() * 8 {
            let mut altered = sealed.clone();
            altered[at / 8] ^= 1 << (at % 8);
            assert!(strip("address", &altered).is_err(), "bit {at}");
        }
    }
}
