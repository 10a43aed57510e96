//! The operations that are posted on an endpoint and have not ended. Each has an address, its
//! context, which the provider returns when it ends.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::Arc;

use kvx_backend::fabric::JobId;

/// The purpose of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// `count` pieces of a transfer.
    Pieces { job: JobId, peer: usize, count: u32 },
    /// Reads a byte that a job has written: see [`read_back`](crate::read_back).
    ReadBack { job: JobId, peer: usize },
    /// Sends the message in this buffer.
    Send { buffer: usize, peer: usize },
    /// Receives a message into this buffer.
    Receive { buffer: usize },
}

/// Memory that some providers use during an operation, of the largest size that any requires
/// (`struct fi_context2`). Providers that need none never access it, so it costs no cache.
#[repr(C, align(64))]
pub(crate) struct OperationContext(UnsafeCell<[u8; 64]>);

// SAFETY: only the provider reads or writes its bytes.
unsafe impl Send for OperationContext {}
// SAFETY: only the provider reads or writes its bytes.
unsafe impl Sync for OperationContext {}

/// The operations of one endpoint, with their contexts.
pub(crate) struct Operations {
    contexts: Arc<[OperationContext]>,
    /// Indexed like the contexts.
    posted: Box<[Option<Operation>]>,
    free: Vec<usize>,
}

impl Operations {
    /// Creates the table for at most `most` concurrent operations.
    pub(crate) fn new(most: usize) -> Self {
        Operations {
            contexts: (0..most).map(|_| OperationContext(UnsafeCell::new([0; 64]))).collect(),
            posted: vec![None; most].into(),
            free: (0..most).rev().collect(),
        }
    }

    /// Returns the contexts, which the endpoint must keep.
    pub(crate) fn contexts(&self) -> Arc<[OperationContext]> {
        Arc::clone(&self.contexts)
    }

    /// Records an operation, and returns its context; `None` if there are too many.
    #[inline]
    pub(crate) fn add(&mut self, operation: Operation) -> Option<*mut c_void> {
        let at = self.free.pop()?;
        self.posted[at] = Some(operation);
        Some(self.contexts[at].0.get().cast())
    }

    /// Removes an operation that has ended or was not posted; `None` if there is none with this
    /// context.
    #[inline]
    pub(crate) fn take(&mut self, context: *mut c_void) -> Option<Operation> {
        let offset = context.addr().checked_sub(self.contexts.as_ptr().addr())?;
        let at = offset / size_of::<OperationContext>();
        if offset % size_of::<OperationContext>() != 0 {
            return None;
        }
        let operation = self.posted.get_mut(at)?.take()?;
        self.free.push(at);
        Some(operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(job: usize) -> Operation {
        Operation::Pieces { job: JobId::from_number(job), peer: 0, count: 1 }
    }

    #[test]
    fn each_operation_is_found_once_by_its_context() {
        let mut operations = Operations::new(3);
        let contexts: Vec<_> = (0..3).map(|job| operations.add(piece(job)).unwrap()).collect();
        assert_eq!(operations.add(piece(3)), None, "no room");
        assert!(contexts.iter().all(|context| context.addr() % 64 == 0));
        assert_eq!(operations.take(contexts[1]), Some(piece(1)));
        assert_eq!(operations.take(contexts[1]), None, "it has ended");
        assert_eq!(operations.take(contexts[0].wrapping_byte_add(8)), None);
        assert_eq!(operations.take(contexts[0].wrapping_byte_sub(64)), None);
        assert_eq!(operations.take(contexts[2].wrapping_byte_add(64)), None);
        assert_eq!(operations.take(std::ptr::null_mut()), None);
        assert!(operations.add(piece(4)).is_some());
    }
}
