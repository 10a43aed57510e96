//! The limit for connections of peers: `tcp.max_connections`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvx_core::{ErrorKind, Result};

/// Counts the connections of peers that have proven themselves.
pub(crate) struct ConnectionLimit {
    max: usize,
    taken: AtomicUsize,
}

/// The place of one connection. It is free again once this is dropped.
pub(crate) struct ConnectionPlace(Arc<ConnectionLimit>);

impl ConnectionLimit {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(ConnectionLimit { max, taken: AtomicUsize::new(0) })
    }

    /// Takes a place. Returns `Exhausted` if there is none.
    pub(crate) fn take(self: &Arc<Self>) -> Result<ConnectionPlace> {
        let next = |taken: usize| (taken < self.max).then_some(taken + 1);
        if self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok() {
            return Ok(ConnectionPlace(Arc::clone(self)));
        }
        let max = self.max;
        Err(ErrorKind::Exhausted.because(format!(
            "the peer serves {max} connections already (\"tcp.max_connections\"): raise that, or \
             try later"
        )))
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}
