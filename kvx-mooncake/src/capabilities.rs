//! Capabilities of the engine's transports.

use std::time::Duration;

use kvx_backend::capabilities::of_library;
use kvx_core::{Capabilities, MemoryKind, MemoryKinds, PerOp};

/// Returns Mooncake's capabilities over one of its transports.
pub(crate) fn capabilities(protocol: &str) -> Capabilities {
    let tcp = protocol == "tcp";
    let memory = if tcp {
        MemoryKinds::HOST
    } else {
        MemoryKinds::of(&[MemoryKind::Host, MemoryKind::Pinned, MemoryKind::Cuda])
    };
    Capabilities {
        target_cpu: if tcp { PerOp::BOTH } else { PerOp::NEITHER },
        peer_loss_within: Some(Duration::from_secs(1)),
        ..of_library(memory)
    }
}
