//! Transfers: one posted plan in flight. A future that resolves once, at its settling or its deadline.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::breaks::broken;
use crate::completion::{Completion, Shot};
use crate::deadline::{Expire, Reason, Watch};
use crate::peer::{Job, PeerInner};
use crate::plan::{Bound, Plan, Size};
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::ticket::Settle;
use crate::transport::Link;
use crate::{Deadline, Error, Kind, Result, Ticket, TransferId, quarantine, telemetry};

use looks::Looks;

mod looks;

/// What a transfer did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Bytes moved.
    pub bytes: u64,
    /// Blocks moved.
    pub blocks: u64,
    /// Contiguous pieces that were left after merging neighbours.
    pub segments: u64,
    /// How long the post kept its caller.
    pub post_time: Duration,
    /// From the post until the data had arrived.
    pub transfer_time: Duration,
    /// The backend that carried it.
    pub backend: &'static str,
}

/// A posted plan. A future under any runtime; [`wait`](Transfer::wait) without one.
///
/// Resolves once: when it settles, or at its deadline with `TimedOut`. The plan's memory stays pinned until it has
/// [settled](Transfer::settled), which may be later. Dropping it cancels what can be cancelled and frees nothing early.
#[must_use = "dropping a transfer cancels it"]
pub struct Transfer(pub(crate) Arc<TransferState>);

pub(crate) struct TransferState {
    pub(crate) id: TransferId,
    pub(crate) plan: Plan,
    peer: Arc<PeerInner>,
    posted: Instant,
    deadline: Deadline,
    /// Set before a cancel looks for the link, and read after a start has chosen one: one of them tells it.
    cancelled: AtomicBool,
    /// Whether some backend has refused it.
    refused: AtomicBool,
    /// Resolved and settled: nothing more happens to it. What ends otherwise does not say so here.
    over: AtomicBool,
    state: Mutex<State>,
    finished: Condvar,
    span: tracing::Span,
}

