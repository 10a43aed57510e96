//! The machine's part of opening and closing memory of peers' devices.

use std::sync::Arc;

use kvx_backend::control::ControlMessage;
use kvx_backend::reactor::Outbox;
use kvx_core::backend::IpcHandle;
use kvx_core::{DeviceAccess, DeviceId, ErrorKind, RegionId};

use super::error::error;
use super::machine::Machine;
use super::memory::{CopyMethod, CopySource, PeerRegion};
use super::openings::{Closing, DeviceReport, OpenedMemory, Opening, RegionPurpose, open_memory};

/// The limit for regions that devices open for connections that have ended. Each keeps descriptors,
/// and peers that connect again and again must not exhaust them while a device waits.
const MAX_ABANDONED: usize = 64;

impl Machine {
    /// Lets a device open a region of a peer, and reads no further message of the peer until then.
    pub(crate) fn open_on_device(
        &mut self,
        at: usize,
        (id, len): (RegionId, u64),
        purpose: RegionPurpose,
        owner: DeviceId,
        handle: IpcHandle,
    ) {
        self.connections[at].pause(&self.poller);
        let is_full = self.openings.count_abandoned_or_at(at) >= MAX_ABANDONED;
        let process = Arc::clone(&self.connections[at].process);
        let opening = Opening { at: Some(at), id, len, purpose };
        let socket = Arc::clone(&self.connections[at].socket);
        let report = self.openings.open(opening, socket, Arc::clone(&self.flights.reactor));
        if is_full {
            return report.end(Err(error(
                ErrorKind::Exhausted,
                format!(
                    "devices still open {MAX_ABANDONED} regions for connections that have ended: \
                     wait for long kernels to end"
                ),
            )));
        }
        open_memory(&self.devices, owner, process, handle, len, report);
    }

    /// Lets a device close what it had open for a connection and was dropped: the region `id`, or
    /// everything.
    pub(crate) fn close_on_device(
        &mut self,
        at: usize,
        id: Option<RegionId>,
        device: &dyn DeviceAccess,
    ) {
        let closing = Closing { at: Some(at), id };
        let socket = Arc::clone(&self.connections[at].socket);
        let reactor = Arc::clone(&self.flights.reactor);
        device.after_closes(self.openings.close(closing, socket, reactor));
    }

    /// Closes all memory that devices had open for a connection. Returns true if that takes time.
    pub(crate) fn close_devices(&mut self, at: usize) -> bool {
        for device in std::mem::take(&mut self.connections[at].devices) {
            self.close_on_device(at, None, &*device);
        }
        self.openings.any_at(at)
    }

    /// Processes the reports of devices.
    pub(crate) fn take_device_reports(&mut self, out: &mut Outbox) {
        for report in self.openings.take_reports() {
            match report {
                DeviceReport::Opened { number, opened } => self.take_opened(number, opened, out),
                DeviceReport::Closed { number } => self.take_closed(number, out),
            }
        }
    }

    fn take_opened(&mut self, number: u64, opened: OpenedMemory, out: &mut Outbox) {
        let Some(Opening { at, id, len, purpose }) = self.openings.take_opening(number) else {
            return;
        };
        // Expected: the connection has ended, and with it the use of the memory.
        let Some(at) = at else { return };
        let connection = &mut self.connections[at];
        connection.resume(&self.poller);
        let held = opened.into_memory().map(|memory| {
            let devices = &mut connection.devices;
            if let Some(device) = memory.device_access()
                && !devices.iter().any(|known| Arc::ptr_eq(known, device))
            {
                devices.push(Arc::clone(device));
            }
            let (base, method) = (memory.address(), CopyMethod::Device(Arc::new(memory)));
            PeerRegion { id, len, place: CopySource { base, method } }
        });
        if connection.is_leaving() {
            drop(held);
            return self.release_unused(at, out);
        }
        self.take_held(at, id, purpose, held, out);
    }

    fn take_closed(&mut self, number: u64, out: &mut Outbox) {
        let Some(Closing { at, id }) = self.openings.take_closing(number) else { return };
        // Expected: the connection has ended meanwhile.
        let Some(at) = at else { return };
        if let Some(id) = id {
            self.connections[at].send(&self.poller, ControlMessage::Released { id });
        }
        self.release_unused(at, out);
    }
}
