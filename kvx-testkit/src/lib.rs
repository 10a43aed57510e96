#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]

mod chaos;
mod check;
pub mod clauses;
mod corpus;
pub mod device;
mod executor;
mod far;
mod faults;
mod flat;
pub mod harness;
mod hosts;
mod mutation;
mod newcomer;
mod pattern;
mod process;
mod random;
mod setup;
mod skip;
mod soak;
mod stopwatch;
mod suite;
mod surroundings;
mod tier;

pub use chaos::{Chaos, Fault, Gate};
pub use check::{Check, Failure};
pub use clauses::{Breaker, CLAUSES, Clause, Runs};
pub use corpus::replay;
pub use device::{Device, TestDevice};
pub use executor::run;
pub use far::{Far, HungPage, Limit, PostSpec, Sent, cpu_time};
pub use faults::{Ended, Moment, Trouble, fault};
pub use flat::stays_flat;
pub use harness::{
    harness_main, harness_main_with, is_own_process, run_in_own_process, trial, trial_within,
};
pub use hosts::{DIED_AFTER_PASSING, Host, Hosts, refused_behind, run_one_test};
pub use kvx_testkit_macros::test;
pub use mutation::fuzz;
pub use newcomer::{newcomer, newcomers_amid};
pub use pattern::{byte_at, checksum, fill};
pub use process::{Child, Grandchild, answers_apart, kill_after, output};
pub use random::Random;
pub use setup::{AgentPair, Backing, DeviceSource, Mode, Setup, free_port, unique};
pub use skip::{gap_held, skip};
pub use soak::{Done, Soak, soak};
pub use suite::{Apart, Gap, GapRate, Suite, conformance_main, conformance_trials, serve_if_asked};
pub use surroundings::{Holdings, Surroundings};
pub use tier::{Tier, is_asked_for};
