//! Registers memory under keys that cannot be guessed.

use std::sync::Arc;

use kvx_core::{Error, Result};

use crate::error::{self, NAME};
use crate::ffi::bindings_1_17::{FI_ENOKEY, FI_MR_LOCAL};
use crate::ffi::{Domain, Errno, MemoryDescription, Registration};

/// How often another key is drawn if one is in use.
const DRAWS: usize = 8;

/// Returns a random key of the provider's key size.
fn random_key(size: usize) -> Result<u64> {
    let mut random = [0_u8; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|cause| Error::os("could not generate a random key", cause).with_backend(NAME))?;
    let kept = size.clamp(1, 8);
    random[kept..].fill(0);
    Ok(u64::from_le_bytes(random))
}

/// Registers memory under a key that is not in use.
///
/// # Safety
/// The memory stays valid until the registration is dropped.
pub(crate) unsafe fn register(
    domain: &Arc<Domain>,
    described: MemoryDescription<'_>,
) -> Result<Registration> {
    let mut draws = 0;
    loop {
        let key = random_key(domain.info().key_size())?;
        // SAFETY: guaranteed by the caller.
        match unsafe { domain.register(described, key) } {
            Ok(registration) => return Ok(registration),
            Err(Errno(errno)) if errno == FI_ENOKEY.cast_signed() && draws < DRAWS => draws += 1,
            Err(errno) => {
                let what = format!("{} could not register this memory", domain.info().provider());
                return Err(error::native(what, errno));
            }
        }
    }
}

/// Registers memory for local operations, if the provider requires that (`FI_MR_LOCAL`).
///
/// # Safety
/// As for [`register`].
pub(crate) unsafe fn register_local(
    domain: &Arc<Domain>,
    address: *const u8,
    len: usize,
) -> Result<Option<Registration>> {
    if !domain.info().wants(FI_MR_LOCAL) {
        return Ok(None);
    }
    let address = address.addr() as u64;
    let described = MemoryDescription { address, len, read_only: false, device: None, file: None };
    // SAFETY: guaranteed by the caller.
    unsafe { register(domain, described) }.map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_fit_the_provider() {
        assert!(
            (0..100).all(|_| random_key(1).unwrap() < 256 && random_key(4).unwrap() >> 32 == 0)
        );
        assert_ne!(random_key(8).unwrap(), random_key(8).unwrap());
    }
}
