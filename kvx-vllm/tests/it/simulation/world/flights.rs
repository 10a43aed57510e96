//! Reads and writes in flight: their copies, their ends, and the blocks that they keep from being
//! freed.

use std::time::Duration;

use kvx_vllm::engine::{FailureKind, Move, MoveFailure, MoveId, RequestId, Transferred};

use super::{At, Event, MILLISECOND, Protocol, SECOND, World};
use crate::simulation::engine::Half;
use crate::simulation::memory::Content;

/// A read or write in flight.
pub(super) struct Flight {
    pub(super) at: At,
    to: At,
    pub(super) what: Move,
    write: bool,
    /// The half of a block that it fills; `None` for both.
    half: Option<usize>,
    /// The peer's request: the one that a write fills, or the one that waits for a read to end.
    theirs: Option<RequestId>,
    /// True if it was fenced off or is rejected.
    blocked: bool,
    pub(super) fails: bool,
    resolved: bool,
    /// True if its transport has forgotten it, so that it may access memory forever.
    forgotten: bool,
    /// Whether it is counted in the memory at both ends.
    counted: (bool, bool),
}

impl<P: Protocol> World<P> {
    pub(crate) fn take_off(&mut self, at: At, what: Move, write: bool, theirs: Option<RequestId>) {
        let to = self.peer(at, what.connection, what.part.rank);
        // The side with more ranks fills a part of the other side's block.
        let (part, whole) = if write { (at, to) } else { (to, at) };
        let tp = |at: At| self.engines[at.engine].settings.tp_size;
        let half = (tp(part) > tp(whole) && !self.scenario.latent).then_some(part.worker % 2);
        let slow = self.random.percent(self.scenario.trouble);
        let mut lasts = self.random.skewed(MILLISECOND..if slow { 90 * SECOND } else { SECOND });
        if let Some(until) = self.cut(at.engine, to.engine) {
            lasts += until - self.now;
        }
        let deadline = self.engines[at.engine].clocks[at.worker].when(what.deadline, self.now);
        let mut flight = Flight {
            at,
            to,
            write,
            half,
            theirs,
            blocked: false,
            fails: self.random.percent(self.scenario.trouble / 3),
            resolved: false,
            forgotten: false,
            counted: (true, false),
            what,
        };
        let key = self.next_number();
        self.by_move.insert((at, flight.what.id), key);
        self.count(&mut flight, true);
        self.flights.insert(key, flight);
        self.after(lasts / 2, Event::MoveHalf(key));
        self.after(lasts, Event::MoveEnd(key));
        if deadline < self.now + lasts {
            self.after(deadline.saturating_sub(self.now), Event::MoveTimesOut(key));
        }
    }

    /// Adds a move to the counts in the memory of both ends, or removes it.
    pub(super) fn count(&mut self, flight: &mut Flight, starts: bool) {
        let change = |count: &mut u32| *count = if starts { *count + 1 } else { *count - 1 };
        let (at, to) = (flight.at, flight.to);
        if starts {
            let fence = |request: &RequestId| self.fenced.contains(&(to, request.clone()));
            flight.blocked = flight.write && flight.theirs.as_ref().is_some_and(fence);
            flight.counted = (true, flight.write && !flight.blocked);
        }
        let here = flight.counted.0 && self.lives(at);
        let there = flight.counted.1 && self.lives(to);
        for group in flight.what.groups.iter() {
            for place in 0..group.local.len() {
                if here {
                    let memory = self.memory(at);
                    let counts =
                        if flight.write { &mut memory.readers } else { &mut memory.writers };
                    change(&mut counts[group.local.at(place) as usize]);
                }
                if there {
                    change(&mut self.memory(to).writers[group.remote.at(place) as usize]);
                }
            }
        }
        if let Some(owner) = flight.theirs.as_ref().filter(|_| !flight.write && self.lives(to)) {
            let reads = &mut self.engines[to.engine].pool.read_by_peers;
            change(reads.entry(owner.clone()).or_default());
        }
        if !starts {
            flight.counted = (false, false);
        }
    }

