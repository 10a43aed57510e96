//! Connectors that run: what they load, keep, give back, and say when something is wrong.
#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

mod context_parallel;
mod digests;
mod endings;
mod faces;
mod host_copies;
mod mooncake;
mod pushes;
mod rig;
mod settings;
mod spans;
mod steps;
