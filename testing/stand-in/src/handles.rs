//! The handles of callers: numbers for streams, events, modules and other objects, so that the use
//! of a destroyed object is an error.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::code::{Answer, Code};

/// An opaque handle of a caller; null is 0.
pub(crate) type Handle = usize;

/// All handles of one kind.
pub(crate) struct Handles<T> {
    living: LazyLock<Mutex<HashMap<Handle, Arc<T>>>>,
}

impl<T> Handles<T> {
    pub(crate) const fn new() -> Self {
        Handles { living: LazyLock::new(Mutex::default) }
    }

    pub(crate) fn add(&self, value: Arc<T>) -> Handle {
        static NEXT: Mutex<Handle> = Mutex::new(0x10_0000);
        let mut next = NEXT.lock().unwrap_or_else(PoisonError::into_inner);
        // A number is never reused, not even for another kind.
        *next += 16;
        self.lock().insert(*next, value);
        *next
    }

    pub(crate) fn get(&self, handle: Handle) -> Answer<Arc<T>> {
        self.lock().get(&handle).cloned().ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn remove(&self, handle: Handle) -> Answer<Arc<T>> {
        self.lock().remove(&handle).ok_or(Code::INVALID_HANDLE)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Handle, Arc<T>>> {
        self.living.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