    /// Copies half of the blocks of a move, with their current contents.
    pub(super) fn copy(&mut self, key: u64, part: usize) {
        let Some(flight) = self.flights.get(&key) else { return };
        let (at, to) = (flight.at, flight.to);
        if !self.lives(at) || !self.lives(to) || flight.blocked || (flight.fails && part == 1) {
            return;
        }
        let (from, into) = if flight.write { (at, to) } else { (to, at) };
        let unfinished = !flight.write && self.scenario.own.finishes();
        for group in flight.what.groups.iter() {
            for place in (0..group.local.len()).filter(|place| place % 2 == part) {
                let (local, remote) =
                    (group.local.at(place) as usize, group.remote.at(place) as usize);
                let (source, target) = if flight.write { (local, remote) } else { (remote, local) };
                let block = self.engines[from.engine].pool.workers[from.worker].blocks[source];
                let block = block.map(|content| Content { unfinished, ..content });
                let there = &mut self.engines[into.engine].pool.workers[into.worker].blocks[target];
                match flight.half {
                    Some(half) => there[half] = block[half],
                    None => *there = block,
                }
            }
        }
    }

    pub(super) fn move_ends(&mut self, key: u64) {
        if self.flights.get(&key).is_some_and(|flight| flight.forgotten) {
            return;
        }
        self.copy(key, 1);
        let Some(mut flight) = self.flights.remove(&key) else { return };
        let (at, to, id) = (flight.at, flight.to, flight.what.id);
        self.by_move.remove(&(at, id));
        self.count(&mut flight, false);
        let gone = !self.lives(to);
        if flight.resolved && self.random.percent(self.scenario.trouble / 5) {
            flight.forgotten = true;
            self.count(&mut flight, true);
            self.flights.insert(key, flight);
            return self.with(at, |worker, time| worker.move_forgotten(time, id));
        }
        if flight.resolved {
            return self.with(at, |worker, time| worker.move_settled(time, id));
        }
        if flight.fails || gone || flight.blocked {
            // Some end later.
            let settled = flight.fails && self.random.percent(80) || gone || flight.blocked;
            self.move_fails((at, to, id), settled, gone, "no luck");
            if !settled {
                flight.resolved = true;
                // It may still access memory, so it stays counted.
                self.count(&mut flight, true);
                self.by_move.insert((at, id), key);
                self.flights.insert(key, flight);
                let delay = self.random.skewed(0..20 * SECOND);
                self.after(delay, Event::MoveEnd(key));
            }
            return;
        }
        P::moved(self, at, to, &flight.what);
        let time = Duration::from_millis(1);
        let done = Transferred { time, post: time, bytes: 1, descriptors: 1 };
        self.with(at, |worker, time| worker.move_resolved(time, id, Ok(done)));
    }

    pub(super) fn move_times_out(&mut self, key: u64) {
        let Some(flight) = self.flights.get_mut(&key).filter(|flight| !flight.resolved) else {
            return;
        };
        flight.resolved = true;
        let what = (flight.at, flight.to, flight.what.id);
        self.move_fails(what, false, false, "the deadline has passed");
    }

    fn move_fails(
        &mut self,
        (at, to, id): (At, At, MoveId),
        settled: bool,
        peer_is_gone: bool,
        error: &str,
    ) {
        if !settled {
            P::unsettled(self, at, to);
        }
        let (kind, error) = (FailureKind::TransferFailed, error.into());
        let failure = MoveFailure { kind, settled, peer_is_gone, error };
        self.with(at, |worker, time| worker.move_resolved(time, id, Err(failure)));
    }

    /// Fences off the writes for a request at a decode worker.
    pub(super) fn fence(&mut self, at: At, request: RequestId) {
        if !self.lives(at) || !P::fences(self, at, &request) {
            return;
        }
        self.fenced.insert((at, request.clone()));
        let memory = &mut self.engines[at.engine].pool.workers[at.worker];
        for flight in self.flights.values_mut() {
            if !flight.write || flight.to != at || flight.theirs.as_ref() != Some(&request) {
                continue;
            }
            flight.blocked = true;
            // The memory here no longer counts it; its source still does.
            if std::mem::replace(&mut flight.counted.1, false) {
                for group in flight.what.groups.iter() {
                    for place in 0..group.remote.len() {
                        memory.writers[group.remote.at(place) as usize] -= 1;
                    }
                }
            }
        }
        self.with(at, |worker, time| worker.fenced(time, &request));
    }
}
