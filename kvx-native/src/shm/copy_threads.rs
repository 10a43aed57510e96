//! Threads that copy memory outside of kvx pools, where a page fault may be resolved late or never.
//!
//! The machine gives them batches and does not wait. Usually there is one thread. Once it has spent
//! [`STUCK`] in one batch, another takes its place. Further batches with the same peer, over any
//! link, wait behind the stuck one, so that a peer occupies one thread at most. A thread that is
//! stuck for ever is abandoned with the memory of both sides, which its batch keeps alive; its
//! transfer never settles.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvx_backend::reactor::WorkQueue;
use kvx_core::backend::Hop;
use kvx_core::backend::sync::{Condvar, Mutex, MutexGuard, pause_between_looks};
use kvx_core::{Error, ErrorKind, Identity, Memory, Result};

use super::completion::BatchCompletion;
use super::copy::{Copier, Vectors};
use super::error::NAME;
use super::host::PeerProcess;
use super::memory::CopySource;
use crate::clock;

/// The time after which a batch counts as stuck: more than one without unresolved page faults
/// takes, even if many threads share a core.
pub(crate) const STUCK: Duration = Duration::from_millis(100);
/// The time in one batch after which a warning is logged.
const WORTH_A_WARNING: Duration = Duration::from_secs(1);
/// The limit for the threads of one agent. If more peers than these have unresolved page faults,
/// the copies of all peers stop.
const MAX_THREADS: usize = 32;
/// The time for which a thread polls for the next batch before it sleeps; a wake-up costs some 15
/// us.
const LOOKS_FOR: Duration = Duration::from_micros(50);
/// The time that a transport that ends waits for threads that are about to end.
const LAST_PATIENCE: Duration = Duration::from_millis(50);

/// The memory of both sides of a copy.
#[derive(Debug)]
pub(crate) struct Sides {
    /// The peer's memory.
    pub(crate) places: Vec<CopySource>,
    /// The local memory.
    pub(crate) targets: Vec<Arc<Memory>>,
}

/// A part of a flight, which one thread copies.
pub(crate) struct Batch {
    /// The number of the flight.
    pub(crate) number: u64,
    /// The peer, once it is known.
    pub(crate) peer: Option<Identity>,
    /// The process whose memory is read unless it is `mapped` here.
    pub(crate) process: Arc<PeerProcess>,
    pub(crate) mapped: bool,
    /// The copies, within the places and targets of its sides.
    pub(crate) hops: Vec<Hop>,
    pub(crate) bytes: u64,
    /// The memory of both sides, kept alive as long as the batch may touch it.
    pub(crate) sides: Arc<Sides>,
    pub(crate) completion: BatchCompletion,
}

/// A batch that a thread is copying.
struct ActiveBatch {
    thread: u64,
    number: u64,
    peer: Option<Identity>,
    since: Instant,
    stuck: bool,
    warned: bool,
}

#[derive(Default)]
struct State {
    waiting: WorkQueue<Batch>,
    /// The batches of peers with which a thread is stuck.
    held_up: Vec<Batch>,
    under_way: Vec<ActiveBatch>,
    /// The number of threads that have not ended; `next` is the number of the next one.
    threads: usize,
    next: u64,
    ended: bool,
}

impl State {
    /// Returns the number of threads that are not stuck.
    fn active(&self) -> usize {
        self.threads - self.under_way.iter().filter(|batch| batch.stuck).count()
    }

    fn is_stuck_with(&self, peer: Option<&Identity>) -> bool {
        peer.is_some()
            && self.under_way.iter().any(|batch| batch.stuck && batch.peer.as_ref() == peer)
    }

    fn add(&mut self, batch: Batch) {
        if self.is_stuck_with(batch.peer.as_ref()) {
            return self.held_up.push(batch);
        }
        let bytes = batch.bytes;
        self.waiting.push(batch, bytes);
    }

    /// Sorts all waiting batches again, after the stuck threads have changed.
    fn sort_again(&mut self) {
        let mut all = self.waiting.extract(|_| true);
        all.append(&mut self.held_up);
        all.into_iter().for_each(|batch| self.add(batch));
    }
}

#[derive(Default)]
struct CopyQueue {
    state: Mutex<State>,
    /// Notifies threads that a batch waits, and the owner that a thread has ended.
    changed: Condvar,
    /// True if a batch waits, or the threads must end; for threads that poll before they sleep.
    some: AtomicBool,
}

