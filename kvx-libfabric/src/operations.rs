//! The operations that were posted on an endpoint and have not ended. The provider is given an
//! address for each, and returns it.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::Arc;

use kvx_backend::fabric::JobId;

/// What an operation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// So many pieces of a transfer.
    Pieces { job: JobId, peer: usize, count: u32 },
    /// A message in this buffer.
    Send { buffer: usize, peer: usize },
    /// A buffer for a message.
    Receive { buffer: usize },
}

/// Memory that some providers use while an operation lasts, as large as the largest asks for
/// (`struct fi_context2`). Providers that want none never touch it, so it costs no cache.
#[repr(C, align(64))]
pub(crate) struct OperationContext(UnsafeCell<[u8; 64]>);

// SAFETY: only the provider reads or writes its bytes.
unsafe impl Send for OperationContext {}
// SAFETY: only the provider reads or writes its bytes.
unsafe impl Sync for OperationContext {}

/// The operations of one endpoint, which keeps their contexts.
pub(crate) struct Operations {
    contexts: Arc<[OperationContext]>,
    /// By the place of the context.
    posted: Box<[Option<Operation>]>,
    free: Vec<usize>,
}

impl Operations {
    /// For at most so many at a time.
    pub(crate) fn new(most: usize) -> Self {
        Operations {
            contexts: (0..most).map(|_| OperationContext(UnsafeCell::new([0; 64]))).collect(),
            posted: vec![None; most].into(),
            free: (0..most).rev().collect(),
        }
    }

    /// Returns what the endpoint is to keep.
    pub(crate) fn contexts(&self) -> Arc<[OperationContext]> {
        Arc::clone(&self.contexts)
    }

    /// Notes an operation, and gives what it is posted with. `None`: there are too many.
    #[inline]
    pub(crate) fn add(&mut self, operation: Operation) -> Option<*mut c_void> {
        let at = self.free.pop()?;
        self.posted[at] = Some(operation);
        Some(self.contexts[at].0.get().cast())
    }

    /// An operation has ended, or was not posted. `None`: there is no such operation.
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
    fn each_comes_back_once_by_its_own_context() {
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
