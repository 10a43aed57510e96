//! The gathering of ranks that join an engine from processes of their own.

use std::net::SocketAddr;
use std::path::PathBuf;

use kvx_core::backend::Ticket;
use kvx_core::{Error, Result};

/// Where ranks join their engine.
#[derive(Clone, Debug)]
pub(in crate::runtime) enum JoinAddress {
    /// At a Unix socket.
    Path(PathBuf),
    /// From other hosts too.
    Tcp(SocketAddr),
}

/// Ranks that are to join. The socket goes with it.
pub(in crate::runtime) struct Gathering {
    at: JoinAddress,
    /// Settled when all have come, or one does not.
    ticket: Option<Ticket>,
    /// All have come. Caches that a rank gives back afterwards have no deadline.
    whole: bool,
}

impl Gathering {
    pub(super) fn new(at: JoinAddress, ticket: Ticket) -> Self {
        Gathering { at, ticket: Some(ticket), whole: false }
    }

    /// Returns whether all ranks have joined and registered their caches once.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// All ranks are there, or one will never be.
    pub(super) fn settle(&mut self, result: Result<()>) -> GatheringEnd {
        self.whole |= result.is_ok();
        GatheringEnd(self.ticket.take().map(|ticket| (ticket, result)))
    }

    /// Nobody joins any more.
    pub(in crate::runtime) fn end(mut self, why: Error) {
        if let Some(ticket) = self.ticket.take() {
            ticket.settle(Err(why));
        }
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        if let JoinAddress::Path(path) = &self.at {
            std::fs::remove_file(path).ok(); // a socket that is left behind is replaced
        }
    }
}

/// A gathering that has ended, for whoever waits for it.
#[derive(Default)]
pub(super) struct GatheringEnd(Option<(Ticket, Result<()>)>);

impl GatheringEnd {
    pub(super) fn settle(self) {
        if let Some((ticket, result)) = self.0 {
            ticket.settle(result);
        }
    }
}
