//! A transfer request of NIXL: prepared once, posted any number of times, then released.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvx::{Completion, Deadline, Peer, Plan, Report, Transfer};
use kvx_core::backend::sync::Mutex;

use crate::confirmation::{Confirmation, Step};
use crate::log::warn;
use crate::status::{NixlResult, NixlStatus};

/// The time that a release waits for a transfer that it has cancelled, before it reports that the
/// transfer is active.
const PATIENCE: Duration = Duration::from_millis(50);

/// A prepared transfer.
pub(crate) struct Request {
    pub(crate) peer: String,
    pub(crate) plan: Plan,
    flight: Mutex<Flight>,
}

struct Flight {
    /// The transfer that may still access memory: of the data, or of its confirmation.
    transfer: Option<Transfer>,
    /// The confirmation that has to follow the data. Kept while a transfer may write to its memory.
    confirmation: Option<Confirmation>,
    /// Parts of the request's notification that the peer has not accepted yet: the request has
    /// succeeded when it has accepted all.
    parts: Vec<Completion<()>>,
    status: NixlStatus,
    /// True if the request was released in flight.
    released: bool,
}

impl Flight {
    /// Updates and returns its status. `look` drives the transfer.
    fn ask(
        &mut self,
        look: impl Fn(&mut Transfer) -> Option<kvx::Result<Report>>,
        peer: &str,
        cure: &str,
    ) -> NixlStatus {
        let mut confirms = true;
        while self.status == NixlStatus::InProgress && confirms {
            match self.transfer.as_mut().map(&look) {
                Some(None) => break,
                Some(Some(Err(error))) => self.failed(&error, peer, cure),
                Some(Some(Ok(_))) => self.transfer = None,
                None => confirms = self.confirm(peer, cure),
            }
        }
        if self.transfer.is_none()
            && self.confirmation.is_none()
            && self.status == NixlStatus::InProgress
        {
            let mut parts = std::mem::take(&mut self.parts);
            parts.retain_mut(|part| match now(part) {
                None => true,
                Some(Ok(())) => false,
                Some(Err(error)) => {
                    self.failed(&error, peer, cure);
                    false
                }
            });
            if self.status == NixlStatus::InProgress && parts.is_empty() {
                self.status = NixlStatus::Success;
            }
            self.parts = parts;
        }
        if self.status != NixlStatus::InProgress {
            self.transfer.take_if(|transfer| transfer.is_settled());
            self.confirmation.take_if(|_| self.transfer.is_none());
        }
        self.status
    }

    /// Continues the confirmation. Returns false if there is nothing to do now.
    fn confirm(&mut self, peer: &str, cure: &str) -> bool {
        match self.confirmation.as_mut().map(Confirmation::step) {
            None | Some(Ok(Step::Waiting)) => return false,
            Some(Ok(Step::Reading(transfer))) => self.transfer = Some(transfer),
            Some(Ok(Step::Confirmed(parts))) => {
                (self.parts, self.confirmation) = (parts, None);
                return false;
            }
            Some(Err(error)) => self.failed(&error, peer, cure),
        }
        true
    }

    fn failed(&mut self, error: &kvx::Error, peer: &str, cure: &str) {
        self.status = NixlStatus::from(error);
        if self.status != NixlStatus::Cancelled {
            warn(format_args!(
                "agent {peer}: {error}{}",
                if is_of_the_way(error) { cure } else { "" }
            ));
        }
    }
}

/// Returns the result if it is ready. Neither waits nor wakes a task.
pub(crate) fn now<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

/// Returns whether the address at which TCP listens may be the cause.
fn is_of_the_way(error: &kvx::Error) -> bool {
    matches!(error.kind(), kvx::ErrorKind::NoRoute | kvx::ErrorKind::PeerLost)
}

/// The outcome of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseOutcome {
    /// The request's memory is not accessed any more, and may be freed.
    Gone,
    /// The transfer has not ended yet.
    Active,
    /// The transfer has not ended by the deadline either: its memory must stay valid.
    Stuck,
}

impl Request {
    pub(crate) fn new(peer: String, plan: Plan) -> Self {
        let flight = Flight {
            transfer: None,
            confirmation: None,
            parts: Vec::new(),
            status: NixlStatus::NotPosted,
            released: false,
        };
        Request { peer, plan, flight: Mutex::new(flight) }
    }

    /// Posts the request; the last of the notifications follows the data. If there is a
    /// confirmation, that follows the data, and has the notifications. Returns `Active` while an
    /// earlier post may still access its memory.
    pub(crate) fn post(
        &self,
        peer: &Peer,
        mut notes: Vec<Box<[u8]>>,
        confirmation: Option<Confirmation>,
        deadline: Deadline,
        cure: &str,
    ) -> NixlResult<NixlStatus> {
        let mut flight = self.flight.lock();
        flight.ask(now, &self.peer, cure);
        if flight.transfer.is_some() || flight.status == NixlStatus::InProgress {
            return Err(NixlStatus::Active);
        }
        let mut posting = peer.transfer(&self.plan).deadline(deadline);
        if let Some(note) = notes.pop() {
            posting = posting.notify(note);
        }
        match posting.post() {
            Ok(transfer) => {
                (flight.transfer, flight.status) = (Some(transfer), NixlStatus::InProgress);
                (flight.released, flight.confirmation) = (false, confirmation);
                flight.parts = notes.iter().map(|part| peer.notify(part, deadline)).collect();
                Ok(flight.ask(now, &self.peer, cure))
            }
            Err(error) => {
                warn(format_args!("agent {}: {error}", self.peer));
                flight.status = NixlStatus::from(&error);
                Err(flight.status)
            }
        }
    }

    /// Returns the request's status, and drives the link.
    pub(crate) fn check(&self, cure: &str) -> NixlStatus {
        self.flight.lock().ask(Transfer::drive, &self.peer, cure)
    }

    /// Cancels the transfer, and returns whether it has ended. Waits until the deadline at the
    /// second call, or if the result was reported before.
    pub(crate) fn release(&self, deadline: Duration) -> ReleaseOutcome {
        let (settled, again) = {
            let mut flight = self.flight.lock();
            let Some(transfer) = &flight.transfer else { return ReleaseOutcome::Gone };
            transfer.cancel();
            let settled = transfer.settled();
            // NIXL evaluates the answer only while it has no result: after one, this call is the
            // last.
            let last = flight.status != NixlStatus::InProgress;
            (settled, std::mem::replace(&mut flight.released, true) || last)
        };
        match settled.wait_blocking(if again { deadline } else { PATIENCE }) {
            Ok(()) => {
                self.flight.lock().transfer = None;
                ReleaseOutcome::Gone
            }
            Err(_) if again => ReleaseOutcome::Stuck,
            Err(_) => ReleaseOutcome::Active,
        }
    }

    /// Returns whether the request was released in flight, even if it has ended since.
    pub(crate) fn is_released(&self) -> bool {
        self.flight.lock().released
    }

    /// Returns whether the request was released in flight and has ended since.
    pub(crate) fn is_over(&self) -> bool {
        let flight = self.flight.lock();
        flight.released && flight.transfer.as_ref().is_none_or(Transfer::is_settled)
    }
}
