//! The machine's handling of transfers: it posts, schedules and settles them.

use std::sync::Arc;
use std::time::Instant;

use kvx_core::{Error, ErrorKind, Result, TransferId};

use super::job::{Flush, Job, JobState, PendingTransfer};
use super::lanes::Thread;
use super::library::{EndpointId, Fabric, FlushCompletion, JobId};
use super::machine::Machine;
use super::shared_link::import_of;
use crate::control::ImportState;
use crate::control::errors::{cancelled, closed};
use crate::process::ProcessWatch;
use crate::reactor::Outbox;

impl<F: Fabric> Machine<F> {
    /// Posts a transfer; gives it its first turn at once if this is the thread `inline_on`.
    #[inline(always)]
    pub(super) fn post(
        &mut self,
        number: u64,
        transfer: PendingTransfer,
        inline_on: Option<Thread>,
        out: &mut Outbox,
    ) {
        let Some(session) = self.sessions.get_mut(&number) else {
            debug_assert!(false, "a transfer is posted to session {number}, which has ended");
            let PendingTransfer { plan, done, .. } = transfer;
            drop(plan);
            return out.settle(done, Err(closed().with_backend(self.name)));
        };
        let mut remotes = Vec::with_capacity(transfer.plan.remotes().len());
        for remote in transfer.plan.remotes() {
            let import =
                import_of(&remote.region).and_then(|import| session.imports.get(import.number));
            match import {
                Some(ImportState::Granted((held, _))) => remotes.push(Arc::clone(held)),
                Some(ImportState::Refused(why)) => {
                    return out.settle(transfer.done, Err(why.clone()));
                }
                Some(ImportState::Pending(_)) => {
                    session.waiting.push(transfer);
                    return self.after_work(number, out);
                }
                None => {
                    let why =
                        ErrorKind::Closed.because("the region was imported before the link was up");
                    return out.settle(transfer.done, Err(why.with_backend(self.name)));
                }
            }
        }
        match JobState::new(number, transfer, remotes, self.fabric.max_piece()) {
            Ok(running) => self.start(running, inline_on == Some(Thread::this()), out),
            Err((done, why)) => out.settle(done, Err(why)),
        }
    }

    pub(super) fn cancel(&mut self, number: u64, id: TransferId, out: &mut Outbox) {
        let why = cancelled().with_backend(self.name);
        let Some(session) = self.sessions.get_mut(&number) else {
            debug_assert!(false, "a transfer is cancelled on session {number}, which has ended");
            return;
        };
        if let Some(position) = session.waiting.iter().position(|waiting| waiting.id == id) {
            out.settle(session.waiting.swap_remove(position).done, Err(why));
            return self.after_work(number, out);
        }
        self.fail_jobs(|running| running.session == number && running.transfer == id, &why, out);
    }

    /// Queues a transfer. If `inline`, gives it its first turn now, on the poster's thread, and
    /// does nothing else.
    #[inline(always)]
    pub(super) fn start(&mut self, running: Box<JobState<F>>, inline: bool, out: &mut Outbox) {
        let (number, left) = (running.session, running.left);
        if let Some(session) = self.sessions.get_mut(&number) {
            session.jobs += 1;
        }
        let key = self.jobs.insert(running);
        if inline {
            self.lent_turn = true;
            self.advance(key, out);
            if !self.jobs.contains(key) {
                return; // it has already ended, and nothing else was done
            }
        } else {
            self.turns.push(key, left);
        }
        self.left_something = true;
        self.after_work(number, out);
    }

