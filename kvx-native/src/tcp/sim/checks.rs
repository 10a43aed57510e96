//! Checks of the result of every operation, and of the end of a run.

use std::hash::{Hash as _, Hasher as _};
use std::time::Duration;

use kvx_core::backend::{LinkId, LinkState};
use kvx_core::{Error, ErrorKind, Op};

use super::Counts;
use super::agent::{Agent, Report};
use super::operations::{POISON, Place, PlaceRole, moved};
use super::world::{Bound, World};
use crate::clock;
use crate::tcp::socket::network;

/// The longest time that operations take without faults.
const PROMPT: Duration = Duration::from_secs(3);

impl World {
    /// Asserts that an operation or link ended for a reason that the run gave.
    fn assert_excused(&self, what: &str, of: usize, id: LinkId, by: &[ErrorKind], why: &Error) {
        if by.contains(&why.kind()) {
            return;
        }
        assert!(why.kind() == ErrorKind::PeerLost, "{what} failed without a reason: {why}");
        let keeps = self.must_keep(of, id);
        assert!(keeps.is_none(), "{what} failed without a reason: {why}, {keeps:?}");
    }

    /// Describes the operations in progress, for the message of a failed test.
    pub(super) fn standing(&self) -> String {
        let links = self.links.iter().flatten().map(|link| (link.id, link.is_up, link.is_gone));
        let posted = self.slots.iter().filter_map(|slot| slot.posted.as_ref());
        let posted = posted.map(|posted| (posted.id, posted.link, posted.op));
        let told = self.told.iter().map(|told| (told.number, told.link));
        format!(
            "links: {:?}; transfers: {:?}; notifications: {:?}; connections: {:?}",
            links.collect::<Vec<_>>(),
            posted.collect::<Vec<_>>(),
            told.collect::<Vec<_>>(),
            [0, 1].map(|of: usize| self.agents[of].machine.conns.iter().count()),
        )
    }

    /// Takes what both agents' cores observe after a turn.
    pub(super) fn settle(&mut self) {
        // Operations first: those of a lost link have failed already.
        for at in 0..self.slots.len() {
            self.settle_transfer(at);
            PlaceRole::ALL.into_iter().for_each(|which| self.settle_revocation(at, which));
        }
        self.settle_notifications();
        for of in 0..2 {
            for report in self.agents[of].inbox.take_unseen() {
                match report {
                    Report::Notification(number) => self.observe(("notification", of, number)),
                    Report::Link(id, state) => {
                        let why = match state {
                            LinkState::Lost(why) => Some(why),
                            LinkState::Restarted => Some(ErrorKind::PeerRestarted.because("")),
                            LinkState::Up | LinkState::Changed => None,
                        };
                        self.observe(("link", of, id, why.as_ref().map(Error::kind)));
                        let link = self.links[of].as_mut().filter(|link| link.id == id);
                        let Some(link) = link else { continue }; // closed meanwhile
                        assert!(!link.is_gone, "a report about a link that has ended");
                        let Some(why) = why else {
                            assert!(!std::mem::replace(&mut link.is_up, true), "up twice");
                            continue;
                        };
                        link.is_gone = true;
                        self.counts.lost_links += 1;
                        let ends_by = link.ends_by.clone();
                        self.assert_excused("a link", of, id, &ends_by, &why);
                        let posted = self.slots.iter().filter_map(|slot| slot.posted.as_ref());
                        let left = posted.map(|posted| posted.link);
                        let mut left = left.chain(self.told.iter().map(|told| told.link));
                        assert!(left.all(|link| link != id), "an operation outlives its link");
                    }
                }
            }
        }
        self.note_waits();
    }

    /// Records since when both agents await answers.
    fn note_waits(&mut self) {
        for (agent, link) in self.agents.iter().zip(&mut self.links) {
            let Some(link) = link else { continue };
            let peer = agent.machine.peers.get(&link.id);
            let awaits = peer.is_some_and(|peer| peer.silence.awaits_answer());
            link.waits_since = awaits.then(|| link.waits_since.unwrap_or_else(clock::now));
        }
    }

