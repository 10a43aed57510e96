//! How devices and copying threads report batches to the machine.

use std::sync::{Arc, OnceLock, Weak};

use kvx_core::Result;
use kvx_core::sync::{Mutex, MutexGuard};

use super::copy::Stopped;

/// Wakes the machine when a batch of a flight has ended.
pub(crate) trait BatchEvents: Send + Sync {
    /// A batch of the flight `number` has ended.
    fn batch_ended(&self, number: u64);

    /// The same, from a thread of ours, which takes a turn of the machine and saves the reactor's a
    /// wake-up.
    fn batch_ended_and_turn(&self, number: u64);
}

/// The way to the machine from the thread of a device, or one that copies.
#[derive(Default)]
pub(crate) struct ReactorHandle(OnceLock<Weak<dyn BatchEvents>>);

impl ReactorHandle {
    /// Sets it, once, when the transport opens.
    pub(crate) fn set(&self, events: Weak<dyn BatchEvents>) {
        let was_unset = self.0.set(events).is_ok();
        debug_assert!(was_unset, "a transport opens once");
    }

    fn events(&self) -> Option<Arc<dyn BatchEvents>> {
        self.0.get().and_then(Weak::upgrade)
    }
}

/// What devices and threads have said of batches.
#[derive(Default)]
pub(crate) struct BatchEnds {
    pub(crate) landed: Vec<(u64, Result<(), Stopped>)>,
    pub(crate) lost: bool,
}

/// Tells the machine of a batch.
pub(crate) struct BatchCompletion {
    pub(crate) told: Arc<Mutex<BatchEnds>>,
    pub(crate) home: Arc<ReactorHandle>,
    pub(crate) number: u64,
    /// `None`: told.
    pub(crate) bytes: Option<u64>,
}

impl BatchCompletion {
    fn told(&self) -> MutexGuard<'_, BatchEnds> {
        self.told.lock()
    }

    /// It was not begun, and the machine knows.
    pub(crate) fn withdraw(mut self) {
        self.bytes = None;
    }

    pub(crate) fn tell(mut self, result: Result<(), Stopped>) {
        self.put(result);
        if let Some(events) = self.home.events() {
            events.batch_ended(self.number);
        }
    }

    /// From a thread of ours.
    pub(crate) fn tell_and_turn(mut self, result: Result<(), Stopped>) {
        self.put(result);
        if let Some(events) = self.home.events() {
            events.batch_ended_and_turn(self.number);
        }
    }

    /// Another of the flight follows at once, and is told of.
    pub(crate) fn note(mut self, result: Result<(), Stopped>) {
        self.put(result);
    }

    fn put(&mut self, result: Result<(), Stopped>) {
        if let Some(bytes) = self.bytes.take() {
            self.told().landed.push((bytes, result));
        }
    }
}

impl Drop for BatchCompletion {
    fn drop(&mut self) {
        if self.bytes.is_some() {
            self.told().lost = true;
            if let Some(events) = self.home.events() {
                events.batch_ended(self.number);
            }
        }
    }
}
