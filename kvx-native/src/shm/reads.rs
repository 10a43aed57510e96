//! Reads: the local thread copies from the peer's memory into local memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::ThreadId;

use kvx_backend::control::errors::{cancelled, closed, malformed};
use kvx_backend::control::{ControlMessage as Shared, ImportState};
use kvx_backend::reactor::{Outbox, SLICE};
use kvx_core::backend::{BoundPlan, INLINE_BYTES, INLINE_SEGMENTS};
use kvx_core::{ErrorKind, Op, Result, TransferId};

use super::connection::{Connection, PendingTransfer};
use super::copy::{MAX_BATCH, ReadPieces};
use super::copy_threads::Sides;
use super::error::{NAME, error};
use super::flights::{Flight, FlightPurpose, Load};
use super::machine::Machine;
use super::memory::{CopySource, PeerRegion};
use super::messages::{Message, RegionAccess};
use super::openings::RegionPurpose;
use super::shared_link::{Import, SharedLink};
use super::work::{Read, Work};

/// The state of the grants for a plan's remote regions.
enum Grants {
    All(Vec<CopySource>),
    Missing,
}

fn grants(connection: &Connection, plan: &BoundPlan) -> Result<Grants> {
    let mut places = Vec::with_capacity(plan.remotes().len());
    for remote in plan.remotes() {
        let any: &dyn std::any::Any = &*remote.region;
        let import =
            any.downcast_ref::<Import>().and_then(|import| connection.imports.get(import.number));
        match import {
            Some(ImportState::Granted((held, _))) => places.push(held.place.clone()),
            Some(ImportState::Refused(reason)) => return Err(reason.clone()),
            Some(ImportState::Pending(_)) => return Ok(Grants::Missing),
            None => return Err(closed().with_backend(NAME)),
        }
    }
    Ok(Grants::All(places))
}

impl Machine {
    /// Starts a transfer. If this is the thread `inline_on`, which posted it, a small read may be
    /// done at once. `again` requests refused regions once more; a transfer that has already waited
    /// for them does not.
    pub(crate) fn post(
        &mut self,
        link: &Arc<SharedLink>,
        transfer: PendingTransfer,
        inline_on: Option<ThreadId>,
        again: bool,
        out: &mut Outbox,
    ) {
        let Some(at) = self.links.get(&link.id).copied().filter(|at| self.connections[*at].is_up())
        else {
            return out.settle(transfer.done, Err(link.gone()));
        };
        match grants(&self.connections[at], &transfer.plan) {
            Err(reason) if again && reason.kind() == ErrorKind::Exhausted => {
                self.ask_again(link, at, &transfer.plan);
                self.connections[at].waiting.push(transfer);
            }
            Err(reason) => out.settle(transfer.done, Err(reason)),
            Ok(Grants::Missing) => self.connections[at].waiting.push(transfer),
            Ok(Grants::All(places)) => match transfer.plan.op() {
                Op::Read => self.start_read(at, transfer, places, inline_on, out),
                Op::Write => {
                    // On the poster's thread: sends the first message and does nothing else.
                    self.lent_turn |= inline_on == Some(std::thread::current().id());
                    let PendingTransfer { plan, id, done } = transfer;
                    self.connections[at].start_write(&self.poller, &self.regions, id, plan, done);
                    self.pump(at, out);
                }
            },
        }
    }

    /// Posts again the transfers that waited for regions of this connection.
    pub(crate) fn post_waiting(&mut self, at: usize, out: &mut Outbox) {
        // Expected: the target's side posts no transfers.
        let Some(link) = self.connections[at].link.clone() else { return };
        for transfer in std::mem::take(&mut self.connections[at].waiting) {
            self.post(&link, transfer, None, false, out);
        }
    }

    /// Requests once more the regions for which this process lacked resources, which may be
    /// available now.
    fn ask_again(&mut self, link: &Arc<SharedLink>, at: usize, plan: &BoundPlan) {
        for remote in plan.remotes() {
            let any: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(&remote.region) as _;
            let Ok(import) = any.downcast::<Import>() else {
                debug_assert!(false, "`grants` rejects a plan with a region of another transport");
                continue;
            };
            let known = self.connections[at].imports.get(import.number);
            if matches!(known, Some(ImportState::Refused(reason)) if reason.kind() == ErrorKind::Exhausted)
            {
                self.import(link, import);
            }
        }
    }

    fn start_read(
        &mut self,
        at: usize,
        transfer: PendingTransfer,
        places: Vec<CopySource>,
        inline_on: Option<ThreadId>,
        out: &mut Outbox,
    ) {
        let PendingTransfer { plan, id, done } = transfer;
        let size = plan.size();
        let pieces = ReadPieces(plan.segments(MAX_BATCH));
        let small = size.bytes <= INLINE_BYTES && size.segments <= INLINE_SEGMENTS;
        let inline = small && inline_on == Some(std::thread::current().id());
        // On the poster's thread: does this read and nothing else.
        self.lent_turn |= inline;
        if let Some(mover) = Load::mover(&places, plan.locals().iter().map(|local| &local.memory)) {
            let targets = plan.locals().iter().map(|local| Arc::clone(&local.memory)).collect();
            let load = Load {
                mover,
                pieces: Box::new(pieces),
                sides: Arc::new(Sides { places, targets }),
                from: plan.remotes().iter().map(|remote| remote.id).collect(),
                bytes: size.bytes,
            };
            let number = self.start_flight(at, FlightPurpose::Read { id, done: Some(done) }, load);
            if inline {
                self.flight_turn(number, out);
            }
            return;
        }
        let targets = plan.locals().iter().map(|local| local.memory.address()).collect();
        let read = Box::new(Read { at, id, pieces, places, targets, left: size.bytes, done });
        if inline {
            self.read_turn(read, out);
        } else {
            self.turns.push(Work::Read(read), size.bytes);
        }
    }