/// The copying threads of one machine.
pub(crate) struct CopyThreads {
    name: String,
    shared: Arc<CopyQueue>,
}

impl CopyThreads {
    /// Creates the set without threads, which will be named after `agent`.
    pub(crate) fn of(agent: &str) -> Self {
        CopyThreads { name: format!("kvx-copy {agent}"), shared: Arc::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock()
    }

    /// Takes a batch. Returns `Exhausted` if there is no thread for it.
    ///
    /// # Safety
    ///
    /// The caller ensures that the batch's hops lie within its sides: mapped places, or places in
    /// the process, and writable host memory without references into it. Memory that its sides do
    /// not keep must live until the batch has landed, or for ever if it never does.
    pub(crate) unsafe fn take(&mut self, batch: Batch) -> Result<()> {
        let mut state = self.state();
        if state.active() == 0
            && state.threads < MAX_THREADS
            && !state.is_stuck_with(batch.peer.as_ref())
            && let Err(why) = self.start_thread(&mut state)
            && state.threads == 0
        {
            batch.completion.withdraw();
            return Err(why);
        }
        state.add(batch);
        self.shared.some.store(true, Ordering::Relaxed);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn start_thread(&self, state: &mut State) -> Result<()> {
        #[cfg(test)]
        if clock::virtual_time::is_running() {
            return Ok(()); // the test's thread copies
        }
        let (shared, thread) = (Arc::clone(&self.shared), state.next);
        let serve = move || shared.serve(thread);
        std::thread::Builder::new().name(self.name.clone()).spawn(serve).map_err(|cause| {
            Error::os(
                "cannot start a thread to copy memory outside of kvx pools: raise ulimit -u",
                cause,
            )
            .with_kind(ErrorKind::Exhausted)
            .with_backend(NAME)
        })?;
        state.next += 1;
        state.threads += 1;
        Ok(())
    }

    /// Finds stuck threads, and starts a replacement for the last one. Returns the flights that
    /// have been stuck long enough for a warning, and the time of the next check.
    pub(crate) fn look(&mut self, now: Instant) -> (Vec<u64>, Option<Instant>) {
        let mut state = self.state();
        let mut found = false;
        let mut tell = Vec::new();
        for batch in &mut state.under_way {
            let time = now.saturating_duration_since(batch.since);
            found |= time >= STUCK && !std::mem::replace(&mut batch.stuck, time >= STUCK);
            if time >= WORTH_A_WARNING && !std::mem::replace(&mut batch.warned, true) {
                tell.push(batch.number);
            }
        }
        if found {
            state.sort_again();
        }
        if state.active() == 0 && !state.waiting.is_empty() && state.threads < MAX_THREADS
            // The next check tries again.
            && let Err(why) = self.start_thread(&mut state)
        {
            tracing::warn!(%why, "SHM: copies wait behind an unresolved page fault");
        }
        let waits = !state.waiting.is_empty() || state.under_way.iter().any(|batch| !batch.warned);
        // A batch that has just begun counts as stuck after the same time.
        let begun =
            state.under_way.iter().filter(|batch| !batch.stuck).map(|batch| batch.since + STUCK);
        (tell, begun.chain(waits.then_some(now + STUCK)).min())
    }

    /// Waits until no batch waits or is being copied. Returns false at the deadline.
    #[cfg(test)]
    pub(crate) fn is_idle_by(&self, until: Instant) -> bool {
        loop {
            let state = self.state();
            if state.waiting.is_empty() && state.under_way.is_empty() {
                return true;
            }
            drop(state);
            if Instant::now() >= until {
                return false;
            }
            std::thread::yield_now();
        }
    }

    /// Copies up to `most` waiting batches on the calling thread, and those that follow them at
    /// once. Returns true if there were any.
    #[cfg(test)]
    pub(crate) fn copy_here(&self, most: usize) -> bool {
        let mut tools = (Copier::new(), Vectors::new());
        let mut count = 0;
        while count < most {
            let mut next = self.shared.begin(&mut self.state(), 0);
            if next.is_none() {
                break;
            }
            while let Some(batch) = next {
                next = self.shared.copy(0, batch, &mut tools);
            }
            count += 1;
        }
        count > 0
    }

    /// Withdraws the waiting batches of a flight. Returns how many there were.
    pub(crate) fn withdraw(&mut self, number: u64) -> usize {
        let mut state = self.state();
        let mut withdrawn = state.waiting.extract(|batch| batch.number == number);
        withdrawn.extend(state.held_up.extract_if(.., |batch| batch.number == number));
        drop(state);
        let count = withdrawn.len();
        withdrawn.into_iter().for_each(|batch| batch.completion.withdraw());
        count
    }
}

impl Drop for CopyThreads {
    fn drop(&mut self) {
        let until = Instant::now() + LAST_PATIENCE;
        let mut state = self.state();
        state.ended = true;
        self.shared.some.store(true, Ordering::Relaxed);
        let mut left = state.waiting.extract(|_| true);
        left.append(&mut state.held_up);
        self.shared.changed.notify_all();
        while state.threads > state.under_way.len() && Instant::now() < until {
            state = self.shared.changed.wait_until(state, Some(until));
        }
        drop(state);
        left.into_iter().for_each(|batch| batch.completion.withdraw());
    }
}

impl CopyQueue {
    /// Runs a thread.
    fn serve(&self, thread: u64) {
        let mut tools = (Copier::new(), Vectors::new());
        let mut next = None;
        while let Some(batch) = next.take().or_else(|| self.wait(thread)) {
            next = self.copy(thread, batch, &mut tools);
        }
    }

    /// Copies a batch and reports that. Returns the next one, as [`leave`](Self::leave) does.
    fn copy(
        &self,
        thread: u64,
        batch: Batch,
        (copier, vectors): &mut (Copier, Vectors),
    ) -> Option<Batch> {
        let Batch { number, process, mapped, hops, sides, completion, .. } = batch;
        let result = if mapped {
            // SAFETY: the caller of `take` guarantees this for the hops; `sides` and that caller
            // keep their memory alive.
            unsafe { copier.copy_hops(&hops) };
            Ok(())
        } else {
            // SAFETY: the local side of each hop lies in memory that `sides` keeps alive, and that
            // the caller of `take` lets this thread write.
            unsafe { vectors.read_hops(&process, &hops) }
        };
        drop((hops, sides));
        // A series of batches of one flight is reported together, with its last one.
        let next = self.leave(thread, number);
        if next.is_some() {
            completion.record(result)
        } else {
            completion.report_and_turn(result)
        }
        next
    }

    /// Ends the thread's batch. Returns the next one only if it belongs to the same flight: before
    /// another flight's batch the thread reports to the machine and runs its turn, which may take
    /// long.
    fn leave(&self, thread: u64, flight: u64) -> Option<Batch> {
        let mut state = self.state.lock();
        if let Some(at) = state.under_way.iter().position(|batch| batch.thread == thread)
            && state.under_way.swap_remove(at).stuck
        {
            state.sort_again();
            self.changed.notify_all();
        }
        let goes_on = state.waiting.peek().is_some_and(|batch| batch.number == flight);
        if goes_on { self.begin(&mut state, thread) } else { None }
    }

    fn begin(&self, state: &mut State, thread: u64) -> Option<Batch> {
        let batch = if state.ended { None } else { state.waiting.next_turn() };
        self.some.store(!state.waiting.is_empty(), Ordering::Relaxed);
        let Batch { number, peer, .. } = batch.as_ref()?;
        let (number, peer, since) = (*number, peer.clone(), clock::now());
        state.under_way.push(ActiveBatch {
            thread,
            number,
            peer,
            since,
            stuck: false,
            warned: false,
        });
        batch
    }

    /// Waits for a batch. Returns `None` if the thread is not needed any more.
    fn wait(&self, thread: u64) -> Option<Batch> {
        let (begun, mut looks) = (Instant::now(), 0);
        while begun.elapsed() < LOOKS_FOR && !self.some.load(Ordering::Relaxed) {
            pause_between_looks(looks);
            looks += 1;
        }
        let mut state = self.state.lock();
        loop {
            let batch = self.begin(&mut state, thread);
            if batch.is_some() {
                return batch;
            }
            if state.ended || state.active() > 1 {
                state.threads -= 1;
                self.changed.notify_all();
                return None;
            }
            state = self.changed.wait_until(state, None);
        }
    }
}