struct State {
    outcome: Outcome,
    stage: Stage,
    /// What carries it, once a route is chosen.
    on: Option<(Arc<dyn Link>, &'static str)>,
    notify: Option<Box<[u8]>>,
    waker: Option<Waker>,
    watch: Option<Watch>,
    settled: Vec<Arc<Shot<()>>>,
    post_time: Duration,
    /// Backends that had a link to the peer but could not carry this transfer, and why.
    refused: Vec<(&'static str, Error)>,
}

enum Outcome {
    Pending,
    Done(Result<Report>),
    Taken,
}

/// Where the transfer's memory stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not handed to a transport yet.
    Parked,
    /// A transport holds the ticket.
    InFlight,
    /// Nobody will touch the memory again.
    Settled,
    /// The ticket is lost: nobody knows.
    Forgotten,
}

impl TransferState {
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
        Arc::new(TransferState {
            id,
            plan,
            peer,
            posted,
            deadline: deadline.unwrap_or_else(|| Deadline::default_from(posted)),
            cancelled: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            over: AtomicBool::new(false),
            state: Mutex::new(State {
                outcome: Outcome::Pending,
                stage: Stage::Parked,
                on: None,
                notify,
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

    /// Hands it to a link; unless it has ended while it was parked.
    pub(crate) fn start(self: &Arc<Self>, link: &Arc<dyn Link>, backend: &'static str, bound: Arc<Bound>) {
        let early = {
            let mut state = self.state.lock();
            if state.stage != Stage::Parked {
                return;
            }
            state.stage = Stage::InFlight;
            state.on = Some((Arc::clone(link), backend));
            state.notify.take_if(|_| broken("early-notify"))
        };
        if let Some(bytes) = early {
            link.notify(&bytes, Ticket::new(|_| ()));
        }
        if self.plan.size().bytes == 0 {
            if !broken("zero") {
                Arc::clone(self).settled(Ok(()));
            }
            return;
        }
        link.post(bound, self.id, Ticket::of(Arc::clone(self) as Arc<dyn Settle>));
        if self.cancelled.load(Ordering::SeqCst) {
            link.cancel(self.id); // the cancel came between the choice of the link and the post
        }
    }

    /// After the post: notes what it cost, and has the clock watch what has not resolved.
    pub(crate) fn posted(self: &Arc<Self>) {
        if self.over.load(Ordering::Acquire) {
            return;
        }
        let open = {
            let mut state = self.state.lock();
            // Settled but not resolved: its notification is under way, and the deadline holds for that too.
            let open = matches!(state.outcome, Outcome::Pending);
            if open {
                state.post_time = self.posted.elapsed();
            }
            open
        };
        let Some(at) = self.deadline.instant().filter(|_| open) else { return };
        let watch = self.peer.agent.clock.watch(at, Arc::clone(self) as Arc<dyn Expire>);
        let mut state = self.state.lock();
        if matches!(state.outcome, Outcome::Pending) {
            state.watch = Some(watch);
            drop(state);
        } else {
            drop(state);
            drop(watch);
        }
        // What happened between the post and the watch found nobody to interrupt.
        if self.peer.agent.is_closed() {
            Arc::clone(self).interrupt(&Reason::Shutdown);
        }
        for region in self.plan.0.locals.iter().filter(|region| region.core().is_revoking()) {
            Arc::clone(self).interrupt(&Reason::Region(region.id()));
        }
    }

    pub(crate) fn fail(self: &Arc<Self>, error: Error) {
        self.end(Err(error));
    }

    /// Ends it before a transport had it.
    pub(crate) fn end(self: &Arc<Self>, result: Result<()>) {
        let parked = {
            let mut state = self.state.lock();
            let parked = state.stage == Stage::Parked;
            if parked {
                state.stage = Stage::InFlight;
            }
            parked
        };
        if parked {
            Arc::clone(self).settled(result);
        }
    }

    /// Decides the outcome, unless it is decided.
    fn resolve(&self, result: Result<Report>) {
        let result = result.map_err(|error| self.explained(error));
        self.decide(self.state.lock(), result);
    }

    /// What a user is told of an error. Takes the lock of the peer.
    fn explained(&self, error: Error) -> Error {
        // A link that was closed because the peer is lost says less than the loss.
        let lost = if error.kind() == Kind::Closed { self.peer.lost() } else { None };
        let error = lost.unwrap_or(error).operation(match self.plan.op() {
            crate::Op::Read => "read",
            crate::Op::Write => "write",
        });
        error.peer(Arc::clone(&self.peer.identity.name))
    }

    /// As [`resolve`](Self::resolve), in a state that is locked, with an error that is explained.
    fn decide(&self, mut state: MutexGuard<'_, State>, result: Result<Report>) {
        let settled = matches!(state.stage, Stage::Settled | Stage::Forgotten);
        let watch = state.watch.take_if(|_| settled);
        if !matches!(state.outcome, Outcome::Pending) {
            drop(state);
            return drop(watch);
        }
        let result = result.map_err(|error| match state.on {
            Some((_, backend)) => error.backend(backend),
            None => error,
        });
        let told = result.clone();
        state.outcome = Outcome::Done(result);
        self.over.store(settled, Ordering::Release);
        let waker = state.waker.take();
        drop(state);
        drop(watch);
        self.finished.notify_all();
        if let Some(waker) = waker.filter(|_| !broken("wake")) {
            waker.wake();
        }
        let _entered = self.span.enter();
        match told {
            Ok(report) => {
                let Report { backend, post_time, transfer_time, .. } = report;
                let open = self.peer.agent.transports.iter().find(|open| open.name == backend);
                if let Some(open) = open {
                    open.meters.succeeded(self.plan.op(), self.plan.size(), post_time, transfer_time);
                }
                tracing::trace!("succeeded");
            }
            Err(error) => {
                telemetry::failed(&error);
                tracing::debug!(%error, "failed");
            }
        }
    }

    fn report(&self, state: &State) -> Report {
        let Size { bytes, blocks, segments, .. } = self.plan.size();
        let transfer_time = self.posted.elapsed();
        Report {
            bytes,
            blocks: blocks + u64::from(broken("report")),
            segments: segments + u64::from(broken("report")),
            // A transfer that ends within its post has cost its caller all of its time.
            post_time: if state.post_time.is_zero() { transfer_time } else { state.post_time },
            transfer_time,
            backend: state.on.as_ref().map_or("none", |(_, backend)| *backend),
        }
    }

    pub(crate) fn cancel(self: &Arc<Self>, error: Error) {
        if broken("free-early") {
            return Arc::clone(self).settled(Err(error));
        }
        self.cancelled.store(true, Ordering::SeqCst);
        let link = {
            let state = self.state.lock();
            match state.stage {
                Stage::InFlight => state.on.as_ref().map(|(link, _)| Arc::clone(link)),
                _ => None,
            }
        };
        match link {
            Some(link) => link.cancel(self.id),
            None => self.fail(error),
        }
    }

    /// Why a backend could not carry it, if it was tried.
    pub(crate) fn refusal(&self, backend: &'static str) -> Option<Error> {
        if !self.refused.load(Ordering::SeqCst) {
            return None;
        }
        let state = self.state.lock();
        state.refused.iter().find(|(refused, _)| *refused == backend).map(|(_, error)| error.clone())
    }

    /// After a link answered `Unsupported`, which says that it has moved nothing: goes back to the choice of a link.
    /// Says whether it did.
    fn try_another(self: &Arc<Self>, error: &Error) -> bool {
        {
            let mut state = self.state.lock();
            let open = matches!(state.outcome, Outcome::Pending)
                && state.stage == Stage::InFlight
                && !self.cancelled.load(Ordering::SeqCst);
            let Some((_, backend)) = state.on.take_if(|_| open) else {
                return false;
            };
            state.refused.push((backend, error.clone()));
            self.refused.store(true, Ordering::SeqCst);
            state.stage = Stage::Parked;
        }
        self.dispatch();
        true
    }

    /// Goes to the choice of a link.
    pub(crate) fn dispatch(self: &Arc<Self>) {
        self.peer.dispatch(Job::Transfer(Arc::clone(self)));
    }

    /// Whether it has ended, so that nobody need start it.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.lock().stage != Stage::Parked
    }

    fn let_go(&self) {
        for region in &self.plan.0.locals {
            region.core().unpin();
        }
        self.peer.agent.budget.give_back(self.plan.size().description);
    }

    fn take(&self, state: &mut State) -> Option<Result<Report>> {
        match std::mem::replace(&mut state.outcome, Outcome::Taken) {
            Outcome::Pending => {
                state.outcome = Outcome::Pending;
                None
            }
            Outcome::Done(result) => Some(result),
            Outcome::Taken => {
                Some(Err(Error::new(Kind::Invalid, "the result was taken by an earlier await: keep it")))
            }
        }
    }
}

impl Settle for TransferState {
    fn settled(self: Arc<Self>, result: Result<()>) {
        if let Err(error) = &result
            && error.kind() == Kind::Unsupported
            && self.try_another(error)
        {
            return;
        }
        if broken("free-early")
            && std::mem::replace(&mut self.state.lock().stage, Stage::Settled) == Stage::Settled
        {
            return; // a broken core settles twice
        }
        let result = result.map_err(|error| self.explained(error));
        // Before anybody can see that it has ended: the next post may need its share of the budget.
        self.let_go();
        let mut state = self.state.lock();
        state.stage = Stage::Settled;
        let waiting = std::mem::take(&mut state.settled);
        let open = matches!(state.outcome, Outcome::Pending);
        let notify = state.notify.take().filter(|_| open && result.is_ok() || broken("notify-anyway"));
        let result = result.map(|()| self.report(&state));
        match (notify, &state.on) {
            (Some(bytes), Some((link, _))) => {
                let link = Arc::clone(link);
                drop(state); // with its watch: the deadline still holds while the notification is under way
                let this = Arc::clone(&self);
                // A lost ticket leaves the transfer to its deadline.
                let sent = move |sent: Result<()>| this.resolve(sent.and(result));
                link.notify(&bytes, Ticket::new(sent));
            }
            _ => self.decide(state, result),
        }
        for shot in waiting {
            shot.finish(Ok(()));
        }
    }

    fn forgotten(self: Arc<Self>) {
        if broken("forget-is-fine") {
            return self.settled(Ok(()));
        }
        let error = || {
            Error::new(
                Kind::Forgotten,
                "the transport lost the transfer: its memory is quarantined; report this as a bug of the transport",
            )
        };
        let waiting = {
            let mut state = self.state.lock();
            state.stage = Stage::Forgotten;
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
        // Its regions stay pinned: a later revoke of one says `StillShared`. The budget is free for others.
        self.peer.agent.budget.give_back(self.plan.size().description);
        self.resolve(Err(error()));
        for shot in waiting {
            shot.finish(Err(error()));
        }
    }
}

impl Expire for TransferState {
    fn expire(self: Arc<Self>) {
        if broken("deadline") {
            return;
        }
        let late = || {
            Error::new(
                Kind::TimedOut,
                "the transfer did not end by its deadline: raise it, or see whether the peer still works",
            )
        };
        self.resolve(Err(late()));
        self.cancel(late());
    }

    fn interrupt(self: Arc<Self>, reason: &Reason) {
        match reason {
            Reason::Region(id) => {
                if self.plan.0.locals.iter().any(|region| region.id() == *id) {
                    self.cancel(Error::new(Kind::Revoked, "a region of the transfer was revoked meanwhile"));
                }
            }
            // Resolved at once; it settles when the link has its own proof that nobody touches the memory.
            Reason::Lost(peer, error) if Arc::ptr_eq(peer, &self.peer) => self.resolve(Err(error.clone())),
            Reason::Lost(..) => {}
            Reason::Shutdown => {
                let closed = || Error::new(Kind::Closed, "the agent was shut down meanwhile");
                self.resolve(Err(closed()));
                self.cancel(closed());
            }
        }
    }
}

impl Transfer {
    /// Its number.
    pub fn id(&self) -> TransferId {
        self.0.id
    }

    /// Blocks until it resolves, making progress on this thread where the link can. Past `deadline` it says
    /// `TimedOut` and is dropped, and so cancelled; its own deadline holds as well.
    pub fn wait(self, deadline: impl Into<Deadline>) -> Result<Report> {
        crate::fork::check()?;
        let link = {
            let mut state = self.0.state.lock();
            if let Some(result) = self.0.take(&mut state) {
                return result;
            }
            state.on.as_ref().map(|(link, _)| Arc::clone(link))
        };
        let until = deadline.into();
        // Lends a hand first.
        let unannounced = link.as_ref().is_some_and(|link| link.ends_unannounced());
        let Looks { patience, between } = Looks::after(&self.0.plan.size(), unannounced);
        let patience = Instant::now() + patience;
        let mut looks = 0;
        while let Some(link) = &link {
            let moved = link.drive();
            looks = if moved { 0 } else { looks + 1 };
            if let Some(result) = self.0.take(&mut self.0.state.lock()) {
                return result;
            }
            let now = Instant::now();
            if until.instant().is_some_and(|until| until <= now) || (!moved && now >= patience) {
                break;
            }
            if !moved {
                between(looks);
            }
        }
        if let Some(link) = &link {
            link.hand_over();
        }
        let mut state = self.0.state.lock();
        loop {
            if let Some(result) = self.0.take(&mut state) {
                return result;
            }
            if until.passed() {
                return Err(Error::new(
                    Kind::TimedOut,
                    "the wait for a transfer ended: wait longer, or await it",
                ));
            }
            state = self.0.finished.wait_until(state, until.instant());
        }
    }

    /// Makes progress on this thread where the link can, and says what came of the transfer; `None` while it is in flight.
    /// Waits for nothing. For callers with a loop of their own; one that stops calling it loses nothing but time.
    pub fn drive(&mut self) -> Option<Result<Report>> {
        if let Err(error) = crate::fork::check() {
            return Some(Err(error));
        }
        let link = {
            let mut state = self.0.state.lock();
            if let Some(result) = self.0.take(&mut state) {
                return Some(result);
            }
            state.on.as_ref().map(|(link, _)| Arc::clone(link))
        };
        link?.drive();
        self.0.take(&mut self.0.state.lock())
    }

    /// Whether it has settled; see [`settled`](Transfer::settled).
    pub fn is_settled(&self) -> bool {
        self.0.state.lock().stage == Stage::Settled
    }

    /// Ends when the transfer has settled: nobody will read or write its local memory for it again.
    pub fn settled(&self) -> Completion<()> {
        if let Err(error) = crate::fork::check() {
            return Completion::ready(Err(error));
        }
        let shot = Shot::new();
        let mut state = self.0.state.lock();
        match state.stage {
            Stage::Settled => {
                shot.finish(Ok(()));
            }
            Stage::Forgotten => {
                shot.finish(Err(Error::new(
                    Kind::Forgotten,
                    "the transport lost the transfer: it never settles",
                )));
            }
            _ => state.settled.push(Arc::clone(&shot)),
        }
        Completion::of(shot)
    }

    /// Stops it as soon as possible. Best effort: it may still succeed, and it resolves and settles all the same.
    pub fn cancel(&self) {
        if crate::fork::check().is_ok() {
            self.0.cancel(Error::new(Kind::Cancelled, "the transfer was cancelled"));
        }
    }
}

impl Future for Transfer {
    type Output = Result<Report>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        crate::fork::check()?;
        let mut state = self.0.state.lock();
        if let Some(result) = self.0.take(&mut state) {
            return Poll::Ready(result);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if crate::fork::check().is_err() || self.0.over.load(Ordering::Acquire) {
            return;
        }
        if !matches!(self.0.state.lock().stage, Stage::Settled | Stage::Forgotten) {
            self.0.cancel(Error::new(Kind::Cancelled, "the transfer was dropped"));
        }
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({}, {:?})", self.0.id.0, self.0.plan)
    }
}