    /// Gives a transfer one turn. Returns the number of bytes posted.
    #[inline(always)]
    pub(super) fn advance(&mut self, key: usize, out: &mut Outbox) -> u64 {
        let Some(running) = self.jobs.get_mut(key) else {
            debug_assert!(false, "job {key} got a turn after its end");
            return 0;
        };
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
                        session.silence.note_activity(Instant::now());
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
                // `Unsupported` would mean that nothing has moved.
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

    /// Takes the report that pieces have ended.
    pub(super) fn take_completion(
        &mut self,
        job: JobId,
        pieces: u32,
        result: Result<()>,
        out: &mut Outbox,
    ) {
        let Some(running) = self.jobs.get_mut(job.0) else {
            return tracing::error!(
                backend = self.name,
                "a piece of an unknown transfer has ended: report this as a bug"
            );
        };
        running.in_flight = running.in_flight.saturating_sub(u64::from(pieces));
        self.account(job, result, out);
    }

    /// Takes the report that the flush of a write has ended.
    pub(super) fn take_flush(&mut self, job: JobId, result: Result<()>, out: &mut Outbox) {
        let Some(running) = self.jobs.get_mut(job.0) else {
            return tracing::error!(
                backend = self.name,
                "the flush of an unknown transfer has ended: report this as a bug"
            );
        };
        running.flush = Flush::Done;
        self.account(job, result, out);
    }

    fn account(&mut self, job: JobId, result: Result<()>, out: &mut Outbox) {
        let running = &mut self.jobs[job.0];
        match result {
            Ok(()) => {
                let session = running.session;
                if let Some(session) = self.sessions.get_mut(&session) {
                    session.silence.note_activity(Instant::now());
                }
            }
            Err(why) => running.fail(why),
        }
        self.finish_job(job.0, out);
    }

    /// Queues again the jobs for which the library had no capacity.
    pub(super) fn retry_stalled(&mut self) {
        for key in self.stalled.drain(..) {
            if let Some(running) = self.jobs.get(key) {
                self.turns.push(key, running.left);
            }
        }
    }

    /// Settles a transfer once nothing of it is in flight.
    fn finish_job(&mut self, key: usize, out: &mut Outbox) {
        if self.jobs.get(key).is_some_and(|running| running.is_failed_on_its_way()) {
            // The next message may report to the target that its region is not written to any more.
            self.flush(key);
        }
        if !self.jobs.get(key).is_some_and(|running| running.is_done()) {
            return;
        }
        // The rest, with its plan and regions, is dropped here, before the ticket settles.
        let JobState { session: number, failed, done, .. } = *self.jobs.remove(key);
        if failed.is_some() {
            self.turns.extract(|queued| *queued == key);
            self.stalled.retain(|queued| *queued != key);
        }
        out.settle(done, failed.map_or(Ok(()), |why| Err(self.refine_error(number, why))));
        if let Some(session) = self.sessions.get_mut(&number) {
            session.jobs -= 1;
            self.release_recalled(number, out);
            self.after_work(number, out);
        }
    }

    /// Replaces `Native` with the error of a lost peer if the peer's process is exiting: some
    /// libraries only report that an operation failed, before the process has ended.
    fn refine_error(&self, number: u64, why: Error) -> Error {
        let process = self.sessions.get(&number).and_then(|session| session.process.as_ref());
        if why.kind() == ErrorKind::Native && process.is_some_and(ProcessWatch::is_exiting) {
            return why.with_kind(ErrorKind::PeerLost);
        }
        why
    }

    /// Fails transfers early; nothing more of them is posted.
    pub(super) fn fail_jobs(
        &mut self,
        which: impl Fn(&JobState<F>) -> bool,
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

    /// Settles all jobs, after the library has stopped touching memory: unreported pieces have
    /// ended as well.
    pub(super) fn settle_all(&mut self, why: &Error, out: &mut Outbox) {
        for (_, running) in std::mem::take(&mut self.jobs) {
            let JobState { done, failed, .. } = *running;
            out.settle(done, Err(failed.unwrap_or_else(|| why.clone())));
        }
    }

    /// Forgets all jobs. The library may still touch their memory, which is quarantined.
    pub(super) fn forget_all(&mut self) {
        for (_, running) in std::mem::take(&mut self.jobs) {
            let JobState { remotes, locals, state, done, .. } = *running;
            std::mem::forget((remotes, locals, state));
            drop(done);
        }
    }
}
