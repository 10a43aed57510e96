//! The configuration of a transfer before it is posted.

use std::sync::Arc;

use super::links::PeerInner;
use crate::completion::{Completion, Promise};
use crate::fault_injection::injected;
use crate::plan::Plan;
use crate::transfer::{Transfer, TransferInner};
use crate::transport::MAX_NOTIFICATION;
use crate::{Deadline, ErrorKind, Result};

/// A transfer that is about to be posted; see [`Peer::transfer`](crate::Peer::transfer).
#[must_use = "call post or post_wait"]
pub struct TransferBuilder {
    pub(super) peer: Arc<PeerInner>,
    pub(super) plan: Plan,
    pub(super) deadline: Option<Deadline>,
    pub(super) notify: Option<Box<[u8]>>,
}

impl TransferBuilder {
    /// Sets the deadline of the transfer. The default is 30 seconds from the post.
    pub fn deadline(mut self, deadline: impl Into<Deadline>) -> Self {
        self.deadline = Some(deadline.into());
        self
    }

    /// Sends `bytes` to the peer as a notification after the data. The transfer resolves when the
    /// peer's agent has the notification.
    ///
    /// If the transfer fails after its data has arrived, the peer may still receive the
    /// notification, perhaps later: [`Error::report`](crate::Error::report) is `Some` then. After
    /// an error without a report, the peer never receives it.
    pub fn notify(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.notify = Some(bytes.as_ref().into());
        self
    }

    /// Starts the transfer; see [`Peer::post`](crate::Peer::post).
    ///
    /// # Errors
    /// `Busy`, `Invalid` (also for a notification above 64 KiB), `Revoked`, `Closed` or `Forked`,
    /// as for [`Peer::post`](crate::Peer::post).
    pub fn post(self) -> Result<Transfer> {
        self.reserve()?;
        Ok(self.begin())
    }

    /// Starts the transfer as soon as the budget allows it.
    ///
    /// # Errors
    /// `TimedOut` if the budget is used up until the transfer's deadline; otherwise as
    /// [`post`](Self::post), except `Busy`.
    pub async fn post_wait(self) -> Result<Transfer> {
        let deadline = self.deadline.unwrap_or_else(Deadline::default_for_transfers);
        loop {
            match self.reserve() {
                Ok(()) => return Ok(self.begin()),
                Err(error) if error.kind() == ErrorKind::Busy => {}
                Err(error) => return Err(error),
            }
            let late = || {
                ErrorKind::TimedOut
                    .because("the budget of transfers was used up until the deadline")
            };
            if deadline.passed() {
                return Err(late());
            }
            let promise = Promise::new();
            promise.by(&self.peer.agent.clock, deadline, late);
            self.peer.agent.budget.on_change(self.plan.size().description, Arc::clone(&promise));
            Completion::of(promise).await?;
        }
    }

    /// Checks the transfer, reserves its share of the budget and pins its regions.
    fn reserve(&self) -> Result<()> {
        let agent = &self.peer.agent;
        agent.check_open()?;
        if let Some(bytes) = &self.notify {
            check_notification(bytes)?;
        }
        if self.plan.0.peer != self.peer.identity {
            return Err(ErrorKind::Invalid.because(format!(
                "the plan is for {:?}, this peer is {:?}",
                self.plan.0.peer, self.peer.identity
            )));
        }
        if self.plan.0.locals.iter().any(|region| !region.is_of(agent)) {
            return Err(
                ErrorKind::Invalid.because("the plan's local regions belong to another agent")
            );
        }
        agent.budget.take(self.plan.size().description)?;
        for (at, region) in self.plan.0.locals.iter().enumerate() {
            if let Err(error) = region.core().pin() {
                self.plan.0.locals[..at].iter().for_each(|region| region.core().unpin());
                agent.budget.give_back(self.plan.size().description);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Starts the reserved transfer.
    #[inline(always)]
    fn begin(self) -> Transfer {
        let TransferBuilder { peer, plan, deadline, notify } = self;
        let empty = plan.size().bytes == 0 && notify.is_none();
        let transfer = TransferInner::new(plan, peer, deadline, notify);
        if empty && !injected("zero") {
            transfer.end(Ok(())); // an empty plan needs no link
        } else {
            transfer.dispatch();
        }
        transfer.posted();
        Transfer(transfer)
    }
}

pub(super) fn check_notification(bytes: &[u8]) -> Result<()> {
    if bytes.len() <= MAX_NOTIFICATION {
        return Ok(());
    }
    Err(ErrorKind::Invalid.because(format!(
        "a notification of {} bytes, but at most {MAX_NOTIFICATION} are allowed: move data with a \
         transfer",
        bytes.len()
    )))
}
