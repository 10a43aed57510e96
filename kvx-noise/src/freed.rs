//! An allocator for this crate's tests that looks for keys in the memory that they free.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use crate::KEY;

/// The most keys that a test looks for.
const MOST: usize = 5;

thread_local! {
    /// The keys that this thread looks for in memory that it frees.
    static SOUGHT: Cell<Option<[[u8; KEY]; MOST]>> = const { Cell::new(None) };
    /// The freed blocks that contained one.
    static FOUND: Cell<usize> = const { Cell::new(0) };
}

/// Runs `f`. Returns how many of the blocks that it frees contain one of the keys.
pub(crate) fn containing(keys: &[[u8; KEY]; MOST], f: impl FnOnce()) -> usize {
    FOUND.set(0);
    SOUGHT.set(Some(*keys));
    f();
    SOUGHT.set(None);
    FOUND.get()
}

struct Searching;

// SAFETY: memory comes from `System` and returns to it with the same layouts.
unsafe impl GlobalAlloc for Searching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // All bytes are initialised, so that `dealloc` may read them.
        // SAFETY: the caller upholds `alloc`'s contract, which is that of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if let Ok(Some(keys)) = SOUGHT.try_with(Cell::get) {
            // SAFETY: the caller frees a block of this layout, which `alloc` initialised, and which
            // nothing else uses any more.
            let block = unsafe { std::slice::from_raw_parts(pointer, layout.size()) };
            if block.windows(KEY).any(|bytes| keys.iter().any(|key| key == bytes)) {
                FOUND.set(FOUND.get() + 1);
            }
        }
        // SAFETY: the caller upholds `dealloc`'s contract, and `System` allocated the block.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Searching = Searching;
