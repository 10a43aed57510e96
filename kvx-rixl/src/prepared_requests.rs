//! Requests that a plan keeps from post to post.
//!
//! NIXL's requests can be posted again, and creating one costs as much as moving a small block. The
//! first transfer of a plan creates them, slice by slice; later ones only post them. One transfer
//! at a time uses them: a concurrent one creates its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvx_core::backend::sync::Mutex;

use crate::ffi::Request;

/// The maximum number of descriptors that an agent's plans keep, some 64 bytes each on either side.
const MOST_KEPT: usize = 1 << 20;

/// The number of descriptors that an agent's plans keep.
#[derive(Default)]
pub(crate) struct DescriptorBudget(AtomicUsize);

/// The requests that a plan keeps.
#[derive(Default)]
pub(crate) struct PreparedRequests {
    taken: AtomicBool,
    slices: Mutex<Option<Slices>>,
}

/// All slices of a plan.
struct Slices {
    /// The load of the peer's address; requests do not survive another load.
    load: u64,
    slices: Vec<Slice>,
    descriptors: usize,
    kept: Arc<DescriptorBudget>,
}

impl Drop for Slices {
    fn drop(&mut self) {
        self.kept.0.fetch_sub(self.descriptors, Ordering::Relaxed);
    }
}

/// Pieces that are posted together, as one request.
#[derive(Clone)]
pub(crate) struct Slice {
    pub(crate) request: Arc<Request>,
    pub(crate) bytes: u64,
    /// The number of the slice's descriptors.
    pub(crate) pieces: usize,
}

/// A transfer's exclusive use of the requests, until all its pieces have ended.
#[derive(Default)]
pub(crate) struct SliceLease {
    of: Option<Arc<PreparedRequests>>,
    slices: Option<Slices>,
    /// True if all slices existed at the start.
    whole: bool,
    next: usize,
}

impl SliceLease {
    /// Takes the requests that the plan keeps, unless another transfer uses them. `load`: the load
    /// of the peer's address to which they must belong.
    pub(crate) fn take(
        prepared: &Arc<PreparedRequests>,
        load: u64,
        kept: &Arc<DescriptorBudget>,
    ) -> SliceLease {
        if prepared.taken.swap(true, Ordering::Acquire) {
            return SliceLease::default();
        }
        let there = prepared.slices.lock().take();
        let there = there.filter(|slices| slices.load == load);
        let whole = there.is_some();
        let slices = there.unwrap_or_else(|| Slices {
            load,
            slices: Vec::new(),
            descriptors: 0,
            kept: Arc::clone(kept),
        });
        SliceLease { of: Some(Arc::clone(prepared)), slices: Some(slices), whole, next: 0 }
    }

    /// Returns the next existing slice, and whether it is the last; `None` if it must be created.
    pub(crate) fn next(&mut self) -> Option<(Slice, bool)> {
        let slices = &self.slices.as_ref().filter(|_| self.whole)?.slices;
        let slice = slices.get(self.next)?.clone();
        self.next += 1;
        Some((slice, self.next == slices.len()))
    }

    /// Keeps a newly created slice.
    pub(crate) fn keep(&mut self, slice: &Slice) {
        if self.whole {
            return;
        }
        // Another transfer uses the plan's requests, or there are too many.
        let Some(slices) = &mut self.slices else { return };
        if slices.kept.0.fetch_add(slice.pieces, Ordering::Relaxed) + slice.pieces > MOST_KEPT {
            slices.kept.0.fetch_sub(slice.pieces, Ordering::Relaxed);
            self.slices = None;
            return;
        }
        slices.descriptors += slice.pieces;
        slices.slices.push(slice.clone());
    }

    /// Records that the last slice was created: the next transfer finds all of them.
    pub(crate) fn complete(&mut self) {
        self.whole = self.slices.is_some();
        self.next = self.slices.as_ref().map_or(0, |slices| slices.slices.len());
    }
}

impl Drop for SliceLease {
    fn drop(&mut self) {
        let Some(prepared) = self.of.take() else { return }; // another transfer uses them
        if let Some(slices) = self.slices.take()
            && self.whole
        {
            *prepared.slices.lock() = Some(slices);
        }
        prepared.taken.store(false, Ordering::Release);
    }
}
