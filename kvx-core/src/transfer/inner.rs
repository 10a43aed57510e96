//! The state of a transfer from its post until it settles.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::bound::BoundPlan;
use crate::completion::Promise;
use crate::deadline::{Expire, Reason, Watch};
use crate::fault_injection::injected;
use crate::flush;
use crate::operation::{Op, Size};
use crate::peer::{LinkRequest, NeedsLink, PeerInner};
use crate::plan::Plan;
use crate::report::Report;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::ticket::{Settle, Ticket};
use crate::transport::Link;
use crate::{Deadline, Error, ErrorKind, Result, TransferId, quarantine, telemetry};

pub(crate) struct TransferInner {
    pub(crate) id: TransferId,
    pub(crate) plan: Plan,
    peer: Arc<PeerInner>,
    posted: Instant,
    deadline: Deadline,
    /// Set before `cancel` looks for the link, and read after `start` has chosen one, so that one
    /// of the two cancels at the link.
    cancelled: AtomicBool,
    /// True if a backend has refused the transfer.
    refused: AtomicBool,
    /// True if the transfer had settled, or lost its ticket, when it resolved: nothing more happens
    /// to it. A transfer that settles after it resolves does not set this.
    pub(super) over: AtomicBool,
    pub(super) state: Mutex<TransferState>,
    pub(super) finished: Condvar,
    span: tracing::Span,
}

pub(super) struct TransferState {
    outcome: Resolution,
    pub(super) stage: TicketStage,
    /// The link that carries the transfer and its backend, once a route is chosen.
    pub(super) on: Option<(Arc<dyn Link>, &'static str)>,
    notify: Option<Box<[u8]>>,
    /// The report, once the notification is on its way. The notification may still arrive, whatever
    /// the transfer resolves with.
    pub(super) arrived: Option<Report>,
    pub(super) waker: Option<Waker>,
    watch: Option<Watch>,
    pub(super) settled: Vec<Arc<Promise<()>>>,
    post_time: Duration,
    /// Backends that had a link to the peer but could not carry this transfer, and why.
    refused: Vec<(&'static str, Error)>,
}

enum Resolution {
    Pending,
    Done(Result<Report>),
    Taken,
}

/// The state of the transfer's ticket, which decides whether its memory is free.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TicketStage {
    /// No transport has the transfer yet.
    Parked,
    /// A transport holds the ticket.
    InFlight,
    /// Nothing will touch the memory again.
    Settled,
    /// The ticket is lost: the memory may still be touched.
    Forgotten,
}

impl TransferInner {
    pub(crate) fn new(
        plan: Plan,
        peer: Arc<PeerInner>,
        deadline: Option<Deadline>,
        notify: Option<Box<[u8]>>,
    ) -> Arc<Self> {
        let id = peer.agent.new_transfer();
        let posted = Instant::now();
        let span = tracing::debug_span!(
            "kvx_transfer",
            id = id.0,
            op = %plan.op(),
            peer = %peer.identity.name,
            bytes = plan.size().bytes,
            blocks = plan.size().blocks,
        );
        Arc::new(TransferInner {
            id,
            plan,
            peer,
            posted,
            deadline: deadline.unwrap_or_else(|| Deadline::default_from(posted)),
            cancelled: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            over: AtomicBool::new(false),
            state: Mutex::new(TransferState {
                outcome: Resolution::Pending,
                stage: TicketStage::Parked,
                on: None,
                notify,
                arrived: None,
                waker: None,
                watch: None,
                settled: Vec::new(),
                post_time: Duration::ZERO,
                refused: Vec::new(),
            }),
            finished: Condvar::new(),
            span,
        })
    }

