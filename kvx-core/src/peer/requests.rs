//! Requests that need a link to a peer.

use std::sync::Arc;

use crate::Error;
use crate::bound::BoundPlan;
use crate::plan::Plan;
use crate::ticket::Ticket;
use crate::transport::Link;

/// A transfer that waits for a link.
pub(crate) trait NeedsLink: Send + Sync {
    fn plan(&self) -> &Plan;

    /// Returns why a backend could not carry it, if that backend was tried.
    fn refusal(&self, backend: &'static str) -> Option<Error>;

    /// Returns true if the transfer has already ended, so that it need not be started.
    fn has_ended(&self) -> bool;

    /// Called when this link serves it.
    fn start(self: Arc<Self>, link: &Arc<dyn Link>, backend: &'static str, bound: Arc<BoundPlan>);

    /// Called when no link serves it.
    fn fail(self: Arc<Self>, error: Error);
}

/// A request that needs a link.
pub(crate) enum LinkRequest {
    Transfer(Arc<dyn NeedsLink>),
    Notify(Box<[u8]>, Ticket),
    Ready(Ticket),
}

impl LinkRequest {
    /// Returns why a backend cannot serve this request, if that backend has refused it.
    pub(super) fn refusal(&self, backend: &'static str) -> Option<Error> {
        match self {
            LinkRequest::Transfer(transfer) => transfer.refusal(backend),
            LinkRequest::Notify(..) | LinkRequest::Ready(_) => None,
        }
    }

    pub(super) fn fail(self, error: Error) {
        match self {
            LinkRequest::Transfer(transfer) => transfer.fail(error),
            LinkRequest::Notify(_, ticket) | LinkRequest::Ready(ticket) => {
                ticket.settle(Err(error))
            }
        }
    }
}