    fn settle_notifications(&mut self) {
        let mut ended = Vec::new();
        self.told.retain(|told| match told.outcome.get("a notification") {
            None => true,
            Some(result) => {
                let (ends_by, is_orphan) = (told.ends_by.clone(), told.is_orphan);
                ended.push((told.of, told.number, told.link, ends_by, is_orphan, result));
                false
            }
        });
        for (of, number, link, ends_by, is_orphan, result) in ended {
            self.observe(("told", number, result.as_ref().err().map(Error::kind)));
            match result {
                Ok(()) => {
                    self.counts.acknowledged += 1;
                    let arrived = self.agents[1 - of].inbox.has(number);
                    assert!(
                        arrived || is_orphan,
                        "a notification was acknowledged before it arrived"
                    );
                }
                Err(why) => self.assert_excused("a notification", of, link, &ends_by, &why),
            }
        }
    }

    fn settle_transfer(&mut self, at: usize) {
        let slot = &self.slots[at];
        let result = slot.posted.as_ref().and_then(|posted| posted.outcome.get("a transfer"));
        let Some(result) = result else { return };
        if let (Some(posted), Err(why)) = (&slot.posted, &result) {
            self.assert_excused("a transfer", slot.of, posted.link, &posted.ends_by, why);
        }
        let slot = &mut self.slots[at];
        let Some(posted) = slot.posted.take() else { return };
        let (op, block) = (posted.op, slot.block);
        let target = slot.target(op);
        let now = target.look();
        match &result {
            Ok(()) if posted.is_orphan => {}
            Ok(()) => {
                self.counts.arrived += 1;
                let expected = moved(&posted, block, std::mem::take(&mut target.content));
                assert!(now == expected, "a {op:?} moved wrong bytes");
            }
            Err(_) => {}
        }
        if !posted.is_orphan {
            assert!(!now.contains(&POISON), "a {op:?} moved bytes that must not be read any more");
            target.content = now;
        }
        if op == Op::Write {
            slot.local.poison();
            // The rest of a failed write may still arrive.
            if result.is_err() && !posted.is_orphan && slot.sink.revoked.is_none() {
                slot.sink.revoke();
            }
        }
        self.counts.cancelled += u64::from(result.is_err() && posted.is_cancelled);
        self.observe(("transfer", posted.id, result.err().map(|why| why.kind())));
    }

    /// Replaces a region whose revocation has settled; its memory must not be touched any more.
    fn settle_revocation(&mut self, at: usize, which: PlaceRole) {
        let slot = &mut self.slots[at];
        let (of, block) = (slot.of, slot.block);
        let revoked = slot.place(which).revoked.as_ref();
        let Some(result) = revoked.and_then(|it| it.get("a revocation")) else { return };
        result.expect("a revocation succeeds");
        let owner = if which == PlaceRole::Local { of } else { 1 - of };
        let number = self.number();
        let new = Place::new(&self.agents[owner], number, block, &mut self.random);
        let slot = &mut self.slots[at];
        let mut old = std::mem::replace(slot.place(which), new);
        let is_poisoned = old.look().contains(&POISON) && !old.content.contains(&POISON);
        assert!(!is_poisoned, "memory of a settled transfer was sent");
        old.poison();
        self.given_back.push(old);
        if let Some(posted) = &mut slot.posted {
            assert!(which != PlaceRole::Local, "a region was revoked during a transfer");
            posted.is_orphan |= which == PlaceRole::Sink && posted.op == Op::Write;
        }
        self.counts.revoked += 1;
        self.observe(("revoked", at, which));
    }