    /// Records the cost of the post, and watches the deadline of a transfer that has not resolved.
    pub(crate) fn posted(self: &Arc<Self>) {
        if self.over.load(Ordering::Acquire) {
            return;
        }
        let is_parked = {
            let mut state = self.state.lock();
            // A transfer can be settled but not resolved: its notification is under way, and the
            // deadline covers that too.
            if !matches!(state.outcome, Resolution::Pending) {
                return;
            }
            state.post_time = self.posted.elapsed();
            state.stage == TicketStage::Parked
        };
        let probe = if is_parked { self.peer.probe_awaited_until() } else { None };
        let Some(at) = self.deadline.instant().into_iter().chain(probe).min() else { return };
        let watch = self.peer.agent.clock.watch(at, Arc::clone(self) as Arc<dyn Expire>);
        let mut state = self.state.lock();
        if matches!(state.outcome, Resolution::Pending) {
            state.watch = Some(watch);
            drop(state);
        } else {
            drop(state);
            drop(watch);
        }
        // Interrupts between the post and the watch did not reach this transfer.
        if self.peer.agent.is_closed() {
            Arc::clone(self).interrupt(&Reason::Shutdown);
        }
        for region in self.plan.0.locals.iter().filter(|region| region.core().is_revoking()) {
            Arc::clone(self).interrupt(&Reason::Region(region.id()));
        }
    }

    /// Ends the transfer if no transport has had it.
    pub(crate) fn end(self: &Arc<Self>, result: Result<()>) {
        let parked = {
            let mut state = self.state.lock();
            let parked = state.stage == TicketStage::Parked;
            if parked {
                state.stage = TicketStage::InFlight;
            }
            parked
        };
        if parked {
            Arc::clone(self).settled(result);
        }
    }

    /// Sets the outcome, unless it is already set.
    fn resolve(&self, result: Result<Report>) {
        let result = result.map_err(|error| self.explained(error));
        self.decide(self.state.lock(), result);
    }

    /// Returns the error with the context that users see. Takes the lock of the peer.
    fn explained(&self, error: Error) -> Error {
        // The reason of a loss says more than the error of a link that was closed because of it.
        let lost = if error.kind() == ErrorKind::Closed { self.peer.lost() } else { None };
        let error = lost.unwrap_or(error).with_operation(match self.plan.op() {
            Op::Read => "read",
            Op::Write => "write",
        });
        error.with_peer(Arc::clone(&self.peer.identity.name))
    }

    /// Does the work of [`resolve`](Self::resolve) with a locked state and an error that already
    /// has its context.
    fn decide(&self, mut state: MutexGuard<'_, TransferState>, result: Result<Report>) {
        let settled = matches!(state.stage, TicketStage::Settled | TicketStage::Forgotten);
        let watch = state.watch.take_if(|_| settled);
        if !matches!(state.outcome, Resolution::Pending) {
            drop(state);
            return drop(watch);
        }
        let result = result.map_err(|error| {
            let error = error.with_report(state.arrived.clone());
            match state.on {
                Some((_, backend)) => error.with_backend(backend),
                None => error,
            }
        });
        let told = result.clone();
        state.outcome = Resolution::Done(result);
        self.over.store(settled, Ordering::Release);
        let waker = state.waker.take();
        drop(state);
        drop(watch);
        self.finished.notify_all();
        if let Some(waker) = waker.filter(|_| !injected("wake")) {
            waker.wake();
        }
        let _entered = self.span.enter();
        match told {
            Ok(report) => {
                let Report { backend, post_time, transfer_time, .. } = report;
                let open = self.peer.agent.transports.iter().find(|open| open.name == backend);
                if let Some(open) = open {
                    open.meters.succeeded(
                        self.plan.op(),
                        self.plan.size(),
                        post_time,
                        transfer_time,
                    );
                }
                tracing::trace!("succeeded");
            }
            Err(error) => {
                telemetry::failed(&error);
                tracing::debug!(%error, "failed");
            }
        }
    }

    fn report(&self, state: &TransferState) -> Report {
        let Size { bytes, blocks, segments, .. } = self.plan.size();
        let transfer_time = self.posted.elapsed();
        Report {
            bytes,
            blocks: blocks + u64::from(injected("report")),
            segments: segments + u64::from(injected("report")),
            // A transfer that ends within its post has blocked the caller for all of its time.
            post_time: if state.post_time.is_zero() { transfer_time } else { state.post_time },
            transfer_time,
            backend: state.on.as_ref().map_or("none", |(_, backend)| *backend),
        }
    }

