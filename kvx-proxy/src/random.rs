//! Random bytes of the kernel.

use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::{Error, Result};

/// Returns random bytes for keys and ids.
///
/// # Errors
///
/// Fails if the kernel returns none.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    // The kernel never returns so few in parts.
    const { assert!(N <= 256) };
    let mut bytes = [0; N];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(read) if read == N => Ok(bytes),
        other => Err(Error::new(format!("getrandom returned no random bytes: {other:?}"))),
    }
}
