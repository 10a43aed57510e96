#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]

mod chaos;
mod check;
pub mod clauses;
pub mod device;
mod executor;
mod far;
mod pattern;
mod process;
mod setup;
mod skip;
mod stopwatch;
mod suite;
mod surroundings;
mod tier;

pub use chaos::{Chaos, Fault, Gate};
pub use check::{Check, Failure};
pub use clauses::{Breaker, CLAUSES, Clause, Runs};
pub use device::{Device, TestDevice};
pub use executor::run;
pub use far::{Far, PostSpec, Sent};
pub use pattern::{byte_at, checksum, fill};
pub use process::{Child, kill_after, output};
pub use setup::{Backing, DeviceSource, Mode, Pair, Setup};
pub use skip::skip;
pub use suite::{Gap, Suite, conformance_main, serve_if_asked};
pub use surroundings::Surroundings;
pub use tier::Tier;
