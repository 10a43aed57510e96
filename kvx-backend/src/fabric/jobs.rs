//! Transfers under way: which pieces are still to be posted, and which have not ended.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use crate::reactor::Outbox;
use kvx_core::{Bound, Error, ErrorKind, Op, Result, Segment, Segments, Ticket, TransferId};

use super::handle::FabricRegion;
use super::lanes::Stripe;
use super::machine::Machine;
use super::regions::Registered;
use super::{EndpointId, Fabric, FlushCompletion, JobId};
use crate::process::ProcessWatch;

/// A transfer, as [`Fabric::advance`] sees it.
pub struct Job<'a, F: Fabric> {
    id: JobId,
    running: &'a mut Running<F>,
}

impl<F: Fabric> Job<'_, F> {
    /// Its number, to be reported with what has ended.
    pub fn id(&self) -> JobId {
        self.id
    }

    /// Where it goes.
    pub fn endpoint(&self) -> EndpointId {
        EndpointId(self.running.session)
    }

    /// Read or write.
    pub fn op(&self) -> Op {
        self.running.plan().op()
    }

    /// The whole plan; [`Bound::native`] keeps what a library prepares for it.
    pub fn plan(&self) -> &Arc<Bound> {
        self.running.plan()
    }

    /// The next piece to be posted; `None`: all of them have been given out.
    #[inline]
    pub fn next_piece(&mut self) -> Option<Segment> {
        let running = &mut *self.running;
        let next = running.put_back.pop().or_else(|| {
            // Of a stripe, those between are other lanes'.
            let skipped = std::mem::replace(&mut running.skip, running.stripe.of - 1);
            running.segments.nth(skipped)
        });
        running.all_posted = next.is_none();
        next
    }

    /// No room for this one, or for the rest of it: it comes next, before others that were put back.
    pub fn put_back(&mut self, piece: Segment) {
        self.running.put_back.push(piece);
        self.running.all_posted = false;
    }

    /// A library that posts the plan by its own prepared lists has posted the last piece. Where it goes on with
    /// pieces after some lists, it passes over those that the lists have posted.
    pub fn finish_posting(&mut self) {
        self.running.all_posted = true;
    }

    /// So many pieces were posted, and each is to be reported by [`Event::Completed`](super::Event::Completed). Those
    /// that have ended within the call are neither counted nor reported.
    #[inline]
    pub fn add_in_flight(&mut self, pieces: u32) {
        self.running.in_flight += u64::from(pieces);
        self.running.posted |= pieces > 0;
    }

    /// Pieces ended within the call, and the peer's memory was reached by them: it is not silent.
    #[inline]
    pub fn note_contact(&mut self) {
        self.running.reached = true;
    }

    /// Pieces whose end has not been reported.
    pub fn in_flight(&self) -> u64 {
        self.running.in_flight
    }

    /// What the library made of a local region, by its position in the plan.
    #[inline]
    pub fn local(&self, region: u32) -> &F::Local {
        &self.running.locals[region as usize].0.local
    }

    /// The address of a piece in this process, or in the device's memory.
    #[inline]
    pub fn local_address(&self, piece: &Segment) -> u64 {
        self.running.locals[piece.local_region as usize].1 + piece.local_offset
    }

    /// What the endpoint made of a remote region, by its position in the plan.
    #[inline]
    pub fn remote(&self, region: u32) -> &F::Remote {
        &self.running.remotes[region as usize]
    }

    /// What the library keeps for this job.
    pub fn state(&mut self) -> &mut F::State {
        &mut self.running.state
    }
}

/// A transfer whose regions are not all granted yet.
pub(super) struct Waiting {
    pub(super) plan: Arc<Bound>,
    pub(super) stripe: Stripe,
    pub(super) id: TransferId,
    pub(super) done: Ticket,
}

/// How far the flush of a write is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flush {
    NotYet,
    Later,
    Done,
}

/// A transfer whose pieces are being posted, or have not all ended.
pub(super) struct Running<F: Fabric> {
    pub(super) session: u64,
    pub(super) transfer: TransferId,
    /// What is left of the plan, which they own.
    segments: Segments,
    stripe: Stripe,
    /// Segments to be passed over before the next one.
    skip: usize,
    put_back: Vec<Segment>,
    /// With their addresses.
    locals: Vec<(Arc<Registered<F::Local>>, u64)>,
    remotes: Vec<Arc<F::Remote>>,
    state: F::State,
    left: u64,
    in_flight: u64,
    all_posted: bool,
    begun: bool,
    /// In this turn.
    reached: bool,
    /// A piece has been posted, at some time.
    posted: bool,
    flush: Flush,
    failed: Option<Error>,
    done: Ticket,
}

