//! Random engine ids.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Returns a version 4 UUID. The keys of the standard library's hasher come from the operating
/// system's randomness.
pub(super) fn random_uuid() -> String {
    let draw = || RandomState::new().build_hasher().finish();
    let (high, low) = (draw(), draw());
    let (high, low) = (high & !0xf000 | 0x4000, low & !(0b11 << 62) | (0b10 << 62));
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    )
}
