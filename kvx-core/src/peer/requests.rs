//! What needs a link to a peer.

use std::sync::Arc;

use crate::Error;
use crate::bound::BoundPlan;
use crate::plan::Plan;
use crate::ticket::Ticket;
use crate::transport::Link;

/// A transfer that is to be handed a link.
pub(crate) trait NeedsLink: Send + Sync {
    fn plan(&self) -> &Plan;

    /// The reason why a backend could not carry it, if it was tried.
    fn refusal(&self, backend: &'static str) -> Option<Error>;

    /// True if it has ended, so that nobody need start it.
    fn has_ended(&self) -> bool;

    /// This link serves it.
    fn start(self: Arc<Self>, link: &Arc<dyn Link>, backend: &'static str, bound: Arc<BoundPlan>);

    /// No link does.
    fn fail(self: Arc<Self>, error: Error);
}

/// Something that needs a link.
pub(crate) enum LinkRequest {
    Transfer(Arc<dyn NeedsLink>),
    Notify(Box<[u8]>, Ticket),
    Ready(Ticket),
}

impl LinkRequest {
    /// The reason why a backend cannot serve this request, if it has said so.
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
