//! Both agents, their links and operations, and the events of a run.

use std::hash::{DefaultHasher, Hash};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::control::proof::Keys;
use kvx_core::backend::LinkId;
use kvx_core::{ErrorKind, Op, TransferId};
use kvx_testkit::Random;

use super::agent::{Agent, Metadata, Outcome, PEER_TIMEOUT};
use super::causes::Causes;
use super::operations::{Place, PlaceRole, Posted, SentNotice, Slot, content};
use super::{Counts, SEEDS};
use crate::clock;
use crate::clock::virtual_time::{self, VirtualTime};
use crate::tcp::links::OpenedLink;
use crate::tcp::machine::Command;
use crate::tcp::seal::Seal;
use crate::tcp::socket::network;

/// The number of rounds within which agents that are awake fall asleep.
const ROUNDS: usize = 100_000;
/// The time beyond a timeout within which it has fired.
pub(super) const SLACK: Duration = Duration::from_millis(1500);
/// The longest faults that no link notices.
pub(super) const BRIEF: Duration = Duration::from_millis(500);
/// The number of bulk lanes of a link.
const BULK_LANES: usize = 2;

/// A link as the core of the agent that opened it knows it.
pub(super) struct Link {
    pub(super) id: LinkId,
    pub(super) is_up: bool,
    pub(super) is_gone: bool,
    pub(super) opened: Instant,
    /// The beginning of the wait for an answer, if its agent awaits one.
    pub(super) waits_since: Option<Instant>,
    /// The error kinds with which it may be lost, apart from the faults in [`Causes`].
    pub(super) ends_by: Vec<ErrorKind>,
}

/// Something that must have happened at a time.
pub(super) enum Bound {
    /// The link is up, or lost.
    Connect(LinkId),
    /// The link is lost, or all its notifications up to this number have ended.
    Loss(LinkId, u64),
    Cancel(TransferId),
}