    pub(super) fn check_bound(&self, of: usize, bound: &Bound) {
        let current = |id| self.links[of].as_ref().filter(|link| link.id == id && !link.is_gone);
        match bound {
            Bound::Connect(id) => {
                let waits = current(*id).is_some_and(|link| !link.is_up);
                assert!(!waits, "a link neither comes up nor is lost: {}", self.standing());
            }
            Bound::Loss(id, number) => {
                let waits = self.told.iter().any(|told| told.link == *id && told.number <= *number);
                let waits = waits && current(*id).is_some();
                assert!(!waits, "a silent peer is not noticed: {}", self.standing());
            }
            Bound::Cancel(id) => {
                let posted = self.slots.iter().filter_map(|slot| slot.posted.as_ref());
                let waits = posted.into_iter().any(|posted| posted.id == *id);
                assert!(!waits, "a cancelled transfer does not end: {}", self.standing());
            }
        }
    }

    /// Checks that memory that must not be written to is unchanged.
    pub(super) fn check(&self, longest: usize) {
        for slot in &self.slots {
            let op = slot.posted.as_ref().map(|posted| posted.op);
            // A failed or revoked write may still arrive.
            let sink_is_still = op != Some(Op::Write) && slot.sink.revoked.is_none();
            let checked = [
                (&slot.local, op != Some(Op::Read), "local"),
                (&slot.source, true, "source"),
                (&slot.sink, sink_is_still, "sink"),
            ];
            for (place, is_still, whose) in checked {
                if is_still && place.content.len() <= longest {
                    place.check(whose);
                }
            }
        }
        let small = self.given_back.iter().filter(|place| place.content.len() <= longest);
        small.for_each(|place| place.check("revoked"));
    }

    /// Ends all faults. All operations must end, and everything must work over new links. Returns
    /// what happened, and the hash of the run.
    pub(super) fn finish(mut self) -> (Counts, u64) {
        network::heal();
        self.causes.end();
        self.bounds.clear();
        for agent in &mut self.agents {
            agent.stopped_until = None;
            agent.set_room(true);
        }
        self.pass(PROMPT);
        self.assert_idle("without faults");
        for of in 0..2 {
            self.close(of);
            // The metadata may be stale a last time.
            for _ in 0..2 {
                self.connect(of);
                self.pass(Duration::from_secs(1));
            }
            let is_up = self.links[of].as_ref().is_some_and(|link| link.is_up && !link.is_gone);
            assert!(is_up, "a new link does not come up: {}", self.standing());
        }
        for op in [Op::Read, Op::Write, Op::Read] {
            let before = (self.counts.arrived, self.counts.acknowledged);
            for at in 0..self.slots.len() {
                assert!(self.post(at, op, Duration::from_secs(30)), "slot {at} is not free");
            }
            (0..2).for_each(|of| self.notify(of));
            self.pass(PROMPT);
            self.assert_idle("over new links");
            let arrived = before.0 + self.slots.len() as u64;
            assert_eq!((self.counts.arrived, self.counts.acknowledged), (arrived, before.1 + 2));
        }
        (0..2).for_each(|of| self.close(of));
        self.pass(PROMPT);
        self.check(usize::MAX);
        assert_eq!(network::connections(), 0, "connections are left: {}", self.standing());
        for agent in &self.agents {
            agent.assert_ended();
        }
        for slot in &self.slots {
            for place in [&slot.local, &slot.source, &slot.sink] {
                place.look().hash(&mut self.trace);
            }
        }
        (self.counts, self.trace.finish())
    }

    fn assert_idle(&self, when: &str) {
        let is_idle = self.told.is_empty()
            && self.slots.iter().all(|slot| {
                let places = [&slot.local, &slot.source, &slot.sink];
                slot.posted.is_none() && places.iter().all(|place| place.revoked.is_none())
            });
        assert!(is_idle, "operations do not end {when}: {}", self.standing());
    }
}

impl Agent {
    /// Checks that its links and connections are gone.
    fn assert_ended(&self) {
        let machine = &self.machine;
        let left = (machine.conns.iter().count(), machine.peers.len(), machine.lanes.len());
        assert_eq!((left, machine.handshakes), ((0, 0, 0), 0), "a connection is left");
        assert!(machine.held.is_empty(), "{:?} is still counted", machine.held);
        assert_eq!(machine.scope.described, 0, "descriptions are counted but not held");
    }
}
