#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]

mod allocation;
mod backing;
mod chaos;
mod check;
pub mod clauses;
mod corpus;
pub mod device;
mod etcd;
mod executor;
mod exhaustive;
mod far;
mod faults;
mod flat;
pub mod harness;
mod hex;
mod hosts;
mod kubernetes;
mod listener;
mod median;
mod mutation;
mod newcomer;
mod pattern;
mod process;
mod process_state;
mod random;
mod recorder;
mod seeds;
mod setup;
mod skip;
mod soak;
mod still;
mod stopwatch;
mod suite;
mod tier;
mod unique;

pub use allocation::{CountingAllocator, most_allocated};
pub use backing::{Backing, DeviceSource};
pub use chaos::{Chaos, Fault, Gate};
pub use check::{Check, Failure};
pub use clauses::{Breaker, CLAUSES, Clause, Execution};
pub use corpus::replay;
pub use device::{Device, TestDevice};
pub use etcd::Etcd;
pub use executor::run;
pub use exhaustive::{EDGES, sequences};
pub use far::{FarEnd, HungPage, Limit, PostSpec, ReceivedNotification, cpu_time};
pub use faults::{FaultReport, Moment, Trouble, fault};
pub use flat::stays_flat;
pub use harness::{
    harness_main, harness_main_with, is_own_process, run_in_own_process, trial, trial_within,
};
pub use hex::{hex, unhex};
pub use hosts::{DIED_AFTER_PASSING, Host, Hosts, refused_behind, run_one_test};
pub use kubernetes::{FakeKubernetes, WatchEnd, ready_pod};
pub use kvx_testkit_macros::test;
pub use listener::{
    ATTACKER_CONNECTS, AttackBytes, Bounds, Client, Cost, Listener, connect_from,
    listening_addresses,
};
pub use median::median_time;
pub use mutation::{fuzz, within_limits};
pub use newcomer::{newcomer, newcomers_amid, own_if_asked, readers};
pub use pattern::{byte_at, checksum, fill};
pub use process::{Child, Grandchild, answers_apart, kill_after, output, stop_process};
pub use process_state::{ProcessState, ResourceUsage};
pub use random::Random;
pub use recorder::RecordedMetrics;
pub use seeds::{assert_seeds_repeat, run_seeds};
pub use setup::{AgentPair, Mode, Setup};
pub use skip::{gap_held, skip};
pub use soak::{Soak, SoakCounts, soak};
pub use still::StillBackend;
pub use suite::{
    Gap, GapRate, Separation, Suite, conformance_main, conformance_trials, serve_if_asked,
};
pub use tier::{Tier, is_asked_for};
pub use unique::{free_port, unique};