pub(super) struct World {
    pub(super) random: Random,
    pub(super) agents: [Agent; 2],
    /// The link that each agent has opened.
    pub(super) links: [Option<Link>; 2],
    /// The metadata of its peer that each agent knows.
    known: [Metadata; 2],
    pub(super) slots: Vec<Slot>,
    pub(super) told: Vec<SentNotice>,
    /// Revoked memory.
    pub(super) given_back: Vec<Place>,
    /// By the agent whose machine must act.
    pub(super) bounds: Vec<(Instant, usize, Bound)>,
    pub(super) causes: Causes,
    seal: &'static str,
    next: u64,
    lives: u8,
    pub(super) counts: Counts,
    pub(super) trace: DefaultHasher,
    _network: network::Running,
    _time: VirtualTime,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let (time, network) = (VirtualTime::start(), network::start(!seed));
        let mut random = Random::seeded(seed);
        let seal = Seal::NAMED[random.below(Seal::NAMED.len())].0;
        let agents = [0, 1].map(|number| Agent::start(number, 1 + number as u8, seal));
        // Runs with transfers of several parts take five times as long as others.
        let is_long = seed.is_multiple_of(if seed < SEEDS { 16 } else { 64 });
        let blocks: &[usize] = if is_long { &[64, 150_000] } else { &[64, 2100, 20_000] };
        let mut next = 0;
        let mut slots = Vec::new();
        for of in 0..2 {
            for &block in blocks {
                let mut place = |at: usize| {
                    next += 1;
                    Place::new(&agents[at], next, block, &mut random)
                };
                let (local, source, sink) = (place(of), place(1 - of), place(1 - of));
                slots.push(Slot { of, block, local, source, sink, posted: None });
            }
        }
        World {
            links: [None, None],
            known: [agents[1].metadata.clone(), agents[0].metadata.clone()],
            slots,
            told: Vec::new(),
            given_back: Vec::new(),
            bounds: Vec::new(),
            causes: Causes::default(),
            seal,
            next,
            lives: 2,
            counts: Counts::default(),
            trace: DefaultHasher::new(),
            _network: network,
            _time: time,
            random,
            agents,
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Adds an observation, and the virtual time, to the hash of the run.
    pub(super) fn observe(&mut self, what: impl Hash) {
        (virtual_time::passed(), what).hash(&mut self.trace);
    }

    /// Lets a random event happen, and then some rounds or some time pass.
    pub(super) fn step(&mut self) {
        let (of, at) = (self.random.below(2), self.random.below(self.slots.len()));
        match self.random.below(40) {
            0..4 => self.connect(of),
            4..18 => {
                let op = [Op::Read, Op::Write][self.random.below(2)];
                let patience = Duration::from_millis([5, 300, 30_000][self.random.below(3)]);
                self.post(at, op, patience);
            }
            18..24 => self.notify(of),
            24 => self.cancel(at),
            25..28 => self.revoke(at),
            28 => {
                let has_room = self.random.below(3) > 0;
                self.agents[of].set_room(has_room);
            }
            29..32 => network::stall(),
            32 => {
                if let Some(to) = network::cut() {
                    // the number of the agent that opened the connection
                    let by = usize::from(self.agents[0].metadata.address == to);
                    self.causes.note_cut(by);
                }
            }
            33 => self.stop(of, BRIEF),
            34 if self.random.below(2) == 0 => {
                let time = Duration::from_millis(self.random.below(20_000) as u64);
                self.stop(of, time);
            }
            35 if self.random.below(2) == 0 => {
                let time = Duration::from_millis(self.random.below(20_000) as u64);
                self.freeze(time);
            }
            36 if self.random.below(2) == 0 => self.restart(of),
            37 if self.random.below(4) == 0 => self.close(of),
            38 => {
                let time = Duration::from_millis(self.random.below(15_000) as u64);
                self.pass(time);
            }
            _ => {}
        }
        match self.random.below(3) {
            0 => {
                for _ in 0..self.random.below(12) {
                    self.round();
                }
            }
            1 => {
                let time = Duration::from_micros(self.random.below(5_000) as u64);
                self.pass(time);
            }
            _ => {}
        }
        self.check(1 << 17);
    }

    /// Opens a link if there is none, or replaces one that is gone. The metadata may be stale.
    pub(super) fn connect(&mut self, of: usize) {
        if self.links[of].as_ref().is_some_and(|link| !link.is_gone) {
            return;
        }
        self.close(of);
        let number = self.number();
        let (id, Metadata { identity, invitation, address }) =
            (LinkId(number), self.known[of].clone());
        let peer = &self.agents[1 - of];
        let is_stale = identity != peer.metadata.identity;
        let keys = Keys::new(&invitation, None);
        let mut nonce = [of as u8; 16];
        nonce[..8].copy_from_slice(&number.to_le_bytes());
        let dead = ([10, 0, 1, 1], 7000).into();
        let addresses = if number.is_multiple_of(3) { vec![dead, address] } else { vec![address] };
        let up_by = clock::now() + PEER_TIMEOUT;
        let who = (identity, keys, nonce);
        let link = OpenedLink::new(id, who, addresses, BULK_LANES, Arc::default(), up_by);
        self.agents[of].submit(Command::Connect(Box::new(link)));
        let mut ends_by = Vec::new();
        if is_stale {
            ends_by.push(ErrorKind::PeerRestarted);
            self.known[of] = self.agents[1 - of].metadata.clone();
        }
        let (opened, waits_since) = (clock::now(), None);
        self.links[of] =
            Some(Link { id, is_up: false, is_gone: false, opened, waits_since, ends_by });
        self.bounds.push((up_by + SLACK, of, Bound::Connect(id)));
    }

    /// Closes a link, as core does.
    pub(super) fn close(&mut self, of: usize) {
        let Some(link) = self.links[of].take() else { return };
        self.excuse_operations(of, &[ErrorKind::Closed]);
        self.agents[of].submit(Command::Close { link: link.id });
    }

    /// Returns the link if operations may be posted over it.
    fn up(&self, of: usize) -> Option<LinkId> {
        self.links[of].as_ref().filter(|link| link.is_up && !link.is_gone).map(|link| link.id)
    }

    /// Posts a transfer if there is a link and its slot is free. Returns true if it did.
    pub(super) fn post(&mut self, at: usize, op: Op, patience: Duration) -> bool {
        let slot = &self.slots[at];
        let (of, block) = (slot.of, slot.block);
        let Some(link) = self.up(of) else { return false };
        let remote = if op == Op::Read { &slot.source } else { &slot.sink };
        if slot.posted.is_some() || slot.local.revoked.is_some() {
            return false;
        }
        let ends_by: Vec<_> = remote.revoked.iter().map(|_| ErrorKind::Revoked).collect();
        if op == Op::Write && !ends_by.is_empty() {
            return false; // the sink of a failed write
        }
        let id = TransferId(self.number());
        let is_list = self.random.below(2) == 0;
        let content = content(block, &mut self.random);
        let slot = &mut self.slots[at];
        slot.local.set(content.clone());
        let from = if op == Op::Read { slot.source.content.clone() } else { content };
        let plan = Arc::new(slot.plan(link, op, is_list));
        let (done, outcome) = Outcome::new();
        let deadline = clock::now() + patience;
        let (is_cancelled, is_orphan) = (false, false);
        let ends_by =
            [ends_by, self.links[of].iter().flat_map(|link| link.ends_by.clone()).collect()]
                .concat();
        slot.posted = Some(Posted {
            id,
            link,
            op,
            is_list,
            outcome,
            from,
            deadline,
            is_cancelled,
            ends_by,
            is_orphan,
        });
        self.agents[of].submit(Command::Post { link, plan, id, done });
        true
    }

    pub(super) fn cancel(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        let Some(posted) = &mut slot.posted else { return };
        posted.is_cancelled = true;
        posted.ends_by.push(ErrorKind::Cancelled);
        self.agents[slot.of].submit(Command::Cancel { link: posted.link, id: posted.id });
        self.bounds.push((
            clock::now() + Duration::from_micros(1),
            slot.of,
            Bound::Cancel(posted.id),
        ));
    }

    /// Sends a notification with its number, padded.
    pub(super) fn notify(&mut self, of: usize) {
        let Some(link) = self.up(of) else { return };
        let number = self.number();
        let len = [8, 3000, 60_000][self.random.below(3)];
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.resize(len, number as u8);
        let (done, outcome) = Outcome::new();
        let ends_by = self.links[of].iter().flat_map(|link| link.ends_by.clone()).collect();
        self.told.push(SentNotice { of, number, link, outcome, ends_by, is_orphan: false });
        self.agents[of].submit(Command::Notify { link, bytes: bytes.into(), done });
    }

    /// Revokes a region of a slot. Core cancels its own transfers from and to the region before.
    fn revoke(&mut self, at: usize) {
        let which = PlaceRole::ALL[self.random.below(3)];
        if which == PlaceRole::Local {
            self.cancel(at);
        }
        let slot = &mut self.slots[at];
        let op = slot.posted.as_ref().map(|posted| posted.op);
        let place = slot.place(which);
        if place.revoked.is_some() {
            return;
        }
        place.revoke();
        if let Some(posted) = &mut slot.posted
            && Some(which) == op.map(PlaceRole::of_peer)
        {
            posted.ends_by.push(ErrorKind::Revoked);
        }
    }

    /// Records that a link, with its operations, may end with these kinds.
    fn excuse(&mut self, of: usize, by: &[ErrorKind]) {
        if let Some(link) = &mut self.links[of] {
            link.ends_by.extend_from_slice(by);
        }
        self.excuse_operations(of, by);
    }

    fn excuse_operations(&mut self, of: usize, by: &[ErrorKind]) {
        let posted = self.slots.iter_mut().filter(|slot| slot.of == of);
        let transfers = posted.filter_map(|slot| slot.posted.as_mut());
        let told = self.told.iter_mut().filter(|told| told.of == of);
        let all =
            transfers.map(|posted| &mut posted.ends_by).chain(told.map(|told| &mut told.ends_by));
        all.for_each(|ends_by| ends_by.extend_from_slice(by));
    }

    /// Stops an agent for a time. It loses no peer by that, but its peer may lose it.
    fn stop(&mut self, of: usize, time: Duration) {
        if self.agents.iter().any(Agent::is_stopped) || network::is_frozen() {
            return;
        }
        let until = clock::now() + time;
        self.agents[of].stopped_until = Some(until);
        for (at, who, _) in &mut self.bounds {
            if *who == of {
                *at += time;
            }
        }
        self.causes.note_outage(time, [of == 1, of == 0]);
        self.expect_loss(1 - of, time);
    }

    /// Lets nothing arrive for a time.
    fn freeze(&mut self, time: Duration) {
        if self.agents.iter().any(Agent::is_stopped) || network::is_frozen() {
            return;
        }
        network::freeze(clock::now() + time);
        self.causes.note_outage(time, [true, true]);
        (0..2).for_each(|of| self.expect_loss(of, time));
    }

    /// Expects that an agent loses its peer, which does not answer for a time, if it waits.
    fn expect_loss(&mut self, of: usize, time: Duration) {
        let by = PEER_TIMEOUT + SLACK;
        if time > by
            && let Some(link) = self.up(of)
        {
            self.bounds.push((clock::now() + by, of, Bound::Loss(link, self.next)));
        }
    }

    /// Kills an agent, and starts a new incarnation at once, with new metadata.
    fn restart(&mut self, of: usize) {
        self.lives += 1;
        self.counts.restarts += 1;
        let new = Agent::start(of, self.lives, self.seal);
        drop(std::mem::replace(&mut self.agents[of], new));
        self.excuse(1 - of, &[ErrorKind::PeerLost, ErrorKind::PeerRestarted]);
        self.links[of] = None;
        self.known[of] = self.agents[1 - of].metadata.clone();
        self.told.retain(|told| told.of != of);
        self.told.iter_mut().for_each(|told| told.is_orphan = true);
        self.bounds.retain(|(_, who, _)| *who != of);
        for slot in &mut self.slots {
            let mut open = || {
                self.next += 1;
                Place::new(&self.agents[of], self.next, slot.block, &mut self.random)
            };
            if slot.of == of {
                slot.local = open();
                if slot.posted.take().is_some_and(|posted| posted.op == Op::Write)
                    && slot.sink.revoked.is_none()
                {
                    slot.sink.revoke(); // the rest of the write may still arrive
                }
            } else {
                (slot.source, slot.sink) = (open(), open());
                slot.posted
                    .iter_mut()
                    .for_each(|posted| posted.is_orphan |= posted.op == Op::Write);
            }
        }
    }

    /// Carries bytes and gives turns to agents that are awake. Returns true if anything happened.
    pub(super) fn round(&mut self) -> bool {
        let mut moved = network::carry();
        let first = self.random.below(2);
        for of in [first, 1 - first] {
            if self.agents[of].wakes() {
                self.agents[of].turn();
                self.settle();
                moved = true;
            }
        }
        moved
    }

    /// Lets time pass.
    pub(super) fn pass(&mut self, time: Duration) {
        let until = clock::now() + time;
        loop {
            let mut rounds = 0;
            while self.round() {
                rounds += 1;
                assert!(rounds < ROUNDS, "an agent never sleeps: {}", self.standing());
            }
            let next = self.next_event().filter(|next| *next <= until);
            virtual_time::advance_to(next.unwrap_or(until));
            let acted = self.act_on_time();
            if next.is_none() && !acted {
                return;
            }
        }
    }

    fn next_event(&self) -> Option<Instant> {
        let agents = self.agents.iter().filter_map(Agent::next_event);
        let transfers = self.slots.iter().filter_map(|slot| slot.posted.as_ref());
        let deadlines =
            transfers.filter(|posted| !posted.is_cancelled).map(|posted| posted.deadline);
        let bounds = self.bounds.iter().map(|(at, ..)| *at);
        agents.chain(deadlines).chain(bounds).chain(network::next_event()).min()
    }

    /// Cancels transfers whose deadline has passed, as core does, and checks bounds that are due.
    fn act_on_time(&mut self) -> bool {
        let now = clock::now();
        let late = |slot: &Slot| {
            slot.posted
                .as_ref()
                .is_some_and(|posted| !posted.is_cancelled && posted.deadline <= now)
        };
        let late: Vec<_> = (0..self.slots.len()).filter(|at| late(&self.slots[*at])).collect();
        late.iter().for_each(|at| self.cancel(*at));
        let due: Vec<_> = self.bounds.extract_if(.., |(at, ..)| *at <= now).collect();
        for (_, of, bound) in due {
            match self.agents[of].stopped_until.filter(|until| now < *until) {
                // A stopped agent acts when it continues.
                Some(until) => self.bounds.push((until + SLACK, of, bound)),
                None => self.check_bound(of, &bound),
            }
        }
        !late.is_empty()
    }
}
