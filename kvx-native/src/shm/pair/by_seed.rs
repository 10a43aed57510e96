//! Runs with any result of system calls and any events in between: a seed determines every choice.

use kvx_core::Op;
use kvx_testkit::Random;

use super::end::{Resources, alone};
use super::{LONG, MANY, Pair, RegionRole, Role, SMALL, Shape, cut};

const SEEDS: u64 = 200;
/// A shape whose reads are too large to be done where they are posted.
const PAGES: Shape = Shape::of(4 << 10, 32);
/// The size in bytes up to which memory is checked after each step; all memory is checked at the
/// end.
const GLANCE: usize = 4 << 10;

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// All operations end, then core closes the link.
    Well,
    /// Core closes the link at once.
    Closed,
    /// The kernel refuses a packet for good.
    Broken,
    Killed(Role),
}

const FATES: [Fate; 5] = [
    Fate::Well,
    Fate::Closed,
    Fate::Broken,
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
    match pair.random.below(20) {
        0..12 => {
            let op = [Op::Read, Op::Write][pair.random.below(2)];
            let is_list = pair.random.below(2) == 0;
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
        _ => {}
    }
}

/// Draws whether files are lost, and the end of the run.
fn drawn(random: &mut Random) -> (bool, Fate) {
    (random.below(4) == 0, FATES[random.below(FATES.len())])
}

/// Runs one seed. Returns the numbers of transfers, notifications and regions that succeeded.
fn run(seed: u64) -> [u64; 3] {
    let mut random = Random::seeded(seed);
    let (loses_files, fate) = drawn(&mut random);
    cut::by(seed, loses_files);
    let before = Resources::now();
    let slots = if seed.is_multiple_of(4) { [SMALL, LONG, LONG] } else { [SMALL, PAGES, MANY] };
    let mut pair = Pair::new(random, &slots);
    pair.connect();
    for _ in 0..10 + pair.random.below(60) {
        step(&mut pair);
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
        Fate::Killed(who) => pair.kill(who),
    }
    pair.has_ended();
    let came = [pair.arrived, pair.acknowledged, pair.revoked];
    cut::by(!seed, false);
    pair.all_works();
    drop(pair);
    cut::off();
    assert_eq!(Resources::soon(before), before, "a run leaves resources behind");
    came
}

fn all_seeds() {
    // `KVX_SEED=17` runs one seed.
    let seeds = match std::env::var("KVX_SEED").map(|seed| seed.parse().expect("a number")) {
        Ok(seed) => seed..seed + 1,
        Err(_) => 0..SEEDS,
    };
    let mut all = [0; 3];
    for seed in seeds.clone() {
        let ran = std::panic::catch_unwind(|| run(seed));
        let came = ran.unwrap_or_else(|_| {
            let (loses_files, fate) = drawn(&mut Random::seeded(seed));
            panic!("KVX_SEED={seed}: {fate:?}, loses files: {loses_files}")
        });
        all = std::array::from_fn(|at| all[at] + came[at]);
    }
    if seeds.end - seeds.start == SEEDS {
        let enough = [8, 3, 1].map(|each| each * SEEDS);
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
