//! Connectors that run: what they load, keep, give back, and say when something is wrong.

mod context_parallel;
mod digests;
mod endings;
mod faces;
mod host_copies;
mod mooncake;
mod pushes;
pub(crate) mod rig;
mod settings;
mod spans;
mod steps;
