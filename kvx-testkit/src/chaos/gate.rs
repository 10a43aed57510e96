//! A gate that decides when tickets settle.

use std::sync::Arc;

use kvx_core::Result;
use kvx_core::backend::Ticket;
use kvx_core::backend::sync::{Mutex, MutexGuard};

/// Holds back tickets that a transport has settled, until the gate opens. It is open at first.
///
/// With a gate, a clause can delay any backend, whatever the backend's own speed.
#[derive(Clone, Default)]
pub struct Gate(Arc<Mutex<GateState>>);

#[derive(Default)]
struct GateState {
    transfers: TicketQueue,
    revocations: TicketQueue,
}

#[derive(Default)]
struct TicketQueue {
    shut: bool,
    held: Vec<(Ticket, Result<()>)>,
}

/// The operation that a ticket belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TicketKind {
    Transfer,
    Revocation,
}

impl GateState {
    fn queue(&mut self, kind: TicketKind) -> &mut TicketQueue {
        match kind {
            TicketKind::Transfer => &mut self.transfers,
            TicketKind::Revocation => &mut self.revocations,
        }
    }
}

impl Gate {
    /// Creates an open gate.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        self.0.lock()
    }

    /// Holds back the tickets of transfers from now on.
    pub fn hold_transfers(&self) {
        self.state().transfers.shut = true;
    }

    /// Holds back the tickets of revocations from now on.
    pub fn hold_revocations(&self) {
        self.state().revocations.shut = true;
    }

    /// Returns the number of tickets that are held back: transfers and revocations that the
    /// transport has finished.
    pub fn held(&self) -> usize {
        let state = self.state();
        state.transfers.held.len() + state.revocations.held.len()
    }

    /// Settles the tickets that were held back, and passes all tickets from now on.
    pub fn open(&self) {
        let held: Vec<_> = {
            let mut state = self.state();
            let GateState { transfers, revocations } = &mut *state;
            (transfers.shut, revocations.shut) = (false, false);
            transfers.held.drain(..).chain(revocations.held.drain(..)).collect()
        };
        held.into_iter().for_each(|(ticket, result)| ticket.settle(result));
    }

    /// Drops the tickets that were held back, as a transport that loses them would.
    pub fn forget(&self) {
        let held: Vec<_> = {
            let mut state = self.state();
            let GateState { transfers, revocations } = &mut *state;
            transfers.held.drain(..).chain(revocations.held.drain(..)).collect()
        };
        drop(held);
    }

    /// Settles the ticket with its result, at once or when the gate opens.
    pub(crate) fn pass(&self, kind: TicketKind, ticket: Ticket, result: Result<()>) {
        let mut state = self.state();
        let queue = state.queue(kind);
        if queue.shut {
            queue.held.push((ticket, result));
        } else {
            drop(state);
            ticket.settle(result);
        }
    }
}
