//! Finds out whether a peer can still be reached after something failed, which NIXL's C interface
//! does not tell.
//!
//! UCX gives a connection up over the first error on it, whether the peer has ended or memory that
//! it named is gone, and refuses all that comes after; NIXL still knows the peer. A read of no
//! bytes touches no memory and waits for no answer of the peer's, but it is refused all the same.
//! Other plugins may refuse it for reasons of their own: they are not asked.

use std::ffi::CStr;

use kvx_core::Op;

use crate::cpu_trials;
use crate::ffi::{MemorySegment, NixlAgent, Range, Request, State};

/// The state of a connection, as far as it is known.
pub(crate) enum ConnectionState {
    /// NIXL rejects every request to the peer.
    Broken,
    /// It carries requests, or its state cannot be known.
    Works,
    /// As before, and the read of no bytes waits for what else is in progress.
    Pending(Request),
}

/// Looks whether a peer can be reached that NIXL knows. `there`: some memory of the peer's that
/// NIXL knows.
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
