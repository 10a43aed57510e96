//! How devices and copying threads report batches to the machine.

use std::sync::{Arc, OnceLock, Weak};

use kvx_core::Result;
use kvx_core::backend::sync::Mutex;

use super::copy::CopyError;

/// Tells a machine that a batch of one of its flights has ended.
pub(crate) trait BatchEvents: Send + Sync {
    /// A batch of the flight `number` has ended. `turn`: the calling thread is ours and takes the
    /// machine's turn, which saves the reactor's thread a wake-up.
    fn batch_ended(&self, number: u64, turn: bool);
}

/// The way to the machine from the thread of a device, or one that copies.
#[derive(Default)]
pub(crate) struct ReactorHandle(OnceLock<Weak<dyn BatchEvents>>);

impl ReactorHandle {
    /// Sets it, when the transport opens.
    pub(crate) fn set(&self, events: Weak<dyn BatchEvents>) {
        let was_unset = self.0.set(events).is_ok();
        debug_assert!(was_unset, "a transport opens once");
    }

    fn batch_ended(&self, number: u64, turn: bool) {
        // Expected: no reactor any more, as the transport was dropped meanwhile.
        if let Some(events) = self.0.get().and_then(Weak::upgrade) {
            events.batch_ended(number, turn);
        }
    }
}

/// Batches of a flight that have ended, until the machine takes note of them.
#[derive(Default)]
pub(crate) struct BatchEnds {
    /// The bytes of each, and its result.
    pub(crate) landed: Vec<(u64, Result<(), CopyError>)>,
    /// True if the completion of one was dropped: that batch may never end.
    pub(crate) lost: bool,
}

/// Reports the end of one batch; a batch whose completion is dropped counts as lost.
pub(crate) struct BatchCompletion {
    pub(crate) ends: Arc<Mutex<BatchEnds>>,
    pub(crate) reactor: Arc<ReactorHandle>,
    /// The flight's.
    pub(crate) number: u64,
    /// `None`: reported.
    pub(crate) bytes: Option<u64>,
}

impl BatchCompletion {
    /// It was not begun, and the machine knows.
    pub(crate) fn withdraw(mut self) {
        self.bytes = None;
    }

    /// From the thread of a device.
    pub(crate) fn report(mut self, result: Result<(), CopyError>) {
        self.put(result);
        self.reactor.batch_ended(self.number, false);
    }

    /// Reports the end from a copying thread, which then has a turn of the machine.
    pub(crate) fn report_and_turn(mut self, result: Result<(), CopyError>) {
        self.put(result);
        self.reactor.batch_ended(self.number, true);
    }

    /// Records the end without waking the machine: the report of the flight's next batch, which
    /// follows at once, covers both.
    pub(crate) fn record(mut self, result: Result<(), CopyError>) {
        self.put(result);
    }

    fn put(&mut self, result: Result<(), CopyError>) {
        if let Some(bytes) = self.bytes.take() {
            self.ends.lock().landed.push((bytes, result));
        }
    }
}

impl Drop for BatchCompletion {
    fn drop(&mut self) {
        if self.bytes.is_some() {
            self.ends.lock().lost = true;
            self.reactor.batch_ended(self.number, false);
        }
    }
}
