//! Content that both ends can compute: each byte depends only on a seed and its offset.

use kvx_core::{Memory, Result};

/// Returns the byte at `offset` of content `seed`.
pub fn byte_at(seed: u64, offset: u64) -> u8 {
    word(seed, offset / 8).to_le_bytes()[(offset % 8) as usize]
}

fn word(seed: u64, index: u64) -> u64 {
    // A finaliser of the splitmix family: neighbouring inputs give unrelated outputs.
    let mut mixed = index
        .wrapping_add(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
        .wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Returns `len` bytes of content `seed` from `offset`.
pub(crate) fn bytes(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    let first = offset / 8;
    let words = (offset % 8 + len as u64).div_ceil(8);
    let mut out = vec![0; 8 * words as usize];
    let (places, _) = out.as_chunks_mut::<8>();
    for (place, index) in places.iter_mut().zip(first..) {
        *place = word(seed, index).to_le_bytes();
    }
    out.drain(..(offset % 8) as usize);
    out.truncate(len);
    out
}

/// Fills memory with content `seed`.
///
/// # Errors
/// The errors of [`Memory::copy_in`].
pub fn fill(memory: &Memory, seed: u64) -> Result<()> {
    const STEP: usize = 1 << 20;
    for offset in (0..memory.len()).step_by(STEP) {
        memory.copy_in(offset, &bytes(seed, offset as u64, STEP.min(memory.len() - offset)))?;
    }
    Ok(())
}

/// Returns a checksum of the bytes; equal bytes have equal checksums.
pub fn checksum(bytes: &[u8]) -> u64 {
    let (chunks, rest) = bytes.as_chunks::<8>();
    let mut sum = 0xcbf2_9ce4_8422_2325 ^ bytes.len() as u64;
    let mut mix = |word: u64| sum = (sum.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    chunks.iter().for_each(|chunk| mix(u64::from_le_bytes(*chunk)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(u64::from_le_bytes(last));
    sum ^ (sum >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_the_same_from_every_offset() {
        let whole = bytes(7, 0, 100);
        for offset in 0..50 {
            assert_eq!(bytes(7, offset, 30), whole[offset as usize..offset as usize + 30]);
            assert_eq!(byte_at(7, offset), whole[offset as usize]);
        }
        assert_ne!(bytes(8, 0, 100), whole);
    }

    #[test]
    fn checksums_see_every_byte_and_the_order() {
        let mut content = bytes(1, 0, 4099);
        let sum = checksum(&content);
        for at in [0, 7, 8, 4090, 4098] {
            content[at] ^= 1;
            assert_ne!(checksum(&content), sum, "byte {at}");
            content[at] ^= 1;
        }
        content.swap(8, 16);
        assert_ne!(checksum(&content), sum);
    }
}
