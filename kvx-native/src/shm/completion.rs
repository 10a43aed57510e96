//! The reports of devices and copying threads to the machine about the end of batches.

use std::sync::{Arc, OnceLock, Weak};

use kvx_core::Result;
use kvx_core::backend::sync::Mutex;

use super::copy::CopyError;

/// Notifies a machine that a batch of one of its flights has ended.
pub(crate) trait BatchEvents: Send + Sync {
    /// Reports that a batch of the flight `number` has ended. If `turn`, the calling thread belongs
    /// to kvx and runs the machine's turn, which saves a wake-up of the reactor's thread.
    fn batch_ended(&self, number: u64, turn: bool);

    /// Reports that a device has opened or closed memory of a peer.
    fn device_reported(&self);
}

/// The machine's reactor, as threads of devices and copying threads reach it.
#[derive(Default)]
pub(crate) struct ReactorHandle(OnceLock<Weak<dyn BatchEvents>>);

impl ReactorHandle {
    /// Sets the reactor when the transport opens.
    pub(crate) fn set(&self, events: Weak<dyn BatchEvents>) {
        let was_unset = self.0.set(events).is_ok();
        debug_assert!(was_unset, "a transport opens once");
    }

    fn batch_ended(&self, number: u64, turn: bool) {
        // Expected: the transport was dropped meanwhile, and its reactor with it.
        if let Some(events) = self.0.get().and_then(Weak::upgrade) {
            events.batch_ended(number, turn);
        }
    }

    /// Reports that a device has opened or closed memory of a peer.
    pub(crate) fn device_reported(&self) {
        // Expected: the transport was dropped meanwhile, and its reactor with it.
        if let Some(events) = self.0.get().and_then(Weak::upgrade) {
            events.device_reported();
        }
    }
}

/// The batches of a flight that have ended and that the machine has not processed.
#[derive(Default)]
pub(crate) struct BatchEnds {
    /// The bytes of each batch, and its result.
    pub(crate) landed: Vec<(u64, Result<(), CopyError>)>,
    /// True if the completion of a batch was dropped; that batch may never end.
    pub(crate) lost: bool,
}

/// The completion of one batch; a batch whose completion is dropped counts as lost.
pub(crate) struct BatchCompletion {
    pub(crate) ends: Arc<Mutex<BatchEnds>>,
    pub(crate) reactor: Arc<ReactorHandle>,
    /// The number of the flight.
    pub(crate) number: u64,
    /// The bytes of the batch; `None` once it was reported.
    pub(crate) bytes: Option<u64>,
}

impl BatchCompletion {
    /// Withdraws a batch that was never begun, as the machine already knows.
    pub(crate) fn withdraw(mut self) {
        self.bytes = None;
    }

    /// Reports the end from the thread of a device.
    pub(crate) fn report(mut self, result: Result<(), CopyError>) {
        self.put(result);
        self.reactor.batch_ended(self.number, false);
    }

    /// Reports the end from a copying thread, which then runs a turn of the machine.
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