    pub(crate) fn cancel(self: &Arc<Self>, error: Error) {
        if injected("free-early") {
            return Arc::clone(self).settled(Err(error));
        }
        self.cancelled.store(true, Ordering::SeqCst);
        let link = {
            let state = self.state.lock();
            match state.stage {
                TicketStage::InFlight => state.on.as_ref().map(|(link, _)| Arc::clone(link)),
                // Only the notification is under way, and it cannot be recalled.
                TicketStage::Settled => {
                    drop(state);
                    return self.resolve(Err(error));
                }
                TicketStage::Parked | TicketStage::Forgotten => None,
            }
        };
        match link {
            Some(link) => link.cancel(self.id),
            None => self.end(Err(error)),
        }
    }

    /// Looks for another link after one answered `Unsupported`, which means that it moved nothing.
    /// Returns false if the transfer has ended.
    fn try_another(self: &Arc<Self>, error: &Error) -> bool {
        {
            let mut state = self.state.lock();
            let open = matches!(state.outcome, Resolution::Pending)
                && state.stage == TicketStage::InFlight
                && !self.cancelled.load(Ordering::SeqCst);
            let Some((_, backend)) = state.on.take_if(|_| open) else {
                return false;
            };
            state.refused.push((backend, error.clone()));
            self.refused.store(true, Ordering::SeqCst);
            state.stage = TicketStage::Parked;
        }
        self.dispatch();
        true
    }

    /// Looks for a link.
    pub(crate) fn dispatch(self: &Arc<Self>) {
        self.peer.dispatch(LinkRequest::Transfer(Arc::clone(self) as Arc<dyn NeedsLink>));
    }

    fn let_go(&self) {
        for region in &self.plan.0.locals {
            region.core().unpin();
        }
        self.peer.agent.budget.give_back(self.plan.size().description);
    }

    pub(super) fn take(&self, state: &mut TransferState) -> Option<Result<Report>> {
        match std::mem::replace(&mut state.outcome, Resolution::Taken) {
            Resolution::Pending => {
                state.outcome = Resolution::Pending;
                None
            }
            Resolution::Done(result) => Some(result),
            Resolution::Taken => {
                Some(Err(ErrorKind::Invalid.because("an earlier await took the result: keep it")))
            }
        }
    }
}

impl NeedsLink for TransferInner {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn refusal(&self, backend: &'static str) -> Option<Error> {
        if !self.refused.load(Ordering::SeqCst) {
            return None;
        }
        let state = self.state.lock();
        state
            .refused
            .iter()
            .find(|(refused, _)| *refused == backend)
            .map(|(_, error)| error.clone())
    }

    fn has_ended(&self) -> bool {
        self.state.lock().stage != TicketStage::Parked
    }

    /// Does nothing if the transfer has ended while it was parked.
    fn start(self: Arc<Self>, link: &Arc<dyn Link>, backend: &'static str, bound: Arc<BoundPlan>) {
        let early = {
            let mut state = self.state.lock();
            if state.stage != TicketStage::Parked {
                return;
            }
            state.stage = TicketStage::InFlight;
            state.on = Some((Arc::clone(link), backend));
            state.notify.take_if(|_| injected("early-notify"))
        };
        if let Some(bytes) = early {
            link.notify(&bytes, Ticket::new(|_| ()));
        }
        if self.plan.size().bytes == 0 {
            if !injected("zero") {
                self.settled(Ok(()));
            }
            return;
        }
        link.post(bound, self.id, Ticket::of(Arc::clone(&self) as Arc<dyn Settle>));
        if self.cancelled.load(Ordering::SeqCst) {
            link.cancel(self.id); // the cancel came between the choice of the link and the post
        }
    }

