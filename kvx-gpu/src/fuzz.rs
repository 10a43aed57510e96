//! The fuzz target, and a bounded run of it.

use crate::imports::SharedHandle;

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("gpu_handle", handle)];

/// Decodes the handle with which a peer shares device memory.
pub fn handle(bytes: &[u8]) {
    if let Ok(handle) = SharedHandle::decode(bytes) {
        assert_eq!(handle.encode(), bytes);
    }
}

#[cfg(test)]
mod tests {
    kvx_testkit::replay_test!(super::TARGETS);
}
