//! The capabilities that transports start from.

use kvx_core::{Capabilities, HungPageScope, Idle, Isolation, MemoryKinds, PerOp, Revocation};

/// Returns the capabilities of a transport over a native library that promises nothing more: peers
/// are trusted, a target's CPU serves its peers, and revocation needs the control protocol.
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
