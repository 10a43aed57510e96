//! Transfer requests, which only their agent can release.

use std::sync::{Arc, Mutex, PoisonError};

use super::bindings::nixl_xfer_req;

/// A request, which is not in progress unless its owner keeps it. When dropped, it goes to
/// [`UnreleasedRequests`].
pub(crate) struct Request {
    pub(super) raw: nixl_xfer_req,
    unreleased: Arc<UnreleasedRequests>,
}

// SAFETY: a handle; every use of it goes through its agent, which is behind a lock.
unsafe impl Send for Request {}
// SAFETY: a handle; every use of it goes through its agent, which is behind a lock.
unsafe impl Sync for Request {}

impl Request {
    pub(super) fn new(raw: nixl_xfer_req, unreleased: &Arc<UnreleasedRequests>) -> Self {
        Request { raw, unreleased: Arc::clone(unreleased) }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.unreleased.raw.lock().unwrap_or_else(PoisonError::into_inner).push(Raw(self.raw));
    }
}

/// Dropped requests that have not been released yet.
#[derive(Default)]
pub(crate) struct UnreleasedRequests {
    raw: Mutex<Vec<Raw>>,
}

struct Raw(nixl_xfer_req);

// SAFETY: a handle; every use of it goes through its agent, which is behind a lock.
unsafe impl Send for Raw {}

impl UnreleasedRequests {
    pub(super) fn take(&self) -> Vec<nixl_xfer_req> {
        let mut raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        raw.drain(..).map(|raw| raw.0).collect()
    }

    /// Returns whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}
