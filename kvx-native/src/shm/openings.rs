//! Memory of peers' devices. Devices open and close it on threads of their own, because their
//! drivers may wait for all work of the device in these calls.
//!
//! While a device opens a region, the machine reads no further message of that peer, so that
//! messages keep their order. A region counts as released once its device has closed it: its owner
//! must not free it earlier.

use std::collections::HashMap;
use std::sync::Arc;

use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{IpcHandle, MemoryReceiver, Ticket};
use kvx_core::{DeviceAccess, DeviceId, ErrorKind, Memory, RegionId, Result};

use super::completion::ReactorHandle;
use super::error::{NAME, error};
use super::host::PeerProcess;
use super::memory::openers;
use super::shared_link::Import;
use super::socket::ConnectionSocket;

/// The use of a peer's region at this end.
pub(crate) enum RegionPurpose {
    /// Reads, over the import of this number.
    Import { number: u64, import: Arc<Import> },
    /// Pulls of the peer's writes.
    Lent,
}

/// A region that a device is opening.
pub(crate) struct Opening {
    /// The connection; `None` once it has ended.
    pub(crate) at: Option<usize>,
    pub(crate) id: RegionId,
    pub(crate) len: u64,
    pub(crate) purpose: RegionPurpose,
}

/// Memory that a device is closing.
pub(crate) struct Closing {
    /// The connection; `None` once it has ended.
    pub(crate) at: Option<usize>,
    /// The region that the peer recalls; `None` at the end of a connection.
    pub(crate) id: Option<RegionId>,
}

/// A report of a device.
pub(crate) enum DeviceReport {
    Opened { number: u64, opened: OpenedMemory },
    Closed { number: u64 },
}

/// The result of an opening. If it is not used because its connection has ended, the socket of the
/// connection ends after the memory is closed.
pub(crate) struct OpenedMemory {
    /// `None` once it was taken.
    opened: Option<Result<Memory>>,
    socket: Arc<ConnectionSocket>,
}

impl OpenedMemory {
    /// Returns the memory for the use of its connection.
    pub(crate) fn into_memory(mut self) -> Result<Memory> {
        self.opened.take().unwrap_or_else(|| {
            Err(error(
                ErrorKind::Native,
                "a device lost the request to open a peer's memory: report this as a bug of its \
                 crate",
            ))
        })
    }
}

impl Drop for OpenedMemory {
    fn drop(&mut self) {
        let Some(Ok(memory)) = self.opened.take() else { return };
        let device = memory.device_access().cloned();
        drop(memory);
        if let Some(device) = device {
            let socket = Arc::clone(&self.socket);
            device.after_closes(Ticket::new(move |closed| match closed {
                Ok(()) => drop(socket),
                Err(why) => keep_open(socket, &why),
            }));
        }
    }
}

/// Never ends the socket: the peer keeps its memory, which is not known to be closed.
fn keep_open(socket: Arc<ConnectionSocket>, why: &kvx_core::Error) {
    tracing::error!(%why, "SHM: a device did not close a peer's memory");
    std::mem::forget(socket);
}

/// The reports that the machine has not processed.
#[derive(Default)]
struct DeviceReports(Mutex<Vec<DeviceReport>>);

/// The openings and closings of a machine, by number.
#[derive(Default)]
pub(crate) struct Openings {
    next: u64,
    opening: HashMap<u64, Opening>,
    closing: HashMap<u64, Closing>,
    reports: Arc<DeviceReports>,
}

impl Openings {
    /// Records that a device opens a region, and returns the means to report the end.
    pub(crate) fn open(
        &mut self,
        opening: Opening,
        socket: Arc<ConnectionSocket>,
        reactor: Arc<ReactorHandle>,
    ) -> OpeningReport {
        let number = self.number();
        self.opening.insert(number, opening);
        OpeningReport { number, reports: Arc::clone(&self.reports), reactor, socket, opened: None }
    }

