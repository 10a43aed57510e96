//! Finds out whether a peer is still reachable after a failure; NIXL's C interface does not tell.
//!
//! UCX closes a connection on its first error, whether the peer has ended or memory that it named
//! is gone, and rejects everything afterwards; NIXL still knows the peer. A read of no bytes
//! accesses no memory and does not wait for the peer, but a broken connection rejects it too. Other
//! plugins may reject it for other reasons, so kvx does not use it with them.

use std::ffi::CStr;

use kvx_core::Op;

use crate::cpu_trials;
use crate::ffi::{MemorySegment, NixlAgent, Range, Request, State};

/// The state of a connection, as far as it is known.
pub(crate) enum ConnectionState {
    /// NIXL rejects every request to the peer.
    Broken,
    /// The connection carries requests, or its state cannot be known.
    Works,
    /// Still unknown: the read of no bytes waits for earlier operations.
    Pending(Request),
}

/// Checks whether a peer that NIXL knows is reachable. `there`: some memory of the peer that NIXL
/// knows.
pub(crate) fn look(agent: &NixlAgent, peer: &CStr, there: &Range) -> ConnectionState {
    if !agent.is_over_ucx() {
        return ConnectionState::Works;
    }
    let (Ok(mut local), Ok(mut remote)) =
        (agent.list(MemorySegment::Host), agent.list(there.segment))
    else {
        return ConnectionState::Works;
    };
    local.add(cpu_trials::page().address, 0, 0);
    remote.add(there.address, 0, there.device);
    let Ok(request) = agent.request(Op::Read, &local, &remote, peer) else {
        return ConnectionState::Works;
    };
    // SAFETY: the page is never freed, and the request is not in progress.
    match unsafe { agent.post(&request) } {
        State::Failed(_) => ConnectionState::Broken,
        State::Done => ConnectionState::Works,
        State::InProgress => ConnectionState::Pending(request),
    }
}
