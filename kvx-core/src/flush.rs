//! Makes what network cards have written to devices visible to them, before data counts as arrived.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::DeviceAccess;
use crate::sync::Mutex;
use crate::ticket::Ticket;

/// The devices that are flushed before a notification is delivered.
#[derive(Default)]
pub(crate) struct FlushedDevices {
    any: AtomicBool,
    devices: Mutex<Vec<Arc<dyn DeviceAccess>>>,
}

impl FlushedDevices {
    /// Adds a device, if it needs a flush.
    pub(crate) fn note(&self, device: Option<&Arc<dyn DeviceAccess>>) {
        let mut devices = self.devices.lock();
        note(&mut devices, device);
        self.any.store(!devices.is_empty(), Ordering::Release);
    }

    /// Returns true if there are none. Takes no lock.
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Returns the devices. Takes no lock if there are none.
    pub(crate) fn all(&self) -> Vec<Arc<dyn DeviceAccess>> {
        if self.is_empty() { Vec::new() } else { self.devices.lock().clone() }
    }
}

/// Adds a device to those to flush, if it needs that and is not among them.
pub(crate) fn note(
    devices: &mut Vec<Arc<dyn DeviceAccess>>,
    device: Option<&Arc<dyn DeviceAccess>>,
) {
    if let Some(device) = device.filter(|device| device.needs_flush())
        && !devices.iter().any(|known| Arc::ptr_eq(known, device))
    {
        devices.push(Arc::clone(device));
    }
}

/// Flushes devices one after the other, and settles `done` after the last one, or with the first
/// error.
pub(crate) fn flush(mut devices: Vec<Arc<dyn DeviceAccess>>, done: Ticket) {
    let Some(device) = devices.pop() else { return done.settle(Ok(())) };
    device.flush(Ticket::new(move |flushed| match flushed {
        Ok(()) => flush(devices, done),
        Err(error) => done.settle(Err(error)),
    }));
}