impl<F: Fabric> Running<F> {
    pub(super) fn new(
        session: u64,
        Waiting { plan, stripe, id, done }: Waiting,
        remotes: Vec<Arc<F::Remote>>,
        max_piece: u64,
    ) -> Result<Box<Self>, (Ticket, Error)> {
        let mut locals = Vec::with_capacity(plan.locals().len());
        for local in plan.locals() {
            let any: &dyn Any = &*local.region;
            match any.downcast_ref::<FabricRegion<F>>() {
                Some(region) => {
                    locals.push((Arc::clone(&region.registered), local.memory.address()))
                }
                None => {
                    let why = "a region of another transport was bound to this link: report it";
                    return Err((done, Error::new(ErrorKind::Invalid, why)));
                }
            }
        }
        Ok(Box::new(Running {
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

    fn plan(&self) -> &Arc<Bound> {
        self.segments.bound()
    }

    /// Whether it uses the peer's region of this number.
    pub(super) fn uses(&self, id: kvx_core::RegionId) -> bool {
        self.plan().remotes().iter().any(|remote| remote.id == id)
    }

    fn is_done(&self) -> bool {
        self.in_flight == 0
            && self.flush != Flush::Later
            && (self.failed.is_some()
                || self.all_posted && (self.op_is_read() || self.flush == Flush::Done))
    }

    /// Whether pieces of a write that has failed may still be on their way to the target.
    fn is_failed_on_its_way(&self) -> bool {
        let failed = self.failed.is_some() && self.posted && self.in_flight == 0;
        failed && !self.op_is_read() && self.flush == Flush::NotYet
    }

    fn op_is_read(&self) -> bool {
        self.plan().op() == Op::Read
    }

    fn fail(&mut self, why: Error) {
        self.failed.get_or_insert(why);
    }
}

impl<F: Fabric> Machine<F> {
    /// Queues a transfer; `inline`: does its first turn now, on the poster's own thread, and nothing else.
    #[inline(always)]
    pub(super) fn start(&mut self, running: Box<Running<F>>, inline: bool, out: &mut Outbox) {
        let (number, left) = (running.session, running.left);
        if let Some(session) = self.sessions.get_mut(&number) {
            session.jobs += 1;
        }
        let key = self.jobs.insert(running);
        if inline {
            self.lent_turn = true;
            self.advance(key, out);
            if !self.jobs.contains(key) {
                return; // ended already, and nothing else was done
            }
        } else {
            self.turns.push(key, left);
        }
        self.left_something = true;
        self.after_work(number, out);
    }

    /// One turn of a transfer. Says how many bytes were posted.
    #[inline(always)]
    pub(super) fn advance(&mut self, key: usize, out: &mut Outbox) -> u64 {
        let Some(running) = self.jobs.get_mut(key) else { return 0 };
        let mut moved = 0;
        if running.failed.is_none() {
            match self.fabric.advance(&mut Job { id: JobId(key), running }) {
                Ok(bytes) => {
                    moved = bytes;
                    running.begun |= bytes > 0;
                    running.left = running.left.saturating_sub(bytes);
                    if std::mem::take(&mut running.reached)
                        && let Some(session) = self.sessions.get_mut(&running.session)
                    {
                        session.silence.heard(Instant::now());
                    }
                    if running.all_posted {
                        self.flush(key);
                    } else if bytes == 0 {
                        self.stalled.push(key);
                    } else {
                        let left = running.left;
                        self.turns.push(key, left);
                    }
                }
                // "Unsupported" would say that nothing has moved.
                Err(why) if running.begun || running.in_flight > 0 => {
                    let why = if why.kind() == ErrorKind::Unsupported {
                        why.with_kind(ErrorKind::Native)
                    } else {
                        why
                    };
                    running.fail(why);
                }
                Err(why) => running.fail(why),
            }
        }
        self.finish_job(key, out);
        moved
    }

    fn flush(&mut self, key: usize) {
        let running = &mut self.jobs[key];
        if running.op_is_read() || running.flush != Flush::NotYet {
            return;
        }
        match self.fabric.flush(EndpointId(running.session), JobId(key)) {
            Ok(FlushCompletion::WithPieces) => running.flush = Flush::Done,
            Ok(FlushCompletion::Later) => running.flush = Flush::Later,
            Err(why) => running.fail(why),
        }
    }

    /// Some pieces have ended.
    pub(super) fn moved(&mut self, job: JobId, pieces: u32, result: Result<()>, out: &mut Outbox) {
        let Some(running) = self.jobs.get_mut(job.0) else {
            return tracing::error!(
                backend = self.name,
                "a piece of no transfer has ended: report it"
            );
        };
        running.in_flight = running.in_flight.saturating_sub(u64::from(pieces));
        self.account(job, result, out);
    }

    /// The flush of a write has ended.
    pub(super) fn flushed(&mut self, job: JobId, result: Result<()>, out: &mut Outbox) {
        let Some(running) = self.jobs.get_mut(job.0) else { return };
        running.flush = Flush::Done;
        self.account(job, result, out);
    }

    fn account(&mut self, job: JobId, result: Result<()>, out: &mut Outbox) {
        let running = &mut self.jobs[job.0];
        match result {
            Ok(()) => {
                let session = running.session;
                if let Some(session) = self.sessions.get_mut(&session) {
                    session.silence.heard(Instant::now());
                }
            }
            Err(why) => running.fail(why),
        }
        self.finish_job(job.0, out);
    }

    /// What had no room tries again.
    pub(super) fn unstall(&mut self) {
        for key in self.stalled.drain(..) {
            if let Some(running) = self.jobs.get(key) {
                self.turns.push(key, running.left);
            }
        }
    }

    /// Settles a transfer when nothing of it is in flight any more.
    fn finish_job(&mut self, key: usize, out: &mut Outbox) {
        if self.jobs.get(key).is_some_and(|running| running.is_failed_on_its_way()) {
            self.flush(key); // the target may be told next that nobody writes to its region any more
        }
        if !self.jobs.get(key).is_some_and(|running| running.is_done()) {
            return;
        }
        // The rest, its plan and regions, is dropped here, before the ticket settles.
        let Running { session: number, failed, done, .. } = *self.jobs.remove(key);
        if failed.is_some() {
            self.turns.extract(|queued| *queued == key);
            self.stalled.retain(|queued| *queued != key);
        }
        out.settle(done, failed.map_or(Ok(()), |why| Err(self.judged(number, why))));
        if let Some(session) = self.sessions.get_mut(&number) {
            session.jobs -= 1;
            self.let_go_of_recalled(number, out);
            self.after_work(number, out);
        }
    }

    /// What failed, when the peer's process is ending: some libraries only say that something did, and before the end
    /// of the process can be seen.
    fn judged(&self, number: u64, why: Error) -> Error {
        let process = self.sessions.get(&number).and_then(|session| session.process.as_ref());
        if why.kind() == ErrorKind::Native && process.is_some_and(ProcessWatch::is_exiting) {
            return why.with_kind(ErrorKind::PeerLost);
        }
        why
    }

    /// Ends transfers early: nothing more of them is posted.
    pub(super) fn fail_jobs(
        &mut self,
        which: impl Fn(&Running<F>) -> bool,
        why: &Error,
        out: &mut Outbox,
    ) {
        let keys: Vec<usize> =
            self.jobs.iter().filter(|(_, running)| which(running)).map(|(key, _)| key).collect();
        for key in keys {
            if let Some(running) = self.jobs.get_mut(key) {
                running.fail(why.clone());
                self.finish_job(key, out);
            }
        }
    }

    /// The library touches no memory any more: what it has not reported has ended as well.
    pub(super) fn settle_all(&mut self, why: &Error, out: &mut Outbox) {
        for (_, running) in std::mem::take(&mut self.jobs) {
            let Running { done, failed, .. } = *running;
            out.settle(done, Err(failed.unwrap_or_else(|| why.clone())));
        }
    }

    /// Nobody knows whether the library touches their memory: it is quarantined.
    pub(super) fn forget_all(&mut self) {
        for (_, running) in std::mem::take(&mut self.jobs) {
            let Running { remotes, locals, state, done, .. } = *running;
            std::mem::forget((remotes, locals, state));
            drop(done);
        }
    }
}
