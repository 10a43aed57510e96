//! Running connectors: loads, leases, returns, and errors.

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
