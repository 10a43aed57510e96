//! Tests memory: bounds, attributes of addresses, and memory that cannot be shared.

use std::fs::File;
use std::os::fd::FromRawFd as _;
use std::os::unix::fs::FileExt as _;

use kvx_testkit::test;

use crate::cuda::{Cuda, Handle};
use crate::symbols::call;

/// Returns the attributes that kvx reads: type, ordinal, shareable, start, length, pool.
fn attributes(cuda: &Cuda, address: u64) -> (u32, i32, u32, u64, usize, usize) {
    let (mut kind, mut ordinal, mut shareable, mut start, mut len, mut pool) = (9, 9, 0, 9, 9, 9);
    let names = [2, 9, 10, 11, 12, 17];
    let values: [*mut u8; 6] = [
        (&raw mut kind).cast(),
        (&raw mut ordinal).cast(),
        (&raw mut shareable).cast(),
        (&raw mut start).cast(),
        (&raw mut len).cast(),
        (&raw mut pool).cast(),
    ];
    assert_eq!(
        call!(cuda.library, cuPointerGetAttributes(
        6 => u32, names.as_ptr() => *const i32, values.as_ptr() => *const *mut u8, address => u64)),
        0
    );
    (kind, ordinal, shareable, start, len, pool)
}

#[test]
fn addresses_have_the_attributes_of_their_memory() {
    let cuda = Cuda::new();
    let plain = cuda.allocate(100);
    let (mut pool, mut pinned) = (0_u64, 0_u64);
    assert_eq!(
        call!(cuda.library, cuMemAllocAsync(&mut pool => *mut u64, 50 => usize, cuda.stream => Handle)),
        0
    );
    assert_eq!(
        call!(cuda.library, cuMemHostAlloc(&mut pinned => *mut u64, 4096 => usize, 1 => u32)),
        0
    );
    let host = 0_u64;
    assert_eq!(attributes(&cuda, plain + 99), (2, 0, 1, plain, 100, 0));
    assert!(matches!(attributes(&cuda, pool), (2, 0, 0, start, 50, 1..) if start == pool));
    assert!(matches!(attributes(&cuda, pinned), (1, _, 0, start, 4096, 0) if start == pinned));
    assert_eq!(attributes(&cuda, (&raw const host) as u64), (0, -2, 0, 0, 0, 0));
    assert_eq!(attributes(&cuda, plain + 4096), (0, -2, 0, 0, 0, 0), "beyond it");
    assert_eq!(call!(cuda.library, cuMemFreeAsync(pool => u64, cuda.stream => Handle)), 0);
    assert_eq!(cuda.wait(), 0);
    assert_eq!(cuda.free(plain), 0);
    assert_eq!(call!(cuda.library, cuMemFreeHost(pinned => u64)), 0);
    assert_eq!((cuda.control.faults(), cuda.control.allocated()), (0, 0));
}

#[test]
fn misuse_fails_and_is_counted() {
    let cuda = Cuda::new();
    let memory = cuda.allocate(100);
    assert_eq!(cuda.upload(memory + 96, &[0; 5]), 1, "the range is one byte too long");
    assert_eq!(cuda.upload(memory - 1, &[0; 1]), 1);
    assert_eq!(cuda.upload(0x1000, &[0; 1]), 1, "not a device address");
    assert_eq!(cuda.free(memory + 1), 1);
    assert_eq!(cuda.free(memory), 0);
    assert_eq!(cuda.free(memory), 1, "freed twice");
    assert_eq!(cuda.upload(memory, &[0; 1]), 1, "freed");
    assert_eq!(cuda.control.faults(), 5);
    assert_eq!(call!(cuda.library, cuMemFreeHost(memory => u64)), 1);
}

#[test]
fn pool_memory_is_not_shared() {
    let cuda = Cuda::new();
    let mut pool = 0_u64;
    assert_eq!(
        call!(cuda.library, cuMemAllocAsync(&mut pool => *mut u64, 4096 => usize, cuda.stream => Handle)),
        0
    );
    let mut handle = [0_u8; 64];
    assert_eq!(
        call!(cuda.library, cuIpcGetMemHandle(handle.as_mut_ptr() => *mut u8, pool => u64)),
        1
    );
    let mut descriptor = -1;
    assert_ne!(
        call!(cuda.library, cuMemGetHandleForAddressRange(
        &mut descriptor => *mut i32, pool => u64, 4096 => usize, 1 => i32, 0 => u64)),
        0
    );
    assert_eq!(cuda.free(pool), 0);
}

#[test]
fn a_descriptor_refers_to_the_memory() {
    let cuda = Cuda::new();
    let memory = cuda.allocate(3 * 4096);
    assert_eq!(cuda.upload(memory + 4096, b"kvx"), 0);
    let mut descriptor = -1;
    let mut of = |start: u64, len: usize| {
        call!(cuda.library, cuMemGetHandleForAddressRange(
            &mut descriptor => *mut i32, start => u64, len => usize, 1 => i32, 0 => u64))
    };
    assert_eq!(of(memory + 1, 4096), 1, "not aligned");
    assert_eq!(of(memory, 100), 1, "the range must be whole pages");
    assert_eq!(of(memory + 4096, 3 * 4096), 1, "beyond it");
    assert_eq!(of(memory + 4096, 2 * 4096), 0);
    // SAFETY: the driver returned the descriptor to this caller, who owns it.
    let mut file = unsafe { File::from_raw_fd(descriptor) };
    let start = std::io::Seek::stream_position(&mut file).expect("a file has a position");
    assert_eq!(start, 4096, "the position must be the beginning of the range");
    let mut bytes = [0; 3];
    file.read_exact_at(&mut bytes, start).expect("the file contains the range");
    assert_eq!(&bytes, b"kvx");
    assert_eq!(cuda.free(memory), 0);
}
