//! The driver calls that may block: they allocate, free, pin, open and close memory.
//!
//! A driver may wait in such a call until all work of the device has ended, including the kernels
//! of the program. One thread for each device makes them, in their order. Dropping memory therefore
//! only queues its release, and so does closing memory of another process on a transport's thread.
//! A pool that is created later waits for earlier releases. The thread has no other work, because
//! copies must not wait behind it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use kvx_core::backend::fork;
use kvx_core::backend::sync::{Mutex, catch_panic};
use kvx_core::{Error, ErrorKind, Result};

use crate::driver::Driver;

type Call = Box<dyn FnOnce(&Driver) + Send>;

/// The queue of a device's thread for calls that may block. Cheap to clone; the thread ends with
/// the last clone.
#[derive(Clone)]
pub(super) struct BlockingCalls {
    queue: Sender<Call>,
    forks: u64,
}

impl BlockingCalls {
    /// Queues a call and returns. Does nothing in a forked child, which has no device.
    pub(super) fn later(&self, call: impl FnOnce(&Driver) + Send + 'static) {
        if fork::count() == self.forks {
            self.queue.send(Box::new(call)).ok(); // the thread ends only with its last queue
        }
    }

    /// Makes a call while the device is current, and waits for its result.
    pub(super) fn wait<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        fork::check()?;
        let (answer, answered) = channel();
        self.later(move |driver| {
            answer.send(driver.enter().and_then(|_inside| call(driver))).ok();
        });
        answered.recv().unwrap_or_else(|_| {
            Err(ErrorKind::Native.because(
                "a call of the driver panicked: report this as a bug, and start the process again",
            ))
        })
    }
}

/// The thread of a device for calls that may block, started on first use.
#[derive(Default)]
pub(super) struct CallThread(Mutex<Option<BlockingCalls>>);

impl CallThread {
    /// Returns the queue. Errors: `Forked`; `Exhausted` if the thread cannot be started.
    pub(super) fn get(&self, driver: &Arc<Driver>) -> Result<BlockingCalls> {
        fork::check()?;
        let mut queue = self.0.lock();
        if let Some(queue) = &*queue {
            return Ok(queue.clone());
        }
        let (sender, calls) = channel();
        let name = format!("kvx-mem {} {}", driver.info().driver, driver.info().ordinal);
        let driver = Arc::clone(driver);
        let serve = move || serve(&driver, &calls);
        std::thread::Builder::new().name(name).spawn(serve).map_err(|error| {
            Error::os("could not start a thread for the memory of a device: raise ulimit -u", error)
                .with_kind(ErrorKind::Exhausted)
        })?;
        Ok(queue.insert(BlockingCalls { queue: sender, forks: fork::count() }).clone())
    }

    /// Returns the queue if the thread was started.
    pub(super) fn started(&self) -> Option<BlockingCalls> {
        self.0.lock().clone()
    }
}

fn serve(driver: &Driver, calls: &Receiver<Call>) {
    for call in calls {
        catch_panic(|| call(driver));
    }
}
