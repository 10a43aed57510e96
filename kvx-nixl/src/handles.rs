//! Numbers instead of pointers: a handle that NIXL passes again after its object has ended is
//! detected.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_core::backend::sync::Mutex;

/// The value of an opaque pointer in NIXL. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub(crate) struct NixlHandle(pub(crate) u64);

/// The objects that NIXL holds by handles.
pub(crate) struct Handles<T> {
    held: Mutex<HashMap<NixlHandle, Arc<T>>>,
    last: AtomicU64,
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Handles { held: Mutex::new(HashMap::new()), last: AtomicU64::new(0) }
    }
}

impl<T> Handles<T> {
    pub(crate) fn add(&self, thing: T) -> NixlHandle {
        let handle = NixlHandle(self.last.fetch_add(1, Ordering::Relaxed) + 1);
        self.held.lock().insert(handle, Arc::new(thing));
        handle
    }

    pub(crate) fn get(&self, handle: NixlHandle) -> Option<Arc<T>> {
        self.held.lock().get(&handle).cloned()
    }

    pub(crate) fn remove(&self, handle: NixlHandle) -> Option<Arc<T>> {
        self.held.lock().remove(&handle)
    }

    /// Returns whether `is` is true for any of the things that have a handle.
    pub(crate) fn any(&self, is: impl Fn(&T) -> bool) -> bool {
        self.held.lock().values().any(|thing| is(thing))
    }

    /// Removes and returns those for which `gone` is true.
    pub(crate) fn extract(&self, gone: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        self.held.lock().extract_if(|_, thing| gone(thing)).map(|(_, thing)| thing).collect()
    }
}
