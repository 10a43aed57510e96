//! Access to regions: grants by the owner, and their end.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvx_backend::control::errors::{closed, malformed, revoked, still_shared};
use kvx_backend::control::{ControlMessage, Refusal};
use kvx_backend::reactor::Outbox;
use kvx_core::backend::{RegionKey, Ticket};
use kvx_core::{ErrorKind, RegionId, Result};

use super::connection::{End, HeldBytesOwner};
use super::error::{NAME, error};
use super::machine::Machine;
use super::memory::{CopyMethod, CopySource, PeerRegion, RevokedRegion, quarantine};
use super::messages::{Location, RegionAccess};
use super::openings::RegionPurpose;
use super::work::{Populate, Work};
use crate::clock;

/// The limit for regions that one peer may lend.
const MAX_LENT: usize = 16 << 10;
/// The limit for lent regions that are mapped here or opened on a device, over all connections of
/// the peer's process. The kernel allows this process 65,530 mappings (`vm.max_map_count`), and
/// starts no thread once they are used up.
const MAX_MAPPINGS: usize = 4096;
/// The bytes of a mapping that one turn makes present.
const POPULATE_STEP: usize = 2 << 20;

/// The interval at which small reads that delay a release are checked.
const LOOK_THROUGH: Duration = Duration::from_millis(5);

impl Machine {
    /// Answers a peer's request to read a local region.
    pub(crate) fn take_want(&mut self, at: usize, import: u64, id: RegionId, key: &RegionKey) {
        let connection = &mut self.connections[at];
        match self.regions.check(id, key) {
            Ok(memory) => {
                connection.granted.grant(id);
                let access = self.regions.access(id, &memory);
                let rest = access.grant_rest();
                let grant = ControlMessage::Grant { import, rest: &rest };
                connection.send_with(&self.poller, grant, access.is_file().then_some(memory));
            }
            Err(refused) => {
                let why = Refusal::from(&refused);
                connection.send(&self.poller, ControlMessage::Deny { import, why });
            }
        }
    }

    /// Takes a region that a peer lends for pulling its writes. Releases one that cannot be opened
    /// at once; the peer lends it again for its next write. Returns `Malformed` for a region that
    /// this end already holds, `Exhausted` for a process that lends too many.
    pub(crate) fn take_lend(
        &mut self,
        at: usize,
        id: RegionId,
        access: RegionAccess,
        file: Option<OwnedFd>,
        out: &mut Outbox,
    ) -> Result<()> {
        let connection = &self.connections[at];
        if connection.lent.len() >= MAX_LENT || matches!(connection.lent.get(id), Some(Ok(_))) {
            return Err(malformed("a peer lends a region twice, or too many regions"));
        }
        let is_mapping = !matches!(access.at, Location::Address(_));
        if is_mapping && self.mappings_lent_by(connection.held_bytes_owner()) >= MAX_MAPPINGS {
            return Err(error(
                ErrorKind::Exhausted,
                format!("the peer's process lends more than {MAX_MAPPINGS} pools"),
            ));
        }
        self.take_region(at, id, RegionPurpose::Lent, access, file, out);
        Ok(())
    }

    /// Opens a region as its owner describes it, with the file that came with the description.
    pub(crate) fn take_region(
        &mut self,
        at: usize,
        id: RegionId,
        purpose: RegionPurpose,
        access: RegionAccess,
        file: Option<OwnedFd>,
        out: &mut Outbox,
    ) {
        let len = access.len;
        match access.at {
            Location::Device { device, handle } => {
                self.open_on_device(at, (id, len), purpose, device, handle);
            }
            Location::Address(base) => {
                let place = CopySource { base, method: CopyMethod::Remote };
                self.take_held(at, id, purpose, Ok(PeerRegion { id, len, place }), out);
            }
            Location::File => {
                self.take_held(at, id, purpose, PeerRegion::of_file(id, len, file), out);
            }
        }
    }

    /// Takes a region that was opened, or could not be.
    pub(crate) fn take_held(
        &mut self,
        at: usize,
        id: RegionId,
        purpose: RegionPurpose,
        held: Result<PeerRegion>,
        out: &mut Outbox,
    ) {
        if let Ok(held) = &held {
            self.populate(at, held);
        }
        match purpose {
            RegionPurpose::Import { number, import } => {
                self.settle_import(at, number, import, held, out);
            }
            RegionPurpose::Lent => {
                // An unfit region is refused when a write names it; other writes continue.
                if held.is_err() {
                    self.connections[at].send(&self.poller, ControlMessage::Released { id });
                }
                self.connections[at].lent.insert(id, held);
            }
        }
    }

    /// Returns the number of mappings of regions that a process lends.
    fn mappings_lent_by(&self, owner: Option<HeldBytesOwner>) -> usize {
        let its = self.connections.iter().filter(|(_, other)| other.held_bytes_owner() == owner);
        its.map(|(_, connection)| connection.lent.mappings()).sum()
    }

    /// Schedules making a new mapping's pages present while the machine is idle, so that transfers
    /// do not have to.
    pub(crate) fn populate(&mut self, at: usize, held: &PeerRegion) {
        if let CopyMethod::Mapped(mapping) = &held.place.method {
            let populate = Populate { at, id: held.id, mapping: Arc::clone(mapping), from: 0 };
            self.populates.push_back(populate);
        }
    }

