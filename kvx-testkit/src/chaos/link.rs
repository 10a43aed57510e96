//! Faults in posted transfers and sent notifications.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{
    BoundPlan, ForeignRange, Link, LocalRegion, PeerSection, RemoteRegion, RemoteSpec, Ticket, Turn,
};
use kvx_core::{Capabilities, ErrorKind, Result, TransferId};

use super::bytes::{Damage, Rewrite};
use super::fault::Fault;
use super::gate::{Gate, TicketKind};
use super::regions::{ChaosRemote, FAT, Unwrap};

/// The state that the links of a transport share.
#[derive(Default)]
pub(super) struct SharedState {
    posts: AtomicU64,
    settled: AtomicU64,
    sent: AtomicU64,
    seen: Mutex<HashSet<usize>>,
    /// Tickets that never settle.
    kept: Mutex<Vec<Ticket>>,
    queue: Mutex<Queue>,
}

/// For [`Fault::OneQueue`].
#[derive(Default)]
struct Queue {
    busy: bool,
    waiting: VecDeque<Box<dyn FnOnce() + Send>>,
}

pub(super) struct ChaosLink {
    inner: Arc<dyn Link>,
    fault: Option<Fault>,
    gate: Gate,
    state: Arc<SharedState>,
}

/// A bound plan with the regions of the inner transport.
struct InnerPlan(Arc<BoundPlan>);

impl ChaosLink {
    pub(super) fn new(
        inner: Arc<dyn Link>,
        fault: Option<Fault>,
        gate: Gate,
        state: Arc<SharedState>,
    ) -> Self {
        ChaosLink { inner, fault, gate, state }
    }

    fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// Returns the plan for the inner link. It is created once and kept, so that what the inner
    /// link prepares for it is kept as well.
    fn unwrapped(plan: &BoundPlan) -> Result<Arc<BoundPlan>> {
        let ours = plan.native(|| {
            let (local, remote) =
                (<dyn LocalRegion as Unwrap>::inner, <dyn RemoteRegion as Unwrap>::inner);
            Ok(InnerPlan(Arc::new(plan.with_regions(local, remote))))
        })?;
        Ok(Arc::clone(&ours.0))
    }

    /// Returns the result of a transfer that the fault selects to be lost.
    fn skips(&self, plan: &Arc<BoundPlan>) -> Option<Result<()>> {
        let turn = self.state.posts.fetch_add(1, Ordering::Relaxed) + 1;
        let failed =
            || Err(ErrorKind::Exhausted.because("chaos: this transfer was chosen to fail"));
        match self.fault? {
            Fault::Drop => Some(Ok(())),
            Fault::Mix if turn.is_multiple_of(50) => Some(Ok(())),
            Fault::FailNth if turn.is_multiple_of(5) => Some(failed()),
            Fault::FailLarge if plan.size().blocks > 65_536 => Some(failed()),
            Fault::PostOnce => {
                let mut seen = self.state.seen.lock();
                let new = seen.insert(Arc::as_ptr(plan).addr());
                if new { None } else { Some(Ok(())) }
            }
            _ => None,
        }
    }

    /// Handles the end of a transfer on the inner link.
    fn settle(
        fault: Option<Fault>,
        state: &SharedState,
        plan: &Arc<BoundPlan>,
        ticket: Ticket,
        result: Result<()>,
    ) {
        match fault {
            Some(Fault::Delay) => later(Duration::from_millis(20), move || ticket.settle(result)),
            Some(Fault::ForgetTicket) => drop(ticket),
            Some(Fault::HideFailure) => ticket.settle(Ok(())),
            Some(Fault::DropPeerLoss) => state.settle_unless_lost(ticket, result),
            Some(Fault::Reorder)
                if state.settled.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) =>
            {
                later(Duration::from_millis(5), move || ticket.settle(result));
            }
            Some(Fault::WriteLate) => {
                let rewrite = Rewrite::of(plan);
                ticket.settle(result);
                later(Duration::from_millis(300), move || {
                    rewrite.map(Rewrite::write);
                });
            }
            Some(Fault::OneQueue) => {
                ticket.settle(result);
                state.next();
            }
            _ => ticket.settle(result),
        }
    }
}

impl SharedState {
    /// Posts now, or when all earlier transfers have settled; for [`Fault::OneQueue`].
    fn queue(&self, post: impl FnOnce() + Send + 'static) {
        let mut queue = self.queue.lock();
        if std::mem::replace(&mut queue.busy, true) {
            queue.waiting.push_back(Box::new(post));
        } else {
            drop(queue);
            post();
        }
    }

