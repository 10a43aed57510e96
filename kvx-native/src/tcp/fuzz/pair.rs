//! Both ends of a link over socket pairs with small buffers: calls move fewer bytes than available,
//! or none, lanes overtake each other and stop for a while, transfers are cancelled and regions
//! revoked, and one end may be killed at any time. A seed determines the whole run.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvx_backend::reactor::Outbox;
use kvx_core::backend::{RegionKey, RegionSpec, Ticket};
use kvx_core::{ErrorKind, Memory, Op, RegionId, TransferId};
use kvx_testkit::{Random, Tier, assert_seeds_repeat, run_seeds};

use super::initiator::{self, BLOCKS, DONE, OPEN, ORDERS, SLOTS, Slot};
use super::{LANES, Lanes, WatchedMemory, owner, seals, who};
use crate::tcp::connections::connection::Role;
use crate::tcp::connections::requests::RequestLane;
use crate::tcp::connections::serve::ServedLane;
use crate::tcp::links::OpenedLink;
use crate::tcp::memory::regions::ServedRegion;
use crate::tcp::seal::Seal;
use crate::tcp::socket::cut;

const SEEDS: u64 = 2000;
/// The number of seeds in the whole tier.
const MANY_SEEDS: u64 = 10_000;
/// The number of seeds that run again, from 1 (seed 0 has the run of seed 1), and how often.
const REPEATED: u64 = 20;
const REPETITIONS: u64 = 50;
/// The owner's region that reads read from. Writes of slot `n` go to region `SOURCE + 1 + n`.
const SOURCE: u64 = 1;
/// The number of turns within which all operations end if neither end is killed.
const ENOUGH: usize = 20_000;

/// The end that is killed in a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Killed {
    Nobody,
    Owner,
    Initiator,
}

/// The expected result of a slot's transfer.
struct Wanted {
    how: u8,
    /// The content of the source.
    from: Vec<u8>,
}

struct Pair {
    random: Random,
    initiator: Lanes,
    peer: Option<OpenedLink>,
    slots: [Slot; 4],
    wanted: [Option<Wanted>; 4],
    /// True for slots with a write that was given up: its bytes may still arrive, even after the
    /// next one's.
    unsure: [bool; 4],
    owner: Lanes,
    regions: Vec<(Arc<ServedRegion>, WatchedMemory)>,
    /// The numbers of sent and of acknowledged notifications.
    told: usize,
    acknowledged: Arc<std::sync::atomic::AtomicUsize>,
    posted: u64,
    arrived: u64,
    /// The lanes of the initiator and of the owner that have no turns.
    stopped: [[bool; LANES]; 2],
    /// A hash of everything that has happened.
    trace: DefaultHasher,
}

/// The turns between two events, at most.
const TURNS: usize = 24;

impl Pair {
    fn new(seed: u64) -> Self {
        let mut random = Random::seeded(seed);
        let seal = Seal::NAMED[random.below(Seal::NAMED.len())].1;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..LANES {
            let (near, far) = UnixStream::pair().expect("descriptors are available");
            for socket in [&near, &far] {
                // The kernel doubles the size and has a minimum.
                let room = [1, 8 << 10, 64 << 10][random.below(3)];
                rustix::net::sockopt::set_socket_send_buffer_size(socket.as_fd(), room)
                    .expect("it is open");
            }
            let (initiators, owners) = seals();
            ours.push((near, initiators));
            theirs.push((far, owners));
        }
        let request =
            |key, lane| Role::Requests(Box::new(RequestLane::new(key, initiator::LINK, lane)));
        let served = |key, lane| {
            Role::Served(Box::new(ServedLane::new(key, who(3), (owner::LINK, lane), None)))
        };
        let mut pair = Pair {
            initiator: Lanes::over(ours, seal, request),
            peer: Some(initiator::opened()),
            slots: SLOTS.map(Slot::new),
            wanted: [const { None }; 4],
            unsure: [false; 4],
            owner: Lanes::over(theirs, seal, served),
            regions: Vec::new(),
            told: 0,
            acknowledged: Arc::default(),
            posted: 0,
            arrived: 0,
            stopped: Default::default(),
            trace: DefaultHasher::new(),
            random,
        };
        for number in SOURCE..=SOURCE + SLOTS.len() as u64 {
            let block =
                if number == SOURCE { SLOTS[3] } else { SLOTS[(number - SOURCE - 1) as usize] };
            let watched = WatchedMemory::new(BLOCKS as usize * block as usize);
            pair.fill(&watched.memory);
            let (id, key) = (RegionId(number), RegionKey([number as u8; 16]));
            let spec = RegionSpec { id, key, memory: Arc::clone(&watched.memory) };
            pair.regions.push((pair.owner.scope.context.regions.add(spec, None), watched));
        }
        pair.initiator.scope.piece = 17 + pair.random.below(40_000);
        pair.owner.scope.piece = 17 + pair.random.below(40_000);
        pair
    }

