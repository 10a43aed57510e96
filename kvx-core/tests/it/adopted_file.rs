//! A file that the program has mapped itself, adopted by kvx.

use kvx_core::{ErrorKind, Memory};
use kvx_testkit::test;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

#[test]
fn both_mappings_of_an_adopted_file_show_the_same_bytes() {
    let file = memfd_create("kvx-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, 10_000).unwrap();
    // SAFETY: the kernel chooses the address, so the new mapping disturbs no memory of the program.
    let engine = unsafe {
        mmap(
            std::ptr::null_mut(),
            10_000,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &file,
            0,
        )
    };
    let engine = engine.unwrap().cast::<u8>();
    // SAFETY: byte 9,000 lies within the mapping.
    unsafe { engine.add(9_000).write_volatile(7) };
    let memory = Memory::adopt_file(file, 9_500).unwrap();
    let mut byte = [0];
    memory.copy_out(9_000, &mut byte).unwrap();
    assert_eq!(byte, [7], "the previous content stays");
    memory.copy_in(3, b"from a peer").unwrap();
    // SAFETY: both bytes lie within the mapping, which stays writable after sealing.
    unsafe {
        assert_eq!(engine.add(3).read_volatile(), b'f');
        engine.add(9_000).write_volatile(8);
    }
    memory.copy_out(9_000, &mut byte).unwrap();
    assert_eq!(byte, [8]);
    assert!(memory.pool_properties().unwrap().touched);
    assert_eq!(memory.copy_out(9_499, &mut [0; 2]).unwrap_err().kind(), ErrorKind::OutOfBounds);
    let seals = fcntl_get_seals(memory.shared_file().unwrap()).unwrap();
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::FUTURE_WRITE), "peers map it: {seals:?}");
    // SAFETY: `engine` is the mapping made above, and it is not used any more.
    unsafe { munmap(engine.cast(), 10_000) }.unwrap();
}