    /// Records that a device closes memory, and returns the ticket for the end. The socket does not
    /// end before.
    pub(crate) fn close(
        &mut self,
        closing: Closing,
        socket: Arc<ConnectionSocket>,
        reactor: Arc<ReactorHandle>,
    ) -> Ticket {
        let number = self.number();
        self.closing.insert(number, closing);
        let reports = Arc::clone(&self.reports);
        Ticket::new(move |closed| match closed {
            Ok(()) => {
                drop(socket);
                reports.0.lock().push(DeviceReport::Closed { number });
                reactor.device_reported();
            }
            Err(why) => keep_open(socket, &why),
        })
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Returns the reports that the machine has not processed.
    pub(crate) fn take_reports(&self) -> Vec<DeviceReport> {
        std::mem::take(&mut *self.reports.0.lock())
    }

    /// Ends an opening.
    pub(crate) fn take_opening(&mut self, number: u64) -> Option<Opening> {
        let opening = self.opening.remove(&number);
        debug_assert!(opening.is_some(), "a device reports an opening once");
        opening
    }

    /// Ends a closing.
    pub(crate) fn take_closing(&mut self, number: u64) -> Option<Closing> {
        let closing = self.closing.remove(&number);
        debug_assert!(closing.is_some(), "a device reports a closing once");
        closing
    }

    /// Returns the number of openings whose connection has ended, or is this one: the last messages
    /// of a peer are read together.
    pub(crate) fn count_abandoned_or_at(&self, at: usize) -> usize {
        self.opening.values().filter(|opening| opening.at.is_none_or(|its| its == at)).count()
    }

    /// Returns true if a device opens or closes memory.
    pub(crate) fn any(&self) -> bool {
        !self.opening.is_empty() || !self.closing.is_empty()
    }

    /// Returns true if a device opens or closes memory for this connection.
    pub(crate) fn any_at(&self, at: usize) -> bool {
        let mut opening = self.opening.values().map(|opening| opening.at);
        let mut closing = self.closing.values().map(|closing| closing.at);
        opening.any(|its| its == Some(at)) || closing.any(|its| its == Some(at))
    }

    /// Records that a connection has ended.
    pub(crate) fn detach(&mut self, at: usize) {
        let opening = self.opening.values_mut().map(|opening| &mut opening.at);
        let closing = self.closing.values_mut().map(|closing| &mut closing.at);
        for its in opening.chain(closing).filter(|its| **its == Some(at)) {
            *its = None;
        }
    }
}

/// Reports the end of an opening, also if the device loses it.
pub(crate) struct OpeningReport {
    number: u64,
    reports: Arc<DeviceReports>,
    reactor: Arc<ReactorHandle>,
    socket: Arc<ConnectionSocket>,
    opened: Option<Result<Memory>>,
}

impl OpeningReport {
    pub(crate) fn end(mut self, opened: Result<Memory>) {
        self.opened = Some(opened);
    }
}

impl Drop for OpeningReport {
    fn drop(&mut self) {
        let socket = Arc::clone(&self.socket);
        let opened = OpenedMemory { opened: self.opened.take(), socket };
        self.reports.0.lock().push(DeviceReport::Opened { number: self.number, opened });
        self.reactor.device_reported();
    }
}

/// A request to open memory of a peer with the first device that can.
struct OpenRequest {
    openers: std::vec::IntoIter<Arc<dyn DeviceAccess>>,
    owner: DeviceId,
    process: Arc<PeerProcess>,
    handle: IpcHandle,
    len: usize,
    done: MemoryReceiver,
}

/// Opens memory of a peer's device with the first of `devices` that can, without waiting for it.
pub(crate) fn open_memory(
    devices: &[Arc<dyn DeviceAccess>],
    owner: DeviceId,
    process: Arc<PeerProcess>,
    handle: IpcHandle,
    len: u64,
    report: OpeningReport,
) {
    let len = usize::try_from(len)
        .map_err(|_| error(ErrorKind::Malformed, "a peer's region exceeds the address space"));
    match len.and_then(|len| Ok((len, openers(devices, None, owner)?))) {
        Ok((len, openers)) => {
            let openers = openers.into_iter().cloned().collect::<Vec<_>>().into_iter();
            let done: MemoryReceiver = Box::new(move |opened| report.end(opened));
            OpenRequest { openers, owner, process, handle, len, done }.ask_next(None);
        }
        Err(why) => report.end(Err(why)),
    }
}

impl OpenRequest {
    /// Asks the next device. `refused` is the error of the first one, which is the most likely to
    /// open the memory, so that its error is the most useful.
    fn ask_next(mut self, refused: Option<kvx_core::Error>) {
        let Some(device) = self.openers.next() else {
            let why = refused.unwrap_or_else(|| {
                error(ErrorKind::Unsupported, "no device can open the peer's memory")
            });
            return (self.done)(Err(why.with_backend(NAME)));
        };
        let (owner, len) = (self.owner, self.len);
        let (process, handle) = (Arc::clone(&self.process), self.handle.clone());
        let next: MemoryReceiver = Box::new(move |opened| match opened {
            Ok(memory) => (self.done)(Ok(memory)),
            Err(why) => self.ask_next(refused.or(Some(why))),
        });
        device.open_later(owner, process.of_link(), &handle, len, next);
    }
}