    fn fill(&mut self, memory: &Memory) {
        let content: Vec<u8> = (0..memory.len()).map(|_| self.random.word() as u8).collect();
        memory.copy_in(0, &content).expect("the lengths are equal");
    }

    /// Lets a random event happen.
    fn step(&mut self) {
        let mut out = Outbox::default();
        let at = self.random.below(SLOTS.len());
        match self.random.below(16) {
            0..8 if self.slots[at].posted.is_none() => self.post(at, &mut out),
            8 => self.give_up(at, &mut out),
            9 => {
                let acknowledged = Arc::clone(&self.acknowledged);
                let done = move |result: kvx_core::Result<()>| {
                    acknowledged.fetch_add(usize::from(result.is_ok()), Ordering::Relaxed);
                };
                let len = self.random.below(3000);
                self.told += 1;
                self.peer().notify(vec![7; len].into(), Ticket::new(done), &mut out);
            }
            10 => {
                let has_room = self.random.below(2) == 0;
                owner::set_room(&mut self.owner, has_room);
            }
            11 if self.random.below(8) == 0 => {
                let (served, watched) = &mut self.regions[at];
                owner::revoke(&mut self.owner, served);
                watched.keep();
            }
            12 => {
                let lane = &mut self.stopped[self.random.below(2)][self.random.below(LANES)];
                *lane = !*lane;
            }
            _ => {}
        }
        self.settle(out);
    }

    fn peer(&mut self) -> &mut OpenedLink {
        self.peer.as_mut().expect("the link has not ended")
    }

    fn post(&mut self, at: usize, out: &mut Outbox) {
        let how = self.random.below(16) as u8;
        let memory = Arc::clone(&self.slots[at].watched.memory);
        let (from, region) = match initiator::op_of(how) {
            Op::Read => (self.regions[0].1.content(), SOURCE),
            Op::Write => {
                self.fill(&memory);
                self.slots[at].watched.keep();
                (self.slots[at].watched.content(), SOURCE + 1 + at as u64)
            }
        };
        self.wanted[at] = Some(Wanted { how, from });
        self.posted += 1;
        let peer = self.peer.as_mut().expect("the link has not ended");
        initiator::post(peer, &mut self.slots[at], (at, how, region), TransferId(self.posted), out);
    }

    fn give_up(&mut self, at: usize, out: &mut Outbox) {
        let Some((id, _)) = &self.slots[at].posted else { return };
        let why = ErrorKind::Cancelled.because("cancelled by the seed");
        let Pair { peer, initiator, .. } = self;
        let peer = peer.as_mut().expect("the link has not ended");
        peer.give_up(*id, why, &mut initiator.conns, &mut initiator.scope, out, |_| {});
    }

    /// Runs turns of lanes of both ends in a random order. Lanes that are stopped have none.
    fn turns(&mut self) {
        for _ in 0..self.random.below(TURNS) {
            let (end, lane) = (self.random.below(2), self.random.below(LANES));
            if self.stopped[end][lane] {
                continue;
            }
            match end {
                0 => self.turn_initiator(lane).expect("its owner lives"),
                _ => self.turn_owner(lane).expect("its initiator lives"),
            }
        }
    }

    /// Runs a turn of each lane of the initiator. Returns an error if its link has ended.
    fn turn_initiators(&mut self) -> Result<(), ()> {
        (0..LANES).try_for_each(|lane| self.turn_initiator(lane))
    }

    /// Runs a turn of each lane of the owner. Returns an error if its link has ended.
    fn turn_owners(&mut self) -> Result<(), ()> {
        (0..LANES).try_for_each(|lane| self.turn_owner(lane))
    }

    /// Runs a turn of a lane of the initiator. Returns an error if its link has ended.
    fn turn_initiator(&mut self, lane: usize) -> Result<(), ()> {
        let mut out = Outbox::default();
        let Pair { peer, initiator, .. } = self;
        let peer = peer.as_mut().expect("the link has not ended");
        peer.issue(&mut initiator.conns, &mut initiator.scope, |_| {});
        let turned = initiator.turn_here(lane).map_err(drop);
        let mut applied = Ok(());
        for effect in std::mem::take(&mut initiator.scope.effects) {
            applied = applied.and(initiator::apply_effects(effect, initiator, peer, &mut out));
        }
        self.settle(out);
        ("initiator", lane, turned).hash(&mut self.trace);
        turned.and(applied)
    }

    /// Runs a turn of a lane of the owner. Returns an error if its link has ended.
    fn turn_owner(&mut self, lane: usize) -> Result<(), ()> {
        let turned = self.owner.turn_here(lane).map_err(drop);
        ("owner", lane, turned).hash(&mut self.trace);
        turned.and_then(|_| owner::take_effects(&mut self.owner))
    }