    /// Posts the next transfer after one has settled; for [`Fault::OneQueue`].
    fn next(&self) {
        let mut queue = self.queue.lock();
        let next = queue.waiting.pop_front();
        queue.busy = next.is_some();
        drop(queue);
        if let Some(post) = next {
            post();
        }
    }

    /// Settles the ticket, unless the loss of the peer is the result; for [`Fault::DropPeerLoss`].
    fn settle_unless_lost(&self, ticket: Ticket, result: Result<()>) {
        match result {
            Err(error) if error.kind() == ErrorKind::PeerLost => {
                self.kept.lock().push(ticket);
            }
            other => ticket.settle(other),
        }
    }
}

/// Runs a closure after a delay. Only faults sleep like this.
pub(super) fn later(time: Duration, what: impl FnOnce() + Send + 'static) {
    // Has a name like the agents' threads, so that a fault breaks only its own promise.
    let thread = std::thread::Builder::new().name("kvx-chaos".into());
    let started = thread.spawn(move || {
        std::thread::sleep(time);
        what();
    });
    started.expect("a thread for a fault");
}

// SAFETY: the inner link upholds the contract; `ChaosLink` itself accesses memory only in faults,
// through `Memory` handles that it holds.
unsafe impl Link for ChaosLink {
    fn capabilities(&self) -> Arc<Capabilities> {
        self.inner.capabilities()
    }

    fn describe(&self) -> String {
        if self.is(Fault::Mute) { String::new() } else { self.inner.describe() }
    }

    fn update(&self, peer: PeerSection<'_>) -> Result<()> {
        self.inner.update(peer)
    }

    fn import(&self, region: RemoteSpec<'_>) -> Result<Arc<dyn RemoteRegion>> {
        let export =
            &region.export[..region.export.len() - if self.is(Fault::FatExport) { FAT } else { 0 }];
        Ok(Arc::new(ChaosRemote { inner: self.inner.import(RemoteSpec { export, ..region })? }))
    }

    fn import_foreign(&self, range: ForeignRange) -> Result<Arc<dyn RemoteRegion>> {
        Ok(Arc::new(ChaosRemote { inner: self.inner.import_foreign(range)? }))
    }

    fn post(&self, plan: Arc<BoundPlan>, id: TransferId, done: Ticket) {
        if let Some(result) = self.skips(&plan) {
            return done.settle(result);
        }
        let plan = match Self::unwrapped(&plan) {
            Ok(plan) => plan,
            Err(error) => return done.settle(Err(error)),
        };
        let inner = Arc::clone(&self.inner);
        match self.fault {
            Some(Fault::BlockInPost) => std::thread::sleep(Duration::from_millis(200)),
            Some(Fault::NotifyEarly) => {
                done.settle(Ok(()));
                return later(Duration::from_millis(100), move || {
                    inner.post(plan, id, Ticket::new(|_| ()))
                });
            }
            _ => {}
        }
        let (fault, gate, state, ours) =
            (self.fault, self.gate.clone(), Arc::clone(&self.state), Arc::clone(&plan));
        let damage = Damage::before(fault, &plan);
        let through = Ticket::new(move |result| gate.pass(TicketKind::Transfer, done, result));
        let ticket = Ticket::new(move |result: Result<()>| {
            let result = match damage {
                Some(damage) if result.is_ok() => damage.done(&ours),
                _ => result,
            };
            Self::settle(fault, &state, &ours, through, result);
        });
        match self.fault {
            Some(Fault::OneQueue) => self.state.queue(move || inner.post(plan, id, ticket)),
            _ => inner.post(plan, id, ticket),
        }
    }

    fn notify(&self, bytes: &[u8], done: Ticket) {
        let inner = Arc::clone(&self.inner);
        match self.fault {
            Some(Fault::DropNotification)
                if self.state.sent.fetch_add(1, Ordering::Relaxed) % 5 == 4 =>
            {
                done.settle(Ok(()));
            }
            Some(Fault::DuplicateNotification) => {
                inner.notify(bytes, Ticket::new(|_| ()));
                inner.notify(bytes, done);
            }
            Some(Fault::TruncateAtNul) => {
                let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
                inner.notify(&bytes[..end], done);
            }
            Some(Fault::DropPeerLoss) => {
                let state = Arc::clone(&self.state);
                inner.notify(
                    bytes,
                    Ticket::new(move |result| state.settle_unless_lost(done, result)),
                );
            }
            _ => inner.notify(bytes, done),
        }
    }

    fn cancel(&self, id: TransferId) {
        if !self.is(Fault::IgnoreCancel) {
            self.inner.cancel(id);
        }
    }

    fn drive(&self) -> Turn {
        self.inner.drive()
    }

    fn stop_driving(&self) {
        self.inner.stop_driving();
    }

    fn close(&self) {
        self.inner.close();
    }
}
