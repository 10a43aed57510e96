//! Device memory that this process shares. Peers in the same process use it at its own address,
//! because drivers reject a handle in the process that made it.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use kvx_core::backend::sync::Mutex;
use kvx_core::{DeviceId, Memory};

static EXPORTS: Mutex<Exports> =
    Mutex::new(Exports { by_address: BTreeMap::new(), remove_freed_at: LEAST });

/// The number of addresses below which those of freed memory are not removed.
const LEAST: usize = 64;

struct Exports {
    by_address: BTreeMap<u64, Vec<Weak<Memory>>>,
    /// The number of addresses at which those of freed memory are removed.
    remove_freed_at: usize,
}

/// Records that memory is shared, until it is freed.
pub(super) fn add(memory: &Arc<Memory>) {
    let mut exports = EXPORTS.lock();
    let Exports { by_address, remove_freed_at } = &mut *exports;
    if by_address.len() >= *remove_freed_at {
        by_address.retain(|_, shared| {
            remove_freed(shared);
            !shared.is_empty()
        });
        *remove_freed_at = LEAST.max(2 * by_address.len());
    }
    let shared = by_address.entry(memory.address()).or_default();
    remove_freed(shared);
    let new = Arc::downgrade(memory);
    if !shared.iter().any(|known| known.ptr_eq(&new)) {
        shared.push(new);
    }
}

fn remove_freed(shared: &mut Vec<Weak<Memory>>) {
    shared.retain(|memory| memory.strong_count() > 0);
}

/// Returns shared memory of a device that begins at `address` and has at least `len` bytes.
pub(super) fn find(device: DeviceId, address: u64, len: usize) -> Option<Arc<Memory>> {
    let shared: Vec<_> = {
        let exports = EXPORTS.lock();
        exports.by_address.get(&address)?.iter().filter_map(Weak::upgrade).collect()
    };
    // Without the lock: the last owner of memory may be dropped here.
    shared.into_iter().find(|memory| memory.device() == device && memory.len() >= len)
}

#[cfg(test)]
mod tests {
    use kvx_core::MemoryKind;
    use kvx_testkit::TestDevice;

    use super::*;

    #[test]
    fn only_memory_that_is_shared_and_not_freed_is_found() {
        let device = TestDevice::new(MemoryKind::Cuda);
        let id = kvx_core::DeviceAccess::device(&*device);
        let memory = Arc::new(device.allocate(4096));
        let at = memory.address();
        assert!(find(id, at, 4096).is_none(), "it is not shared yet");
        add(&memory);
        add(&memory);
        assert!(Arc::ptr_eq(&find(id, at, 4096).unwrap(), &memory));
        assert!(find(id, at, 1).is_some());
        assert!(find(id, at, 4097).is_none() && find(id, at + 1, 1).is_none());
        assert!(find(DeviceId([9; 16]), at, 1).is_none());
        let opened = find(id, at, 4096);
        drop(memory);
        assert!(find(id, at, 4096).is_some(), "as long as a peer uses it");
        drop(opened);
        assert!(find(id, at, 4096).is_none());
        for number in 0..4 * LEAST as u64 {
            // SAFETY: no code touches the address.
            let memory =
                unsafe { Memory::adopt_device(number << 12, 1, id, Arc::clone(&device) as _, ()) };
            add(&Arc::new(memory));
        }
        assert!(EXPORTS.lock().by_address.len() <= LEAST, "those of freed memory are removed");
    }
}
