//! Events, which are marks in a stream.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::code::{Answer, Code};
use crate::handles::Handles;
use crate::stream::Stream;

pub(crate) static EVENTS: Handles<Event> = Handles::new();

/// A mark that can be recorded repeatedly; the last recording counts.
#[derive(Default)]
pub(crate) struct Event {
    times: Mutex<Times>,
    reached: Condvar,
}

#[derive(Default)]
struct Times {
    recorded: u64,
    reached: u64,
}

impl Event {
    fn lock(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the mark after the work that is in the stream now.
    pub(crate) fn record(self: &Arc<Self>, stream: &Stream) {
        let mut times = self.lock();
        times.recorded += 1;
        let (event, time) = (Arc::clone(self), times.recorded);
        // The lock ensures that the marks in one stream have the order of their numbers.
        stream.mark(Box::new(move || {
            let mut times = event.lock();
            times.reached = times.reached.max(time);
            drop(times);
            event.reached.notify_all();
        }));
    }

    /// Fails with `NOT_READY` until the mark is reached.
    pub(crate) fn query(&self) -> Answer {
        let times = self.lock();
        if times.reached == times.recorded { Ok(()) } else { Err(Code::NOT_READY) }
    }

    /// Waits until the latest mark is reached.
    pub(crate) fn wait(&self) {
        let mut times = self.lock();
        let last = times.recorded;
        while times.reached < last {
            times = self.reached.wait(times).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
