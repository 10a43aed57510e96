//! Runs with any result of system calls and any events in between: a seed determines every choice.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{ErrorKind, Op};
use kvx_testkit::{Random, Tier, assert_seeds_repeat, run_seeds};

use super::end::{Resources, alone};
use super::{LONG, MANY, Pair, RegionRole, Role, SMALL, Shape, cut};
use crate::shm::progress::Command;
use crate::shm::shared_link::SharedLink;

const SEEDS: u64 = 200;
/// The number of seeds in the whole tier.
const MANY_SEEDS: u64 = 3_000;
/// The number of seeds that run again, and how often.
const REPEATED: u64 = 10;
const REPETITIONS: u64 = 10;
/// A shape whose reads are too large to be done where they are posted.
const PAGES: Shape = Shape::of(4 << 10, 32);
/// The size in bytes up to which memory is checked after each step; all memory is checked at the
/// end.
const GLANCE: usize = 4 << 10;

/// The end of a link's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// All operations end, then core closes the link.
    Well,
    /// Core closes the link at once.
    Closed,
    /// The kernel refuses a packet for good.
    Broken,
    /// An end is stopped for a time.
    Stopped(Role),
    /// An end is killed, and an agent of the same name takes its place.
    Killed(Role),
}

const FATES: [Fate; 7] = [
    Fate::Well,
    Fate::Closed,
    Fate::Broken,
    Fate::Stopped(Role::Initiator),
    Fate::Stopped(Role::Owner),
    Fate::Killed(Role::Initiator),
    Fate::Killed(Role::Owner),
];

/// Lets a random event happen.
fn step(pair: &mut Pair) {
    let at = pair.random.below(pair.slots.len());
    if let Some(op) = pair.slots[at].posted.as_ref().map(|posted| posted.op)
        && pair.random.below(24) == 0
    {
        // Revokes a region that the transfer uses; long transfers are more likely to be hit.
        let used = if op == Op::Read {
            &[RegionRole::Source][..]
        } else {
            &[RegionRole::Local, RegionRole::Sink]
        };
        let which = used[pair.random.below(used.len())];
        return pair.revoke(at, which);
    }
    match pair.random.below(24) {
        0..12 => {
            let op = [Op::Read, Op::Write][pair.random.below(2)];
            let is_list = pair.random.below(2) == 0;
            pair.patience = Duration::from_millis([1, 500, 30_000][pair.random.below(3)]);
            pair.post(at, op, is_list);
        }
        12 => pair.cancel(at),
        13..16 => {
            let len = [20, 3000, 60_000][pair.random.below(3)];
            pair.notify(len);
        }
        16 => {
            let has_room = pair.random.below(3) > 0;
            pair.owner.set_room(has_room);
        }
        17 => {
            let which = RegionRole::ALL[pair.random.below(3)];
            pair.revoke(at, which);
        }
        18 if pair.random.below(8) == 0 => {
            pair.close();
            pair.connect();
        }
        // A link stays up however long an answer takes, and whatever is idle.
        19 if pair.random.below(4) == 0 => {
            let time = pair.random.below(40_000);
            pair.pass(Duration::from_millis(time as u64));
        }
        _ => {}
    }
}

/// The choices at the beginning of a run.
fn drawn(random: &mut Random) -> (bool, Vec<Fate>) {
    let loses_files = random.below(4) == 0;
    let lives = [1, 1, 1, 2, 3][random.below(5)];
    (loses_files, (0..lives).map(|_| FATES[random.below(FATES.len())]).collect())
}

/// Connects to an earlier incarnation of the owner, whose place another one has taken.
fn meet_successor(pair: &mut Pair, link: Arc<SharedLink>, socket: Vec<u8>) {
    pair.initiator.command(Command::Connect { link: Arc::clone(&link), socket });
    pair.until("the end of a link to an earlier incarnation", |_| link.gone.get().is_some());
    let why = link.gone.get().map(|why| why.kind());
    assert_eq!(why, Some(ErrorKind::PeerRestarted), "{:?}", link.gone.get());
    pair.initiator.command(Command::Close { link });
    pair.has_ended();
}

