//! Promises of transports.

use kvx_core::{Capabilities, HungPageScope, Idle, Isolation, MemoryKinds, PerOp, Revocation};

/// Returns the promises of a transport over a native library of which nothing better is known.
/// Peers are trusted, serve each other with their CPUs, and revoke memory with the control
/// protocol's help.
pub fn of_library(memory: MemoryKinds) -> Capabilities {
    Capabilities {
        isolation: PerOp::same(Isolation::Cooperative),
        idle: Idle::Polls,
        target_cpu: PerOp::BOTH,
        revocation: Revocation::Confirmed,
        peer_loss_within: None,
        settles_without_peer: PerOp::NEITHER,
        hung_page: HungPageScope::Agent,
        ordered: false,
        local: memory,
        remote: memory,
    }
}
