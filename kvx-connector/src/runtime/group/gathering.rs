//! The gathering of ranks that join an engine from processes of their own.

use std::net::SocketAddr;
use std::path::PathBuf;

use kvx_core::backend::Ticket;
use kvx_core::{Error, Result};

/// The address at which ranks join their engine.
#[derive(Clone, Debug)]
pub(in crate::runtime) enum JoinAddress {
    /// A Unix socket.
    Path(PathBuf),
    /// A TCP address, for ranks on other hosts too.
    Tcp(SocketAddr),
}

/// The ranks that are expected to join. Dropping it removes the socket.
pub(in crate::runtime) struct Gathering {
    at: JoinAddress,
    /// Settled when all ranks have joined, or when one certainly will not.
    ticket: Option<Ticket>,
    /// True once all ranks have joined. Caches that a rank gives back afterwards have no deadline.
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

    /// Settles the gathering, because all ranks have joined or one never will.
    pub(super) fn settle(&mut self, result: Result<()>) -> GatheringEnd {
        self.whole |= result.is_ok();
        GatheringEnd(self.ticket.take().map(|ticket| (ticket, result)))
    }

    /// Ends the gathering, because no rank can join any more.
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

/// The result of a gathering, for the caller of
/// `Connector::group`.
#[derive(Default)]
pub(super) struct GatheringEnd(Option<(Ticket, Result<()>)>);

impl GatheringEnd {
    pub(super) fn settle(self) {
        if let Some((ticket, result)) = self.0 {
            ticket.settle(result);
        }
    }
}
