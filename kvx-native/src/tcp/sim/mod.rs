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

use kvx_testkit::{Tier, assert_seeds_repeat, run_seeds};

use world::World;

const SEEDS: u64 = 200;
/// The number of seeds in the whole tier.
const MANY_SEEDS: u64 = 3_000;
/// The number of seeds that run again, and how often.
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
    let many = Tier::Whole.runs_or_says("TCP: 3,000 simulations of two agents");
    let count = if many { MANY_SEEDS } else { SEEDS };
    let runs = run_seeds(count, |seed| run(seed).0);
    if runs.len() as u64 == count {
        let mut all = Counts::default();
        runs.into_iter().for_each(|run| all.add(run));
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
    assert_seeds_repeat(REPEATED, REPETITIONS, run);
}
