//! Makes what network cards have written to devices visible to them, before data counts as arrived.

use std::sync::Arc;

use crate::DeviceAccess;
use crate::ticket::Ticket;

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
