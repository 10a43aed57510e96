//! Writes in flight: their copies, their ends, and the blocks that they keep from being freed.

use std::time::Duration;

use kvx_vllm::engine::{FailureKind, Move, MoveFailure, RequestId, Transferred};

use super::{At, Event, MAY_WRITE_FOR, MILLISECOND, SECOND, World};

/// A write in flight.
pub(super) struct Flight {
    pub(super) at: At,
    to: At,
    pub(super) what: Move,
    /// The half of a block that it fills; `None` for both.
    half: Option<usize>,
    /// The request whose blocks it writes into.
    target: RequestId,
    blocked: bool,
    pub(super) fails: bool,
    resolved: bool,
    forgotten: bool,
    /// Whether it is counted in the memory at its source and at its target.
    counted: (bool, bool),
}

impl World {
    pub(super) fn take_off(&mut self, at: At, what: Move, target: RequestId) {
        let to = self.links[&(at, what.connection)];
        let (own, theirs) = (self.scenario.prefill_tp, self.scenario.decode_tp);
        let half = (own > theirs && !self.scenario.latent).then_some(at.worker % 2);
        let slow = self.random.percent(self.scenario.trouble);
        let mut lasts = self.random.skewed(MILLISECOND..if slow { 90 * SECOND } else { SECOND });
        if let Some(until) = self.cut(at.engine, to.engine) {
            lasts += until - self.now;
        }
        let deadline = self.engines[at.engine].clocks[at.worker].when(what.deadline, self.now);
        let mut flight = Flight {
            at,
            to,
            half,
            target,
            blocked: false,
            fails: self.random.percent(self.scenario.trouble / 3),
            resolved: false,
            forgotten: false,
            counted: (true, false),
            what,
        };
        self.sequence += 1;
        let key = self.sequence;
        self.by_move.insert((at, flight.what.id), key);
        self.count(&mut flight, true);
        self.flights.insert(key, flight);
        self.after(lasts / 2, Event::MoveHalf(key));
        self.after(lasts, Event::MoveEnd(key));
        if deadline < self.now + lasts {
            self.after(deadline.saturating_sub(self.now), Event::MoveTimesOut(key));
        }
    }

    /// Returns whether the decode side rejects the write.
    fn is_fenced_off(&self, flight: &Flight) -> bool {
        self.fenced.contains(&(flight.to, flight.target.clone()))
    }

    /// Adds a write to the counts in the memory of both ends, or removes it.
    pub(super) fn count(&mut self, flight: &mut Flight, starts: bool) {
        let change = |count: &mut u32| *count = if starts { *count + 1 } else { *count - 1 };
        if starts {
            flight.blocked = self.is_fenced_off(flight);
            flight.counted = (true, !flight.blocked);
        }
        let groups = std::sync::Arc::clone(&flight.what.groups);
        for group in groups.iter() {
            for place in 0..group.local.len() {
                if flight.counted.0 && self.lives(flight.at) {
                    let memory = &mut self.engines[flight.at.engine].pool.workers[flight.at.worker];
                    change(&mut memory.readers[group.local.at(place) as usize]);
                }
                if flight.counted.1 && self.lives(flight.to) {
                    let memory = &mut self.engines[flight.to.engine].pool.workers[flight.to.worker];
                    change(&mut memory.writers[group.remote.at(place) as usize]);
                }
            }
        }
        if !starts {
            flight.counted = (false, false);
        }
    }

    /// Copies half of the blocks of a write, with their current contents.
    pub(super) fn copy(&mut self, key: u64, part: usize) {
        let Some(flight) = self.flights.get(&key) else { return };
        let (at, to) = (flight.at, flight.to);
        if !self.lives(at) || !self.lives(to) || flight.blocked || (flight.fails && part == 1) {
            return;
        }
        for group in flight.what.groups.iter() {
            for place in (0..group.local.len()).filter(|place| place % 2 == part) {
                let (local, remote) =
                    (group.local.at(place) as usize, group.remote.at(place) as usize);
                let from = self.engines[at.engine].pool.workers[at.worker].blocks[local];
                let there = &mut self.engines[to.engine].pool.workers[to.worker].blocks[remote];
                match flight.half {
                    Some(half) => there[half] = from[half],
                    None => *there = from,
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
        self.by_move.remove(&(flight.at, flight.what.id));
        self.count(&mut flight, false);
        let (at, id) = (flight.at, flight.what.id);
        let gone = !self.lives(flight.to);
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
            let (kind, error) = (FailureKind::TransferFailed, "no luck".into());
            let failure = MoveFailure { kind, settled, peer_is_gone: gone, error };
            self.with(at, |worker, time| worker.move_resolved(time, id, Err(failure)));
            if !settled {
                self.says_at_once(flight.to, at);
                flight.resolved = true;
                self.count(&mut flight, true);
                self.by_move.insert((at, id), key);
                self.flights.insert(key, flight);
                let delay = self.random.skewed(0..20 * SECOND);
                self.after(delay, Event::MoveEnd(key));
            }
            return;
        }
        let time = Duration::from_millis(1);
        let done = Transferred { time, post: time, bytes: 1, descriptors: 1 };
        self.with(at, |worker, time| worker.move_resolved(time, id, Ok(done)));
    }

    pub(super) fn move_times_out(&mut self, key: u64) {
        let Some(flight) = self.flights.get_mut(&key).filter(|flight| !flight.resolved) else {
            return;
        };
        flight.resolved = true;
        let (at, to, id) = (flight.at, flight.to, flight.what.id);
        self.says_at_once(to, at);
        let (kind, error) = (FailureKind::TransferFailed, "the deadline has passed".into());
        let failure = MoveFailure { kind, settled: false, peer_is_gone: false, error };
        self.with(at, |worker, time| worker.move_resolved(time, id, Err(failure)));
    }

    pub(super) fn fence_forgotten(&mut self, at: At, request: &RequestId) {
        self.with(at, |worker, time| {
            worker.fence_forgotten(time, request);
        });
    }

    /// Fences off the writes for a request at a decode worker. Sometimes a fence cannot be proven.
    pub(super) fn fence(&mut self, at: At, request: RequestId) {
        if !self.lives(at) {
            return;
        }
        // A plain agent has no fence.
        if self.asks_plainly(&request) {
            self.with(at, |worker, _| worker.fence_is_slow(&request));
            return self.after(MAY_WRITE_FOR, Event::FenceForgotten(at, request));
        }
        if self.random.percent(self.scenario.trouble / 5) {
            return self.fence_forgotten(at, &request);
        }
        self.fenced.insert((at, request.clone()));
        let off =
            self.flights.iter().filter(|(_, flight)| flight.to == at && self.is_fenced_off(flight));
        for key in off.map(|(key, _)| *key).collect::<Vec<_>>() {
            let Some(mut flight) = self.flights.remove(&key) else { continue };
            // The memory here no longer counts it; its source still does.
            if std::mem::replace(&mut flight.counted.1, false) {
                for group in flight.what.groups.iter() {
                    for place in 0..group.remote.len() {
                        let memory = &mut self.engines[at.engine].pool.workers[at.worker];
                        memory.writers[group.remote.at(place) as usize] -= 1;
                    }
                }
            }
            flight.blocked = true;
            self.flights.insert(key, flight);
        }
        self.with(at, |worker, time| worker.fenced(time, &request));
    }
}