    /// Makes some pages present. Returns the number of steps.
    pub(crate) fn populate_turn(&mut self) -> usize {
        let Some(mut populate) = self.populates.pop_front() else { return 0 };
        if let Some(next) = populate.mapping.populate(populate.from, POPULATE_STEP) {
            populate.from = next;
            self.populates.push_back(populate);
        }
        1
    }

    /// Revokes a local region: stops granting it, and asks all peers that hold it to release it.
    pub(crate) fn revoke(&mut self, region: RevokedRegion, done: Ticket, out: &mut Outbox) {
        let id = region.id;
        let why = revoked(id).with_backend(NAME);
        self.stop_pulls(|pull| pull.writes(id), &why);
        self.stop_flights(|flight| flight.ours().contains(&id), &why, out);
        let mut waiting = HashSet::new();
        for (at, connection) in &mut self.connections {
            if connection.granted.holds(id) {
                connection.send(&self.poller, ControlMessage::Recall { id });
                waiting.insert(at);
            }
        }
        if self.flights.has_lost(id) {
            return quarantine(region, done);
        }
        self.recalls.begin(id, waiting, (region, done));
        self.settle_recalls(out);
    }

    /// Settles the revocations that no longer wait for a peer or a flight.
    pub(crate) fn settle_recalls(&mut self, out: &mut Outbox) {
        for (region, done) in self.recalls.take_done(|id| self.flights.any_writes(id)) {
            drop(region);
            out.settle(done, Ok(()));
        }
    }

    /// Records that a peer has released a local region. Returns `Malformed` if the peer did not
    /// hold it.
    pub(crate) fn take_released(
        &mut self,
        at: usize,
        id: RegionId,
        out: &mut Outbox,
    ) -> Result<()> {
        self.connections[at].granted.release(id)?;
        self.confirm(at, Some(id), out);
        Ok(())
    }

    /// Records that the peer of a connection has released one region, or all of them.
    pub(crate) fn confirm(&mut self, at: usize, id: Option<RegionId>, out: &mut Outbox) {
        self.recalls.release(&at, id);
        self.settle_recalls(out);
    }

    /// Takes the owner's recall of a region that this end was granted or lent: releases the region
    /// and confirms that.
    pub(crate) fn take_recall(&mut self, at: usize, id: RegionId, out: &mut Outbox) {
        let reason = revoked(id).with_backend(NAME);
        self.stop_pulls(|pull| pull.at == at && pull.reads(id), &reason);
        let stopped = self.turns.extract(|work| match work {
            Work::Read(read) => read.at == at && read.reads(id),
            Work::Pull(_) | Work::Flight(_) => false,
        });
        self.populates.retain(|populate| populate.at != at || populate.id != id);
        for work in stopped {
            work.settle(reason.clone(), out);
        }
        let connection = &mut self.connections[at];
        let device = connection.device_of(id);
        if let Some(Err(_)) = connection.lent.remove(id) {
            return; // it was released already
        }
        connection.shut_windows(|held| held.id == id);
        connection.imports.recall(|(held, _)| held.id == id, &reason);
        connection.releasing.insert(id, device);
        self.stop_flights(|flight| flight.reads(at, id), &reason, out);
        self.release_unused(at, out);
        self.post_waiting(at, out);
    }

    /// Confirms the release of recalled regions that no local copy reads any more. Ends a
    /// connection that has waited for that.
    pub(crate) fn release_unused(&mut self, at: usize, out: &mut Outbox) {
        // Expected: the flight outlived its connection, or ended with it.
        let Some(connection) = self.connections.get_mut(at) else { return };
        let flights = &self.flights;
        let mut landed: Vec<RegionId> = connection.releasing.keys().copied().collect();
        landed.retain(|id| !flights.any_reads(at, *id) && !connection.has_busy_windows(Some(*id)));
        for id in landed {
            let connection = &mut self.connections[at];
            match connection.releasing.remove(&id).flatten() {
                Some(device) => self.close_on_device(at, Some(id), &*device),
                None => connection.send(&self.poller, ControlMessage::Released { id }),
            }
        }
        let (connection, flights) = (&mut self.connections[at], &self.flights);
        if connection.has_busy_windows(None) {
            self.look_by(clock::now() + LOOK_THROUGH);
        } else if connection.is_leaving() && !flights.any_at(at) {
            self.end(at, closed().with_backend(NAME), End::Ours, None, out);
        }
    }

    /// Does the same for all connections where small reads delayed a release.
    pub(crate) fn release_busy_windows(&mut self, out: &mut Outbox) {
        let held_up: Vec<usize> = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.had_busy_windows())
            .map(|(at, _)| at)
            .collect();
        held_up.into_iter().for_each(|at| self.release_unused(at, out));
    }

    /// Ends the table of regions with the machine: regions that peers have not released are never
    /// freed.
    pub(crate) fn keep_unproven(&mut self, out: &mut Outbox) {
        let mut unproven: HashSet<RegionId> =
            self.connections.iter().flat_map(|(_, connection)| connection.granted.iter()).collect();
        unproven.extend(self.flights.keep_for_ever());
        self.regions.close(unproven);
        for (region, done) in self.recalls.abandon(|_| true) {
            out.settle(done, Err(still_shared(region.id).with_backend(NAME)));
            std::mem::forget(region);
        }
    }
}
