//! Promises of the engine's transports.

use std::time::Duration;

use kvx_core::{
    Capabilities, HungPageScope, Idle, Isolation, MemoryKind, MemoryKinds, PerOp, Revocation,
};

/// Returns what Mooncake promises over one of its transports.
pub(crate) fn capabilities(protocol: &str) -> Capabilities {
    let tcp = protocol == "tcp";
    let memory = if tcp {
        MemoryKinds::HOST
    } else {
        MemoryKinds::of(&[MemoryKind::Host, MemoryKind::Pinned, MemoryKind::Cuda])
    };
    Capabilities {
        isolation: PerOp::same(Isolation::Cooperative),
        idle: Idle::Polls,
        target_cpu: if tcp { PerOp::BOTH } else { PerOp::NEITHER },
        revocation: Revocation::Confirmed,
        peer_loss_within: Some(Duration::from_secs(1)),
        settles_without_peer: PerOp::NEITHER,
        hung_page: HungPageScope::Agent,
        ordered: false,
        local: memory,
        remote: memory,
    }
}
