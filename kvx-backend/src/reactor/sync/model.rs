//! Loom's locks and threads, with the interfaces that the reactor uses.

pub(crate) use loom::sync::MutexGuard;

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock().ok()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits for a notification: in a model no time passes.
    pub(crate) fn wait_until<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        _: Option<std::time::Instant>,
    ) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap()
    }
}

pub(crate) mod thread {
    use std::io;
    use std::sync::Arc;
    use std::time::Duration;

    pub(crate) use loom::thread::current;

    use loom::sync::atomic::{AtomicBool, Ordering};
    use loom::thread::Thread;

    pub(crate) struct Builder(loom::thread::Builder);

    impl Builder {
        pub(crate) fn new() -> Self {
            Builder(loom::thread::Builder::new())
        }

        pub(crate) fn name(self, name: String) -> Self {
            Builder(self.0.name(name))
        }

        pub(crate) fn spawn<T: Send + 'static>(
            self,
            run: impl FnOnce() -> T + Send + 'static,
        ) -> io::Result<JoinHandle<T>> {
            let is_finished = Arc::new(AtomicBool::new(false));
            let finishes = Arc::clone(&is_finished);
            let handle = self.0.spawn(move || {
                let result = run();
                finishes.store(true, Ordering::Release);
                result
            })?;
            Ok(JoinHandle { handle, is_finished })
        }
    }

    pub(crate) struct JoinHandle<T> {
        handle: loom::thread::JoinHandle<T>,
        is_finished: Arc<AtomicBool>,
    }

    impl<T> JoinHandle<T> {
        pub(crate) fn thread(&self) -> &Thread {
            self.handle.thread()
        }

        pub(crate) fn is_finished(&self) -> bool {
            self.is_finished.load(Ordering::Acquire)
        }

        pub(crate) fn join(self) -> std::thread::Result<T> {
            self.handle.join()
        }
    }

    /// Lets the other threads run.
    pub(crate) fn sleep(_: Duration) {
        loom::thread::yield_now();
    }
}
