//! Tests memory: pools, adopted pointers, pinned buffers, descriptors.

use std::sync::Arc;

use kvx_core::DeviceAccess as _;
use kvx_core::{ErrorKind, MemoryKind};
use kvx_gpu::DevicePtr;
use kvx_testkit::Child;

use super::{Bench, LONG, ROLE, Test, all_of, filled, pattern, until};

pub(crate) const ANYWHERE: &[(&str, Test)] = &[
    ("pinned_memory_is_host_memory", pinned_memory_is_host_memory),
    ("a_pointer_of_the_program_is_adopted", a_pointer_is_adopted),
];

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("a_device_is_the_same_each_time_and_has_a_name", the_same_each_time),
    ("memory_is_freed", memory_is_freed),
    ("pointers_that_are_not_this_devices_are_refused", other_pointers_are_refused),
    ("a_descriptor_says_where_the_range_begins", a_descriptor),
    ("every_release_of_the_library_tells_memory_apart", every_release),
];

/// Runs in separate processes, because a library has one version.
fn every_release(bench: &Bench<'_>) {
    for release in bench.maker.releases {
        let child =
            Child::start_self(ROLE, &format!("release {release}")).expect("a process starts");
        assert_eq!(child.hear(LONG).expect("it tells memory apart"), "told apart", "{release}");
    }
}

/// For [`super::roles`].
pub(crate) fn kinds(bench: &Bench<'_>) {
    a_pointer_is_adopted(bench);
    other_pointers_are_refused(bench);
    a_descriptor(bench);
}

fn the_same_each_time(bench: &Bench<'_>) {
    let again = (bench.maker.devices)().unwrap();
    assert!(Arc::ptr_eq(&again[0], &bench.device));
    let about: Vec<_> = again.iter().map(|device| device.info()).collect();
    assert_eq!(about.len(), 2);
    assert_ne!(about[0].id, about[1].id);
    assert_eq!((about[0].ordinal, about[1].ordinal), (0, 1));
    assert!(
        about.iter().all(|about| !about.name.is_empty() && about.bus.contains(':')),
        "{about:?}"
    );
}

fn memory_is_freed(bench: &Bench<'_>) {
    let _first = filled(&bench.device, &[1; 64]); // the device's own memory is allocated now
    let before = bench.control.allocated();
    let pool = bench.device.pool(5 << 20).build().unwrap();
    assert_eq!(pool.len(), 5 << 20);
    assert!(bench.control.allocated() >= before + (5 << 20));
    drop(pool);
    until("the pool is freed", || bench.control.allocated() == before);
}

fn pinned_memory_is_host_memory(bench: &Bench<'_>) {
    let memory = bench.device.pinned(10_000).unwrap();
    assert_eq!((memory.kind(), memory.len()), (MemoryKind::Pinned, 10_000));
    memory.copy_in(9_990, &[5; 10]).unwrap();
    // SAFETY: nobody writes to it.
    let bytes = unsafe { memory.block(0..10_000) }.unwrap();
    assert!(bytes[..9_990].iter().all(|byte| *byte == 0) && bytes[9_990..] == [5; 10]);
    assert_eq!(bench.device.pinned(0).unwrap_err().kind(), ErrorKind::Invalid);
}

fn a_pointer_is_adopted(bench: &Bench<'_>) {
    // The memory of a framework, for which another pool stands in.
    let bytes = pattern(8, 100_000);
    let theirs = Arc::new(filled(&bench.device, &bytes));
    let at = DevicePtr(theirs.address() + 1000);
    // SAFETY: the owner that is passed along keeps the pool.
    let memory = unsafe { bench.device.adopt(at, 90_000, Arc::clone(&theirs)) }.unwrap();
    assert_eq!((memory.kind(), memory.device()), (bench.maker.kind, bench.device.info().id));
    assert!(all_of(&memory) == bytes[1000..91_000]);
    assert_eq!(Arc::strong_count(&theirs), 2);
    drop(memory);
    assert_eq!(Arc::strong_count(&theirs), 1);
}

fn other_pointers_are_refused(bench: &Bench<'_>) {
    let adopt = |address: u64, len| {
        // SAFETY: the call rejects the memory, or it outlives the adopted memory.
        unsafe { bench.device.adopt(DevicePtr(address), len, ()) }
    };
    let plain = vec![0u8; 4096];
    let error = adopt(plain.as_ptr() as u64, 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("Memory::adopt"), "{error}");

    let pinned = bench.device.pinned(4096).unwrap();
    let error = adopt(pinned.address(), 4096).unwrap_err();
    assert!(error.to_string().contains("adopt_pinned"), "{error}");

    let other = (bench.maker.devices)().unwrap().remove(1);
    let pool = other.pool(4096).build().unwrap();
    let error = adopt(pool.address(), 4096).unwrap_err();
    assert!(error.to_string().contains("device 1"), "{error}");

    let pool = bench.device.pool(4096).build().unwrap();
    assert_eq!(
        adopt(pool.address(), 64 << 20).unwrap_err().kind(),
        ErrorKind::Invalid,
        "it ends in unallocated memory"
    );
    assert_eq!(adopt(pool.address(), 0).unwrap_err().kind(), ErrorKind::Invalid);
    adopt(pool.address(), 4096).unwrap();
}

fn a_descriptor(bench: &Bench<'_>) {
    let pool = bench.device.pool(3 << 20).build().unwrap();
    let page = rustix::param::page_size() as u64;
    let whole = bench.device.dma_buf(pool.address(), pool.len()).unwrap();
    assert_eq!(whole.offset % page, pool.address() % page);
    let part = bench.device.dma_buf(pool.address() + 5 * page + 100, 1000).unwrap();
    assert_eq!(part.offset % page, 100);
    assert!(rustix::fs::fstat(&part.file).is_ok());
    let error = bench.device.dma_buf(pool.address(), 1 << 40).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}