/// Lets a link live and end.
fn live(pair: &mut Pair, fate: Fate) {
    pair.connect();
    for _ in 0..10 + pair.random.below(60) {
        step(pair);
        for _ in 0..pair.random.below(16) {
            // Either end may be slow.
            let who = [Role::Initiator, Role::Owner][pair.random.below(2)];
            pair.turn_of(who);
        }
        pair.check(GLANCE);
    }
    match fate {
        Fate::Well => {
            pair.owner.set_room(true);
            pair.until("the end of all operations", Pair::is_idle);
            pair.close();
        }
        Fate::Closed => pair.close(),
        Fate::Broken => {
            let is_only = |pair: &Pair| {
                let ends = [&pair.initiator, &pair.owner];
                pair.up().is_some() && ends.iter().all(|end| end.machine.connections.len() == 1)
            };
            pair.until("the end of earlier links", is_only);
            pair.break_link();
        }
        Fate::Stopped(who) => {
            let time = [500, 8_000, 14_000, 60_000][pair.random.below(4)];
            pair.stop(who, Duration::from_millis(time));
            pair.check(usize::MAX);
            if !pair.is_gone() {
                pair.close();
            }
        }
        Fate::Killed(who) => {
            let (id, socket) = (pair.number(), pair.owner.machine.socket_name());
            let shared = Arc::new(pair.owner.shared(kvx_core::backend::LinkId(id)));
            pair.kill(who);
            if who == Role::Owner {
                pair.has_ended();
                meet_successor(pair, shared, socket);
            }
        }
    }
    pair.owner.set_room(true);
    pair.has_ended();
}

/// Runs one seed. Returns the numbers of transfers, notifications and regions that succeeded, and
/// the hash of what both ends observed.
fn run(seed: u64) -> ([u64; 3], u64) {
    let mut random = Random::seeded(seed);
    let (loses_files, fates) = drawn(&mut random);
    cut::by(seed, loses_files);
    let before = Resources::now();
    // Runs with long transfers take ten times as long as others.
    let is_long = seed.is_multiple_of(if seed < SEEDS { 4 } else { 32 });
    let slots = if is_long { [SMALL, LONG, LONG] } else { [SMALL, PAGES, MANY] };
    let mut pair = Pair::new(random, &slots);
    pair.slow_copies = true;
    fates.into_iter().for_each(|fate| live(&mut pair, fate));
    let came = [pair.arrived, pair.acknowledged, pair.revoked];
    cut::by(!seed, false);
    pair.all_works();
    let mut hash = DefaultHasher::new();
    pair.inbox.trace().hash(&mut hash);
    for slot in &pair.slots {
        for place in [&slot.local, &slot.source, &slot.sink] {
            place.look().hash(&mut hash);
        }
    }
    drop(pair);
    cut::off();
    assert_eq!(Resources::now(), before, "a run leaves resources behind");
    (came, hash.finish())
}

fn all_seeds() {
    let many = Tier::Whole.runs_or_says("SHM: 3,000 random runs of a link");
    let count = if many { MANY_SEEDS } else { SEEDS };
    let came = run_seeds(count, |seed| {
        let (loses_files, fates) = drawn(&mut Random::seeded(seed));
        // Printed if the test fails.
        println!("seed {seed}: {fates:?}, loses files: {loses_files}");
        run(seed).0
    });
    if came.len() as u64 == count {
        let all: [u64; 3] = std::array::from_fn(|at| came.iter().map(|run| run[at]).sum());
        let enough = [8, 3, 1].map(|each| each * count);
        assert!(
            (0..3).all(|at| all[at] > enough[at]),
            "{all:?} succeeded, at least {enough:?} should"
        );
    }
}

#[test]
fn transfers_arrive_or_end_under_any_kernel_result_and_any_kill() {
    alone(
        module_path!(),
        "transfers_arrive_or_end_under_any_kernel_result_and_any_kill",
        all_seeds,
    );
}

#[test]
fn a_seed_repeats_its_run() {
    alone(module_path!(), "a_seed_repeats_its_run", || {
        assert_seeds_repeat(REPEATED, REPETITIONS, run);
    });
}