    fn fail(self: Arc<Self>, error: Error) {
        self.end(Err(error));
    }
}

impl TransferInner {
    /// Ends the transfer, whose bytes the local side sees.
    fn arrived(self: Arc<Self>, result: Result<()>) {
        let result = result.map_err(|error| self.explained(error));
        // Before anyone can observe the end, because the next post may need this share of the
        // budget.
        self.let_go();
        let mut state = self.state.lock();
        state.stage = TicketStage::Settled;
        let waiting = std::mem::take(&mut state.settled);
        let open = matches!(state.outcome, Resolution::Pending);
        let notify =
            state.notify.take().filter(|_| open && result.is_ok() || injected("notify-anyway"));
        let result = result.map(|()| self.report(&state));
        let tell_waiting =
            move || waiting.into_iter().for_each(|promise| drop(promise.finish(Ok(()))));
        match (notify, &state.on) {
            (Some(bytes), Some((link, _))) => {
                let link = Arc::clone(link);
                state.arrived = result.as_ref().ok().cloned();
                // The watch stays: the deadline also covers the notification.
                drop(state);
                tell_waiting(); // before `notify`, which may take long in some libraries
                let this = Arc::clone(&self);
                // If the ticket is lost, the transfer resolves at its deadline.
                let sent = move |sent: Result<()>| this.resolve(sent.and(result));
                link.notify(&bytes, Ticket::new(sent));
            }
            _ => {
                self.decide(state, result);
                tell_waiting();
            }
        }
    }
}

/// A transfer whose bytes have arrived, and whose devices are flushed before it settles.
struct FlushedTransfer(Arc<TransferInner>);

impl Settle for FlushedTransfer {
    fn settled(self: Arc<Self>, flushed: Result<()>) {
        Arc::clone(&self.0).arrived(flushed);
    }

    fn forgotten(self: Arc<Self>) {
        Arc::clone(&self.0).forgotten();
    }
}

impl Settle for TransferInner {
    fn settled(self: Arc<Self>, result: Result<()>) {
        if let Err(error) = &result
            && error.kind() == ErrorKind::Unsupported
            && self.try_another(error)
        {
            return;
        }
        if injected("free-early")
            && std::mem::replace(&mut self.state.lock().stage, TicketStage::Settled)
                == TicketStage::Settled
        {
            return; // this fault settles a transfer twice
        }
        let mut devices = Vec::new();
        let flushes = !self.peer.agent.flushed.is_empty();
        if flushes && result.is_ok() && self.plan.0.op == Op::Read {
            for local in &self.plan.0.locals {
                flush::note(&mut devices, local.core().memory.device_access());
            }
        }
        if devices.is_empty() {
            return self.arrived(result);
        }
        flush::flush(devices, Ticket::of(Arc::new(FlushedTransfer(self))));
    }

    fn forgotten(self: Arc<Self>) {
        if injected("forget-is-fine") {
            return self.settled(Ok(()));
        }
        let error = || {
            ErrorKind::Forgotten.because(
                "the transport lost the transfer: its memory is quarantined; report this as a \
                 bug in the transport",
            )
        };
        let waiting = {
            let mut state = self.state.lock();
            state.stage = TicketStage::Forgotten;
            std::mem::take(&mut state.settled)
        };
        for region in &self.plan.0.locals {
            let core = region.core();
            quarantine::quarantine_for_ever(
                Arc::clone(&core.memory),
                &core.name,
                "a transport lost the ticket of a transfer",
            );
        }
        // The regions stay pinned, so that a later revoke fails with `StillShared`. The budget is
        // free for others.
        self.peer.agent.budget.give_back(self.plan.size().description);
        self.resolve(Err(error()));
        for promise in waiting {
            promise.finish(Err(error()));
        }
    }
}

impl Expire for TransferInner {
    fn expire(self: Arc<Self>) {
        if injected("deadline") {
            return;
        }
        // A transfer that was posted to a lost peer waits for the probe of the peer's address. The
        // loss says more than `TimedOut`.
        let late = self.peer.lost().unwrap_or_else(|| {
            ErrorKind::TimedOut
                .because("the transfer did not end by its deadline: raise it, or check the peer")
        });
        self.resolve(Err(late.clone()));
        self.cancel(late);
    }

    fn interrupt(self: Arc<Self>, reason: &Reason) {
        match reason {
            Reason::Region(id) => {
                if self.plan.0.locals.iter().any(|region| region.id() == *id) {
                    self.cancel(
                        ErrorKind::Revoked
                            .because("a region of the transfer was revoked meanwhile"),
                    );
                }
            }
            // Resolves at once. It settles when the link has proven that nothing touches the
            // memory.
            Reason::Lost(peer, error) if *peer == self.peer.id => self.resolve(Err(error.clone())),
            Reason::Lost(..) => {}
            Reason::Shutdown => {
                let closed = || ErrorKind::Closed.because("the agent was shut down meanwhile");
                self.resolve(Err(closed()));
                self.cancel(closed());
            }
        }
    }
}
