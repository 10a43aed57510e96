//! An allocator that counts, for tests of how much memory an input may take.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

/// The system's allocator, which also counts the bytes that each thread has allocated. A test
/// program that measures installs it:
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: kvx_testkit::CountingAllocator = kvx_testkit::CountingAllocator;
///
/// let (text, most) = kvx_testkit::most_allocated(|| "a".repeat(1000));
/// assert!(text.len() == 1000 && most >= 1000);
/// ```
#[derive(Debug)]
pub struct CountingAllocator;

thread_local! {
    static NOW: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

impl CountingAllocator {
    fn allocated(size: usize) {
        let now = NOW.get().wrapping_add_unsigned(size);
        NOW.set(now);
        MOST.set(MOST.get().max(now));
    }

    /// Memory that another thread allocated lowers this thread's count when this thread frees it.
    fn freed(size: usize) {
        NOW.set(NOW.get().wrapping_sub_unsigned(size));
    }
}

// SAFETY: all calls go to the system's allocator; the counters are cells without destructors, which
// never allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CountingAllocator::allocated(layout.size());
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        CountingAllocator::allocated(layout.size());
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both allocations exist while the bytes are copied.
        CountingAllocator::allocated(new_size);
        CountingAllocator::freed(layout.size());
        // SAFETY: the caller upholds the contract of `realloc`.
        unsafe { System.realloc(at, layout, new_size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CountingAllocator::freed(layout.size());
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs `f`. Returns its result, and the most bytes that this thread allocated meanwhile, beyond
/// what it had before.
///
/// # Panics
/// If [`CountingAllocator`] is not the program's global allocator.
pub fn most_allocated<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = NOW.get();
    let value = black_box(Box::new(0_u8));
    assert_ne!(NOW.get(), before, "install kvx_testkit::CountingAllocator in this program");
    drop(value);
    MOST.set(before);
    let value = f();
    (value, (MOST.get() - before) as usize)
}
