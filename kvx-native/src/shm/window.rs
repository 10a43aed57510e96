//! A peer's regions as posters use them, and how the machine ends that use.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, TryLockError};

use kvx_core::backend::fork::Private;
use kvx_core::backend::sync::pause_between_looks;

use super::host::PeerProcess;
use super::memory::CopySource;

/// The process whose memory is read, and a socket that shows whether it is still the same one.
#[derive(Debug)]
pub(crate) struct PeerWatch {
    pub(crate) process: Arc<PeerProcess>,
    pub(crate) socket: Private,
}

/// A granted region as posters use it.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) place: CopySource,
    /// The process that owns the memory, unless the memory is mapped here.
    pub(crate) owner: Option<Arc<PeerWatch>>,
}

/// Open while the region may be read. The machine shuts it before it releases the region: no copy
/// begins afterwards, and the machine releases the region once none is in progress. Each copies at
/// most 64 KiB, but may wait long for a page.
#[derive(Debug, Default)]
pub(crate) struct Shutter {
    window: RwLock<Option<Window>>,
    shut: AtomicBool,
}

/// The number of checks for copies in progress before the machine does other work meanwhile.
const LOOKS: u32 = 200;

impl Shutter {
    pub(crate) fn open(&self, window: Window) {
        // Before it is open, readers hold the lock only for a check.
        *self.window.write().unwrap_or_else(PoisonError::into_inner) = Some(window);
    }

    /// Shuts the window. Returns true if no copy is in progress; otherwise the caller checks
    /// [again](Self::is_free).
    pub(crate) fn shut(&self) -> bool {
        self.shut.store(true, Ordering::SeqCst);
        for looks in 0..LOOKS {
            if self.is_free() {
                return true;
            }
            pause_between_looks(looks);
        }
        false
    }

    /// Returns true if no copy is in progress, after [`shut`](Self::shut).
    pub(crate) fn is_free(&self) -> bool {
        match self.window.try_write() {
            Ok(mut window) => drop(window.take()),
            Err(TryLockError::Poisoned(poisoned)) => drop(poisoned.into_inner().take()),
            Err(TryLockError::WouldBlock) => return false,
        }
        true
    }

    /// Returns the open window without waiting; `None` if it is shut or being shut.
    pub(crate) fn look(&self) -> Option<View<'_>> {
        let window = self.window.try_read().ok()?;
        let view = View { window, shut: &self.shut };
        (view.window.is_some() && !view.is_shut()).then_some(view)
    }
}

/// An open window, which does not change while this value lives.
pub(crate) struct View<'a> {
    pub(crate) window: RwLockReadGuard<'a, Option<Window>>,
    shut: &'a AtomicBool,
}

impl View<'_> {
    /// Returns true if the window has been shut meanwhile.
    pub(crate) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::SeqCst)
    }
}