    /// Settles the results of a turn, and checks the content that has arrived.
    fn settle(&mut self, out: Outbox) {
        let before =
            [0, 1, 2, 3].map(|at| self.slots[at].posted.as_ref().map(|(_, how)| Arc::clone(how)));
        initiator::settle(&mut self.slots, out);
        for (at, standing) in before.into_iter().enumerate() {
            let Some(standing) = standing.map(|standing| standing.load(Ordering::Relaxed)) else {
                continue;
            };
            if standing == OPEN {
                continue;
            }
            (at, standing).hash(&mut self.trace);
            let Wanted { how, from } = self.wanted[at].take().expect("it was posted");
            let is_read = initiator::op_of(how) == Op::Read;
            if standing != DONE {
                self.unsure[at] |= !is_read;
            } else if is_read || !self.unsure[at] {
                self.arrived += 1;
                let watched =
                    if is_read { &self.slots[at].watched } else { &self.regions[1 + at].1 };
                let orders = if is_read { ORDERS } else { [ORDERS[1], ORDERS[0]] };
                is_there(how, &watched.content(), &from, SLOTS[at] as usize, orders);
            }
        }
    }

    fn check(&self) {
        self.slots.iter().for_each(|slot| slot.watched.check());
        self.regions.iter().for_each(|(_, watched)| watched.check());
    }
}

/// Checks that the moved blocks are equal in `to` and `from`, in these orders.
fn is_there(how: u8, to: &[u8], from: &[u8], block: usize, orders: [u32; 2]) {
    let block_of = |content: &[u8], index: u32| content[index as usize * block..][..block].to_vec();
    let [to_order, from_order] = orders.map(|by| initiator::blocks(how, by));
    for (there, here) in (0..to_order.len()).map(|at| (to_order.at(at), from_order.at(at))) {
        assert!(block_of(to, there) == block_of(from, here), "block {there} has wrong bytes");
    }
}

/// Runs once. Returns the number of transfers that arrived, the end that was killed, and the hash
/// of the run.
fn run(seed: u64) -> (u64, Killed, u64) {
    cut::by(Some(seed));
    let mut pair = Pair::new(seed);
    let killed =
        [Killed::Nobody, Killed::Nobody, Killed::Owner, Killed::Initiator][pair.random.below(4)];
    for _ in 0..4 + pair.random.below(40) {
        pair.step();
        pair.turns();
        pair.check();
    }
    let mut ended = false;
    match killed {
        Killed::Nobody => {
            owner::set_room(&mut pair.owner, true);
            let is_done = |pair: &Pair| {
                pair.slots.iter().all(|slot| slot.posted.is_none())
                    && pair.told == pair.acknowledged.load(Ordering::Relaxed)
            };
            for _ in 0..ENOUGH {
                pair.turn_initiators().expect("its owner lives");
                pair.turn_owners().expect("its initiator lives");
                ended = is_done(&pair);
                if ended {
                    break;
                }
            }
        }
        Killed::Owner => {
            pair.owner.end();
            ended = (0..ENOUGH).any(|_| pair.turn_initiators().is_err());
        }
        Killed::Initiator => {
            pair.initiator.end();
            ended = (0..ENOUGH).any(|_| pair.turn_owners().is_err());
        }
    }
    assert!(ended, "operations do not end, or a killed peer is not noticed: {killed:?}");
    pair.check();
    pair.initiator.end();
    let mut out = Outbox::default();
    let why = ErrorKind::PeerLost.because("the run has ended");
    let peer = pair.peer.take().expect("the link ends once");
    peer.lost(why, &pair.initiator.scope.context.deferred, &mut out);
    pair.settle(out);
    assert!(
        pair.slots.iter().all(|slot| slot.posted.is_none()),
        "a transfer did not settle at the end of its link"
    );
    // Bytes in the sockets may reach the owner's memory, but not the initiator's.
    (0..100).any(|_| killed == Killed::Owner || pair.turn_owners().is_err());
    pair.check();
    pair.owner.end();
    cut::by(None);
    let slots = pair.slots.iter().map(|slot| &slot.watched);
    for watched in slots.chain(pair.regions.iter().map(|(_, watched)| watched)) {
        watched.content().hash(&mut pair.trace);
    }
    (pair.arrived, killed, pair.trace.finish())
}

#[test]
fn transfers_arrive_completely_or_end_under_short_calls_and_kills() {
    let many = Tier::Whole.runs_or_says("TCP: 10,000 random runs of a link");
    let count = if many { MANY_SEEDS } else { SEEDS };
    let runs = run_seeds(count, run);
    if runs.len() as u64 == count {
        let arrived: u64 = runs.iter().map(|(arrived, ..)| arrived).sum();
        let killed = runs.iter().filter(|(_, who, _)| *who != Killed::Nobody).count() as u64;
        assert!(
            arrived > 4 * count && killed > count / 4,
            "{arrived} arrived, {killed} ends were killed"
        );
    }
}

#[test]
fn a_seed_repeats_its_run() {
    assert_seeds_repeat(REPEATED, REPETITIONS, run);
}
