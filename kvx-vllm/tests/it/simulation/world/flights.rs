//! Reads and writes in flight: their copies, their ends, and the blocks that they keep from being
//! freed.

use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::engine::{FailureKind, Move, MoveFailure, RequestId, Transferred};

use super::{At, Event, Link, MILLISECOND, SECOND, World};
use crate::simulation::memory::Content;

/// A read or write in flight.
pub(super) struct Flight {
    pub(super) at: At,
    pub(super) link: Link,
    pub(super) what: Move,
    pub(super) write: bool,
    /// The half of a block that it fills; `None` for both.
    pub(super) half: Option<usize>,
    /// The decode engine's request of a write.
    pub(super) target: Option<RequestId>,
    /// The prefill engine's request of a read.
    pub(super) owner: Option<RequestId>,
    /// True if it was fenced off or is rejected.
    pub(super) blocked: bool,
    pub(super) fails: bool,
    pub(super) resolved: bool,
    /// True if its transport has forgotten it, so that it may access memory forever.
    pub(super) forgotten: bool,
    /// Whether it is counted in the memory at both ends.
    pub(super) counted: (bool, bool),
}

impl World {
    pub(super) fn take_off(&mut self, at: At, what: Move, write: bool) {
        let link = self.links[&(at, what.connection)];
        let (own, theirs) =
            (self.engines[at.engine].settings.tp_size, self.engines[link.engine].settings.tp_size);
        // The side with more ranks fills a part of the other side's block.
        let half = if write {
            (own > theirs && !self.scenario.latent).then_some(at.worker % 2)
        } else {
            (theirs > own && !self.scenario.latent).then_some(what.part.rank.tp as usize % 2)
        };
        let target = what.notification.as_ref().filter(|_| write).and_then(|bytes| {
            let text = std::str::from_utf8(bytes).ok()?;
            Some(RequestId::from(text.rsplit_once(':')?.0))
        });
        let remote = &self.engines[link.engine];
        let first = what.groups.first().map(|group| group.remote.at(0));
        let owner = first.filter(|_| !write && remote.life == link.life);
        let owner = owner.and_then(|block| remote.pool.owner(block).cloned());
        // A late reader reads blocks that belong to another request by now, so the owner does not
        // wait for it.
        let reader = what.groups.first().map(|group| group.local.at(0));
        let reader = reader.and_then(|block| self.engines[at.engine].pool.owner(block));
        let owner = owner.filter(|owner| {
            let mut clients = self.clients.iter();
            clients.any(|client| client.prefill_id == *owner && Some(&client.decode_id) == reader)
        });
        let slow = self.random.percent(self.scenario.trouble);
        let mut lasts = self.random.skewed(MILLISECOND..if slow { 90 * SECOND } else { SECOND });
        if let Some(until) = self.cut(at.engine, link.engine) {
            lasts += until - self.now;
        }
        let deadline = self.engines[at.engine].clocks[at.worker].when(what.deadline, self.now);
        let mut flight = Flight {
            at,
            link,
            write,
            half,
            target,
            owner,
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

    pub(super) fn fenced_off(&self, flight: &Flight) -> bool {
        let target = flight.target.as_ref();
        target.is_some_and(|request| {
            let link = flight.link;
            self.fenced.contains(&(
                link.engine,
                link.life,
                flight.what.part.rank.tp as usize,
                request.clone(),
            ))
        })
    }

    /// Adds a move to the counts in the memory of both ends, or removes it.
    pub(super) fn count(&mut self, flight: &mut Flight, starts: bool) {
        let change = |count: &mut u32| *count = if starts { *count + 1 } else { *count - 1 };
        let blocks = |local: bool| {
            let lists = flight
                .what
                .groups
                .iter()
                .map(move |group| if local { &group.local } else { &group.remote });
            lists
                .flat_map(|list| (0..list.len()).map(|place| list.at(place) as usize))
                .collect::<Vec<_>>()
        };
        if self.engines[flight.at.engine].life == flight.at.life && (starts || flight.counted.0) {
            let memory = &mut self.engines[flight.at.engine].pool.workers[flight.at.worker];
            let counts = if flight.write { &mut memory.readers } else { &mut memory.writers };
            blocks(true).into_iter().for_each(|block| change(&mut counts[block]));
        }
        if starts {
            flight.blocked = self.fenced_off(flight);
            flight.counted = (true, flight.write && !flight.blocked);
        }
        if flight.counted.1 && self.engines[flight.link.engine].life == flight.link.life {
            let memory = &mut self.engines[flight.link.engine].pool.workers
                [flight.what.part.rank.tp as usize];
            blocks(false).into_iter().for_each(|block| change(&mut memory.writers[block]));
        }
        if self.engines[flight.link.engine].life == flight.link.life
            && let Some(owner) = &flight.owner
        {
            change(
                self.engines[flight.link.engine]
                    .pool
                    .read_by_peers
                    .entry(owner.clone())
                    .or_default(),
            );
        }
        if !starts {
            flight.counted = (false, false);
        }
    }

    /// Copies half of the blocks of a move, with their current contents.
    pub(super) fn copy(&mut self, key: u64, part: usize) {
        let Some(flight) = self.flights.get(&key) else { return };
        let (at, link) = (flight.at, flight.link);
        let alive =
            self.engines[at.engine].life == at.life && self.engines[link.engine].life == link.life;
        if !alive || flight.blocked || (flight.fails && part == 1) {
            return;
        }
        let remote_worker = flight.what.part.rank.tp as usize;
        for group in flight.what.groups.iter() {
            for place in (0..group.local.len()).filter(|place| place % 2 == part) {
                let (local, remote) =
                    (group.local.at(place) as usize, group.remote.at(place) as usize);
                let there =
                    &mut self.engines[link.engine].pool.workers[remote_worker].blocks[remote];
                let from_there = *there;
                let here = &mut self.engines[at.engine].pool.workers[at.worker].blocks[local];
                let (from, to) = if flight.write {
                    let from = *here;
                    (
                        from,
                        &mut self.engines[link.engine].pool.workers[remote_worker].blocks[remote],
                    )
                } else {
                    (from_there, here)
                };
                let unfinished = self.scenario.finishes && !flight.write;
                let from = from.map(|content| Content { unfinished, ..content });
                match flight.half {
                    Some(half) => to[half] = from[half],
                    None => *to = from,
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
        let (at, link, id) = (flight.at, flight.link, flight.what.id);
        let gone = self.engines[link.engine].life != link.life;
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
            let failure = MoveFailure {
                kind: FailureKind::TransferFailed,
                settled,
                peer_is_gone: gone,
                error: "no luck".into(),
            };
            self.with(at, |worker, time| worker.move_resolved(time, id, Err(failure)));
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
        if let Some(bytes) = &flight.what.notification {
            let bytes = Arc::clone(bytes);
            self.notify(at, link, flight.what.part.rank, None, &bytes);
        }
        let time = Duration::from_millis(1);
        let done = Transferred { time, post: time, bytes: 1, descriptors: 1 };
        self.with(at, |worker, time| worker.move_resolved(time, id, Ok(done)));
    }

    pub(super) fn move_times_out(&mut self, key: u64) {
        let Some(flight) = self.flights.get_mut(&key) else { return };
        if flight.resolved {
            return;
        }
        flight.resolved = true;
        let (at, id) = (flight.at, flight.what.id);
        let failure = MoveFailure {
            kind: FailureKind::TransferFailed,
            settled: false,
            peer_is_gone: false,
            error: "the deadline has passed".into(),
        };
        self.with(at, |worker, time| worker.move_resolved(time, id, Err(failure)));
    }

    pub(super) fn fence(&mut self, at: At, request: RequestId) {
        if self.engines[at.engine].life != at.life {
            return;
        }
        self.fenced.insert((at.engine, at.life, at.worker, request.clone()));
        let keys: Vec<_> = self
            .flights
            .iter()
            .filter(|(_, flight)| self.fenced_off(flight))
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            let Some(mut flight) = self.flights.remove(&key) else { continue };
            if !flight.blocked {
                // The memory here no longer counts it; its source still does.
                let (engine, life) = (flight.link.engine, flight.link.life);
                if flight.counted.1 && self.engines[engine].life == life {
                    for group in flight.what.groups.iter() {
                        for place in 0..group.remote.len() {
                            let memory = &mut self.engines[engine].pool.workers
                                [flight.what.part.rank.tp as usize];
                            memory.writers[group.remote.at(place) as usize] -= 1;
                        }
                    }
                }
                flight.counted.1 = false;
                flight.blocked = true;
            }
            self.flights.insert(key, flight);
        }
        self.with(at, |worker, time| worker.fenced(time, &request));
    }
}
