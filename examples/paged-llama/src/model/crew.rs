//! A few threads that share the tasks of one step, and sleep otherwise.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The threads. A result depends on the task alone, so their number changes none.
pub(super) struct Crew {
    shared: Arc<Shared>,
    /// One call at a time.
    turn: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    begin: Condvar,
    end: Condvar,
}

#[derive(Default)]
struct State {
    work: Option<Work>,
    /// Counts works, so that a thread takes none twice.
    number: u64,
    /// Threads that have not finished with this work.
    busy: usize,
    failed: bool,
    stop: bool,
}

#[derive(Clone, Copy)]
struct Work {
    task: *const (dyn Fn(usize) + Sync),
    next: *const AtomicUsize,
    count: usize,
}

// SAFETY: `Crew::run` waits until no thread has it any more, and what it points to is `Sync`.
unsafe impl Send for Work {}

impl Work {
    /// Does tasks until there are none.
    ///
    /// # Safety
    /// What it points to is alive.
    unsafe fn share(self) {
        // SAFETY: the caller's.
        let (task, next) = unsafe { (&*self.task, &*self.next) };
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= self.count {
                return;
            }
            task(index);
        }
    }
}

impl Crew {
    /// `threads` with the caller's own.
    pub(super) fn new(threads: usize) -> Crew {
        let shared = Arc::new(Shared { state: Mutex::default(), begin: Condvar::new(), end: Condvar::new() });
        let helper = |number: usize| {
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name(format!("kvx-llama-{number}"));
            thread.spawn(move || shared.help())
        };
        // Fewer are slower, no more.
        let threads = (1..threads).map_while(|number| helper(number).ok()).collect();
        Crew { shared, turn: Mutex::default(), threads }
    }

    /// Runs `task` for each number below `count`, and returns when all have been done.
    pub(super) fn run(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        if count <= 1 || self.threads.is_empty() {
            return (0..count).for_each(task);
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let next = AtomicUsize::new(0);
        // SAFETY: only the lifetime is changed; this call ends after the last use.
        let task =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(task) };
        let work = Work { task, next: &next, count };
        let mut state = self.shared.lock();
        (state.work, state.busy, state.failed) = (Some(work), self.threads.len(), false);
        state.number += 1;
        drop(state);
        self.shared.begin.notify_all();
        // SAFETY: both live in this call.
        let own = catch_unwind(AssertUnwindSafe(|| unsafe { work.share() }));
        let mut state = self.shared.lock();
        while state.busy > 0 {
            state = self.shared.end.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.work = None;
        let failed = state.failed;
        drop(state);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!failed, "a thread of the crew panicked: its message is above");
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.begin.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn help(&self) {
        let mut done = 0;
        let mut state = self.lock();
        loop {
            match state.work {
                _ if state.stop => return,
                Some(work) if state.number != done => {
                    done = state.number;
                    drop(state);
                    // SAFETY: `Crew::run` waits for `busy` to fall.
                    let result = catch_unwind(AssertUnwindSafe(|| unsafe { work.share() }));
                    state = self.lock();
                    state.failed |= result.is_err();
                    state.busy -= 1;
                    if state.busy == 0 {
                        self.end.notify_one();
                    }
                }
                _ => state = self.begin.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}
