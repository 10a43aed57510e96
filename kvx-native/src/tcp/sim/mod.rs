//! Simulations of two agents on virtual time: whole machines, each with a link to the other, over a
//! network that delays lanes independently and moves bytes in pieces. A seed determines transfers
//! with deadlines, notifications, revocations, and every fault: lanes that stall or are cut, a
//! network that is down, agents that are stopped or restart under the same name and address.
//!
//! A machine has turns only while its reactor would be awake, and time passes only while everything
//! sleeps. Each run ends with a network without faults, in which all operations must end and new
//! links to the current agents must work.

mod agent;
mod causes;
mod checks;
mod operations;
mod world;

use kvx_testkit::Tier;

use world::World;

const SEEDS: u64 = 200;
/// The number of seeds in the whole tier.
const MANY_SEEDS: u64 = 10_000;
/// The seeds that run again, from 1 (which 0 equals), and how often.
const REPEATED: u64 = 10;
const REPETITIONS: u64 = 10;

/// The events of a run, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    arrived: u64,
    acknowledged: u64,
    revoked: u64,
    cancelled: u64,
    lost_links: u64,
    restarts: u64,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.arrived += other.arrived;
        self.acknowledged += other.acknowledged;
        self.revoked += other.revoked;
        self.cancelled += other.cancelled;
        self.lost_links += other.lost_links;
        self.restarts += other.restarts;
    }
}

/// Runs once. Returns what happened, and the hash of what both agents observed.
fn run(seed: u64) -> (Counts, u64) {
    let mut world = World::new(seed);
    for _ in 0..20 + world.random.below(100) {
        world.step();
    }
    world.finish()
}

#[test]
fn operations_end_in_time_under_any_fault_of_network_and_agents() {
    let many = Tier::Whole.runs_or_says("TCP: 10,000 simulations of two agents");
    let count = if many { MANY_SEEDS } else { SEEDS };
    // `KVX_SEED=17` runs one seed.
    let seeds = match std::env::var("KVX_SEED").map(|seed| seed.parse().expect("a number")) {
        Ok(seed) => seed..seed + 1,
        Err(_) => 0..count,
    };
    let mut all = Counts::default();
    for seed in seeds.clone() {
        let ran =
            std::panic::catch_unwind(|| run(seed)).inspect_err(|_| eprintln!("KVX_SEED={seed}"));
        all.add(ran.expect("the seed is shown above").0);
    }
    if seeds.end - seeds.start == count {
        let enough = all.arrived > 10 * count
            && all.acknowledged > 5 * count
            && [all.revoked, all.cancelled, all.lost_links, all.restarts]
                .iter()
                .all(|happened| *happened > count / 2);
        assert!(enough, "too little happened in {count} runs: {all:?}");
    }
}

#[test]
fn a_seed_repeats_its_simulation() {
    // `KVX_SEED=17 KVX_REPEATS=1000` repeats one seed.
    let number = |name| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let seeds = number("KVX_SEED").map_or(1..REPEATED + 1, |seed: u64| seed..seed + 1);
    let mut hashes = std::collections::BTreeSet::new();
    for seed in seeds.clone() {
        let first = run(seed);
        for _ in 1..number("KVX_REPEATS").unwrap_or(REPETITIONS) {
            assert_eq!(run(seed), first, "seed {seed} has two different runs");
        }
        hashes.insert(first.1);
    }
    assert_eq!(hashes.len() as u64, seeds.end - seeds.start, "the hash does not tell runs apart");
}
