//! How many requests are at work at once, and how many wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::setup::Limits;

/// A bounded number at work, and a bounded queue before it.
#[derive(Debug)]
pub(crate) struct Admission {
    places: Arc<Semaphore>,
    waiting: AtomicUsize,
    queue: usize,
    wait: Duration,
}

/// Why a request is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// As many wait as may.
    Full,
    /// It has waited as long as it may.
    Waited,
}

struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Admission {
    pub(crate) fn new(limits: &Limits) -> Self {
        Admission {
            places: Arc::new(Semaphore::new(limits.in_flight.min(Semaphore::MAX_PERMITS))),
            waiting: AtomicUsize::new(0),
            queue: limits.queue,
            wait: limits.queue_wait,
        }
    }

    /// A place, which is free again when the permit is dropped.
    pub(crate) async fn enter(&self) -> Result<OwnedSemaphorePermit, Denied> {
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Ok(place);
        }
        let waiting = Waiting(&self.waiting);
        if self.waiting.fetch_add(1, Relaxed) >= self.queue {
            drop(waiting);
            return Err(Denied::Full);
        }
        let place = tokio::time::timeout(self.wait, Arc::clone(&self.places).acquire_owned()).await;
        place.map_err(|_| Denied::Waited)?.map_err(|_| Denied::Full)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(queue: usize, wait: u64) -> Admission {
        let limits =
            Limits { in_flight: 1, queue, queue_wait: Duration::from_millis(wait), ..Limits::default() };
        Admission::new(&limits)
    }

    #[tokio::test]
    async fn beyond_the_queue_nobody_waits() {
        let admission = Arc::new(admission(1, 10_000));
        let first = admission.enter().await.unwrap();
        let second = tokio::spawn({
            let admission = Arc::clone(&admission);
            async move { admission.enter().await.map(drop) }
        });
        while admission.waiting() == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(admission.enter().await.unwrap_err(), Denied::Full);
        drop(first);
        assert_eq!(second.await.unwrap(), Ok(()));
        assert_eq!(admission.waiting(), 0);
    }

    #[tokio::test]
    async fn nobody_waits_for_ever_and_who_gives_up_is_not_counted() {
        let admission = admission(1, 5);
        let _first = admission.enter().await.unwrap();
        assert_eq!(admission.enter().await.unwrap_err(), Denied::Waited);
        assert_eq!(admission.waiting(), 0);
        drop(tokio::time::timeout(Duration::from_millis(1), admission.enter()).await);
        assert_eq!(admission.waiting(), 0);
    }
}