    /// Runs one turn of a read. Returns the number of bytes moved.
    pub(crate) fn read_turn(&mut self, mut read: Box<Read>, out: &mut Outbox) -> u64 {
        // SAFETY: core checked the plan against the lengths of its regions, and `take_grant`
        // checked the remote lengths. The plan keeps the local memory until the ticket settles, and
        // the places are mapped (`mover`) and stay so.
        let turn =
            unsafe { self.copier.turn(&mut read.pieces, &read.places, &read.targets, SLICE) };
        read.left = read.left.saturating_sub(turn.moved);
        if turn.finished || read.left == 0 {
            out.settle(read.done, Ok(()));
        } else {
            let left = read.left;
            self.turns.push(Work::Read(read), left);
        }
        turn.moved
    }

    /// Stops a transfer as soon as possible.
    pub(crate) fn cancel(&mut self, link: &Arc<SharedLink>, id: TransferId, out: &mut Outbox) {
        // Expected: the transfer ended with its link.
        let Some(&at) = self.links.get(&link.id) else { return };
        let cancelled = || cancelled().with_backend(NAME);
        let stopped = self
            .turns
            .extract(|work| matches!(work, Work::Read(read) if read.at == at && read.id == id));
        for work in stopped {
            work.settle(cancelled(), out);
        }
        let its = |flight: &Flight| {
            flight.at == Some(at)
                && matches!(&flight.purpose, FlightPurpose::Read { id: read, .. } if *read == id)
        };
        self.stop_flights(its, &cancelled(), out);
        // Expected: the connection waited only for the flight that was stopped.
        let Some(connection) = self.connections.get_mut(at) else { return };
        if let Some(position) = connection.waiting.iter().position(|waiting| waiting.id == id) {
            let waiting = connection.waiting.swap_remove(position);
            out.settle(waiting.done, Err(cancelled()));
        }
        if connection.writes.contains(id.0) {
            match connection.writes.fail(id.0, cancelled()) {
                Some((done, result)) => out.settle(done, result),
                None => connection.send(&self.poller, Message::Cancel { write: id.0 }),
            }
            self.note_awaiting(at);
        }
    }

    /// Requests a region of the peer.
    pub(crate) fn import(&mut self, link: &Arc<SharedLink>, import: Arc<Import>) {
        // Expected: the link has ended, or is not up; a transfer that uses the region fails.
        let Some(&at) = self.links.get(&link.id) else { return };
        let connection = &mut self.connections[at];
        if !connection.is_up() {
            return;
        }
        let want = Shared::Want { import: import.number, id: import.id, key: import.key };
        connection.imports.want(import.number, import);
        connection.send(&self.poller, want);
        self.note_awaiting(at);
    }

    /// Takes the owner's answer to an import. Returns `Malformed` if the import was not requested.
    pub(crate) fn take_grant(
        &mut self,
        at: usize,
        number: u64,
        answer: Result<RegionAccess>,
        file: Option<OwnedFd>,
        out: &mut Outbox,
    ) -> Result<()> {
        let Some(ImportState::Pending(import)) = self.connections[at].imports.get(number) else {
            return Err(malformed("an answer for a region that was not requested"));
        };
        let import = Arc::clone(import);
        let id = import.id;
        let fits = answer.and_then(|access| {
            if access.len == import.len {
                return Ok(access);
            }
            Err(error(
                ErrorKind::OutOfBounds,
                format!(
                    "region {id} has {} bytes, but its metadata says {}: fetch the peer's metadata \
                     again",
                    access.len, import.len
                ),
            ))
        });
        match fits {
            Ok(access) => {
                let purpose = RegionPurpose::Import { number, import };
                self.take_region(at, id, purpose, access, file, out);
            }
            Err(why) => self.settle_import(at, number, import, Err(why), out),
        }
        Ok(())
    }

    /// Settles an import, and posts the transfers that waited for it.
    pub(crate) fn settle_import(
        &mut self,
        at: usize,
        number: u64,
        import: Arc<Import>,
        held: Result<PeerRegion>,
        out: &mut Outbox,
    ) {
        let connection = &mut self.connections[at];
        if connection.imports.take_answer(number).is_err() {
            return; // the peer answered twice, and then ended
        }
        if let Ok(held) = &held
            && let Some(window) = connection.window(held)
        {
            import.shutter.open(window);
        }
        connection.imports.settle(number, held.map(|held| (held, import)));
        self.note_awaiting(at);
        self.post_waiting(at, out);
    }
}
