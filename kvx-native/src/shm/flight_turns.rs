//! The machine's handling of flights: it starts their batches and ends them.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Instant;

use kvx_backend::reactor::Outbox;
use kvx_core::{Error, ErrorKind};

use super::copy::CopyError;
use super::copy_threads;
use super::error::error;
use super::flights::{DEPTH, Flight, FlightPurpose, Load, Mover};
use super::machine::Machine;
use super::memory::quarantine;
use super::work::Work;
use crate::clock;

impl Machine {
    /// Starts a read or a pull that a device or a thread must move. Returns the flight's number.
    pub(crate) fn start_flight(&mut self, at: usize, purpose: FlightPurpose, load: Load) -> u64 {
        let number = self.flights.next;
        self.flights.next += 1;
        let flight = Flight {
            at: Some(at),
            counted: None,
            peer: self.connections[at].peer.clone(),
            process: Arc::clone(&self.connections[at].process),
            purpose,
            left: load.bytes,
            load,
            next: None,
            moved: 0,
            ends: Arc::default(),
            under_way: 0,
            queued: false,
            failed: None,
            lost: false,
        };
        self.flights.open.insert(number, flight);
        self.queue_flight(number);
        number
    }

    fn queue_flight(&mut self, number: u64) {
        // Expected: the flight ended with its connection.
        let Some(flight) = self.flights.open.get_mut(&number) else { return };
        let has_more = flight.failed.is_none() && flight.left > 0;
        if has_more && !flight.queued && flight.under_way < DEPTH {
            flight.queued = true;
            self.turns.push(Work::Flight(number), flight.left);
        }
    }

    /// Starts a batch. Returns its size in bytes.
    pub(crate) fn flight_turn(&mut self, number: u64, out: &mut Outbox) -> u64 {
        // Expected: the flight was stopped while it waited for its turn.
        let Some(flight) = self.flights.open.get_mut(&number) else { return 0 };
        flight.queued = false;
        if flight.failed.is_some() || flight.left == 0 {
            return 0;
        }
        let started =
            flight.start(number, &self.flights.reactor, &mut self.copying).unwrap_or_else(|why| {
                flight.failed = Some(why);
                0
            });
        if flight.load.mover == Mover::Thread {
            self.look_by(clock::now() + copy_threads::STUCK);
        }
        self.queue_flight(number);
        self.end_flight(number, out);
        started
    }

    /// Processes batches of a flight that have landed.
    pub(crate) fn take_batch_ends(&mut self, number: u64, out: &mut Outbox) {
        // Expected: an earlier report of this flight included the end of this batch.
        let Some(flight) = self.flights.open.get_mut(&number) else { return };
        let (landed, lost) = {
            let mut ends = flight.ends.lock();
            (std::mem::take(&mut ends.landed), ends.lost)
        };
        let mut gone = false;
        for (bytes, result) in landed {
            flight.under_way -= 1;
            match result {
                Ok(()) => flight.moved += bytes,
                Err(CopyError::OwnerGone) => gone = true,
                Err(CopyError::Failed(why)) => {
                    flight.failed.get_or_insert(why);
                }
            }
        }
        if lost && !std::mem::replace(&mut flight.lost, true) {
            return self.lose_flight(number);
        }
        if let Some(at) = flight.at
            && flight.failed.is_none()
            && (gone || !self.connections[at].peer_lives())
        {
            // The last batch does not count: the flight ends with the connection and with the
            // connection's error.
            self.take_peer_end(at, out);
        }
        self.queue_flight(number);
        self.end_flight(number, out);
    }

    /// Handles a batch that a device has lost: the device may touch both sides for ever.
    fn lose_flight(&mut self, number: u64) {
        let Some(flight) = self.flights.open.get_mut(&number) else {
            debug_assert!(false, "flight {number} lost a batch but is not open");
            return;
        };
        let forgotten = error(
            ErrorKind::Forgotten,
            "a device, or one of kvx's threads, lost a copy: the memory on both sides is \
             quarantined; report this as a bug of its crate",
        );
        tracing::error!(error = %forgotten, "SHM: a transfer will never end");
        flight.failed.get_or_insert(forgotten);
        if let FlightPurpose::Read { done, .. } = &mut flight.purpose {
            drop(done.take());
        }
        let into = flight.ours().to_vec();
        for (region, done) in self.recalls.abandon(|id| into.contains(&id)) {
            quarantine(region, done);
        }
    }

    /// Starts no more batches of these flights. Flights without a batch in progress end at once.
    pub(crate) fn stop_flights(
        &mut self,
        which: impl Fn(&Flight) -> bool,
        why: &Error,
        out: &mut Outbox,
    ) {
        for number in self.flights.of(which) {
            if let Some(flight) = self.flights.open.get_mut(&number) {
                flight.failed.get_or_insert_with(|| why.clone());
                if flight.load.mover == Mover::Thread {
                    flight.under_way -= self.copying.withdraw(number);
                }
            }
            self.end_flight(number, out);
        }
    }

    /// Checks the copying threads and replaces a stuck one.
    pub(crate) fn look_at_copies(&mut self, now: Instant) {
        let (hung, again) = self.copying.look(now);
        let hung: Vec<_> = hung.iter().filter_map(|number| self.flights.open.get(number)).collect();
        if !hung.is_empty() {
            self.hung.log(|| {
                for flight in hung {
                    let (peer, theirs, ours) = (&flight.peer, &flight.load.from, flight.ours());
                    tracing::warn!(
                        ?peer,
                        ?theirs,
                        ?ours,
                        "SHM: a copy waits for an unresolved page fault (userfaultfd, a file whose \
                         server hangs): its regions, and further copies with this peer, wait with \
                         it"
                    );
                }
            });
        }
        if let Some(again) = again {
            self.look_by(again);
        }
    }

    /// Ends a flight if none of its batches is in progress and none will follow.
    fn end_flight(&mut self, number: u64, out: &mut Outbox) {
        // Expected: the flight ended with its connection.
        let Entry::Occupied(entry) = self.flights.open.entry(number) else { return };
        let flight = entry.get();
        if flight.under_way > 0 || flight.failed.is_none() && flight.left > 0 {
            return;
        }
        let Flight { at, counted, purpose, load, moved, failed, .. } = entry.remove();
        if let Some((owner, mut counted)) = counted {
            self.held.note_all(&owner, &mut counted, 0).ok(); // cannot fail: the peer holds less
        }
        drop(load); // the plan, and the peer's open memory
        // `Unsupported` would mean that nothing has moved.
        let result = match failed {
            None => Ok(()),
            Some(why) if moved > 0 && why.kind() == ErrorKind::Unsupported => {
                Err(why.with_kind(ErrorKind::Native))
            }
            Some(why) => Err(why),
        };
        match purpose {
            FlightPurpose::Read { done, .. } => {
                if let Some(done) = done {
                    out.settle(done, result);
                }
            }
            FlightPurpose::Pull { write, cost, .. } => {
                if let Some(at) = at {
                    self.forget_pull(at, cost);
                    if let Some(write) = write {
                        self.answer(at, write, result);
                    }
                }
                self.settle_recalls(out);
            }
        }
        if let Some(at) = at {
            self.release_unused(at, out);
        }
    }
}
