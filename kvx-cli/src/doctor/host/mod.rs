//! Examines this host as the home of an engine.

mod environment;
mod isolation;
mod libraries;
mod limits;
mod network;
mod ports;
pub(super) mod system;

use kvx::Registry;

use super::finding::Finding;

/// Examines this host.
pub(super) fn examine(registry: &Registry) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(limits::examine());
    found.extend(isolation::examine());
    found.extend(network::examine());
    found.extend(environment::examine());
    found.extend(ports::examine());
    found.extend(libraries::examine(registry));
    found
}
