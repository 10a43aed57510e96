//! Transfers in progress: which pieces are still to be posted, and which are in flight.

use std::any::Any;
use std::sync::Arc;

use kvx_core::backend::{BoundPlan, Segment, Segments, Ticket};
use kvx_core::{Error, ErrorKind, Op, Result, TransferId};

use super::lanes::Stripe;
use super::library::{EndpointId, Fabric, JobId};
use super::regions::{RegionHandle, RegionRecord};

/// A transfer, as [`Fabric::advance`] sees it.
pub struct Job<'a, F: Fabric> {
    pub(super) id: JobId,
    pub(super) running: &'a mut JobState<F>,
}

impl<F: Fabric> Job<'_, F> {
    /// Returns the id that reports of the job's pieces carry.
    pub fn id(&self) -> JobId {
        self.id
    }

    /// Returns the endpoint to which the job is posted.
    pub fn endpoint(&self) -> EndpointId {
        EndpointId(self.running.session)
    }

    /// Returns the operation, read or write.
    pub fn op(&self) -> Op {
        self.running.plan().op()
    }

    /// Returns the whole plan; [`BoundPlan::native`] holds the state that a library prepares for
    /// it.
    pub fn plan(&self) -> &Arc<BoundPlan> {
        self.running.plan()
    }

    /// Takes the next piece to post; `None` when none is left.
    #[inline]
    pub fn next_piece(&mut self) -> Option<Segment> {
        let running = &mut *self.running;
        let next = running.put_back.pop().or_else(|| {
            // The pieces between those of this stripe belong to other lanes.
            let skipped = std::mem::replace(&mut running.skip, running.stripe.of - 1);
            running.segments.nth(skipped)
        });
        running.all_posted = next.is_none();
        next
    }

    /// Returns a piece, or the rest of one, for which the library has no capacity.
    /// [`next_piece`](Self::next_piece) returns it first, even before pieces that were put back
    /// earlier.
    pub fn put_back(&mut self, piece: Segment) {
        self.running.put_back.push(piece);
        self.running.all_posted = false;
    }

    /// Records that the last piece is posted, for a library that posts the plan with lists it has
    /// prepared. Such a library may post some lists and then continue with pieces; it skips the
    /// pieces that the lists cover.
    pub fn finish_posting(&mut self) {
        self.running.all_posted = true;
    }

    /// Records that pieces were posted, each of which [`Event::Completed`](super::Event::Completed)
    /// will report. Pieces that completed within the call are neither counted nor reported.
    #[inline]
    pub fn add_in_flight(&mut self, pieces: u32) {
        self.running.in_flight += u64::from(pieces);
        self.running.posted |= pieces > 0;
    }

    /// Records that pieces completed within the call and reached the peer's memory, so that the
    /// peer does not count as silent.
    #[inline]
    pub fn note_contact(&mut self) {
        self.running.reached = true;
    }

    /// Returns the number of pieces whose completion has not been reported.
    pub fn in_flight(&self) -> u64 {
        self.running.in_flight
    }

    /// Returns the registration of a local region, by its index in the plan.
    #[inline]
    pub fn local(&self, region: u32) -> &F::Local {
        &self.running.locals[region as usize].0.local
    }

    /// Returns the address of a piece in this process, or in the device's memory.
    #[inline]
    pub fn local_address(&self, piece: &Segment) -> u64 {
        self.running.locals[piece.local_region as usize].1 + piece.local_offset
    }

    /// Returns the access to a remote region, by its index in the plan.
    #[inline]
    pub fn remote(&self, region: u32) -> &F::Remote {
        &self.running.remotes[region as usize]
    }

    /// Returns the state that the library keeps for this job.
    pub fn state(&mut self) -> &mut F::State {
        &mut self.running.state
    }
}

/// A transfer that waits until all its regions are granted.
pub(super) struct PendingTransfer {
    pub(super) plan: Arc<BoundPlan>,
    pub(super) stripe: Stripe,
    pub(super) id: TransferId,
    pub(super) done: Ticket,
}

/// The state of a write's flush.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flush {
    NotYet,
    Later,
    Done,
}

/// A transfer with pieces that are not posted, or are in flight.
pub(super) struct JobState<F: Fabric> {
    pub(super) session: u64,
    pub(super) transfer: TransferId,
    /// The remaining segments of the plan. They own the plan.
    pub(super) segments: Segments,
    pub(super) stripe: Stripe,
    /// The number of segments to skip before the next one.
    pub(super) skip: usize,
    pub(super) put_back: Vec<Segment>,
    /// The local regions, with their addresses.
    pub(super) locals: Vec<(Arc<RegionRecord<F::Local>>, u64)>,
    pub(super) remotes: Vec<Arc<F::Remote>>,
    pub(super) state: F::State,
    pub(super) left: u64,
    pub(super) in_flight: u64,
    pub(super) all_posted: bool,
    pub(super) begun: bool,
    /// True if a piece has reached the peer in this turn.
    pub(super) reached: bool,
    /// True if any piece has been posted.
    pub(super) posted: bool,
    pub(super) flush: Flush,
    pub(super) failed: Option<Error>,
    pub(super) done: Ticket,
}

impl<F: Fabric> JobState<F> {
    pub(super) fn new(
        session: u64,
        PendingTransfer { plan, stripe, id, done }: PendingTransfer,
        remotes: Vec<Arc<F::Remote>>,
        max_piece: u64,
    ) -> Result<Box<Self>, (Ticket, Error)> {
        let mut locals = Vec::with_capacity(plan.locals().len());
        for local in plan.locals() {
            let any: &dyn Any = &*local.region;
            match any.downcast_ref::<RegionHandle<F::Local>>() {
                Some(region) => locals.push((Arc::clone(&region.record), local.memory.address())),
                None => {
                    let why = "a plan contains a region of another transport: report this as a bug";
                    return Err((done, ErrorKind::Invalid.because(why)));
                }
            }
        }
        Ok(Box::new(JobState {
            session,
            transfer: id,
            left: plan.size().bytes / stripe.of as u64,
            segments: Segments::new(plan, max_piece),
            stripe,
            skip: stripe.lane,
            put_back: Vec::new(),
            locals,
            remotes,
            state: F::State::default(),
            in_flight: 0,
            all_posted: false,
            begun: false,
            reached: false,
            posted: false,
            flush: Flush::NotYet,
            failed: None,
            done,
        }))
    }

    fn plan(&self) -> &Arc<BoundPlan> {
        self.segments.bound()
    }

    /// Returns true if the job uses the peer's region with this id.
    pub(super) fn uses(&self, id: kvx_core::RegionId) -> bool {
        self.plan().remotes().iter().any(|remote| remote.id == id)
    }

    pub(super) fn is_done(&self) -> bool {
        self.in_flight == 0
            && self.flush != Flush::Later
            && (self.failed.is_some()
                || self.all_posted && (self.op_is_read() || self.flush == Flush::Done))
    }

    /// Returns true if the job is a failed write whose pieces may not have arrived at the target
    /// yet.
    pub(super) fn is_failed_on_its_way(&self) -> bool {
        let failed = self.failed.is_some() && self.posted && self.in_flight == 0;
        failed && !self.op_is_read() && self.flush == Flush::NotYet
    }

    pub(super) fn op_is_read(&self) -> bool {
        self.plan().op() == Op::Read
    }

    pub(super) fn fail(&mut self, why: Error) {
        self.failed.get_or_insert(why);
    }
}
