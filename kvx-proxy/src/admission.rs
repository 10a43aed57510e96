//! Limits of concurrent and queued requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::setup::ClientLimits;

/// A bounded number of concurrent requests, with a bounded queue.
#[derive(Debug)]
pub(crate) struct RequestAdmission {
    places: Arc<Semaphore>,
    bodies: BodyMemory,
    waiting: AtomicUsize,
    queue: usize,
    wait: Duration,
}

/// Memory for request bodies: one permit per KiB.
#[derive(Clone, Debug)]
pub struct BodyMemory(Arc<Semaphore>);

/// A body's share of the memory for all bodies, released on drop.
#[derive(Debug, Default)]
pub struct BodyPermit(Option<OwnedSemaphorePermit>);

/// Why a request is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdmissionError {
    /// The queue is full.
    Full,
    /// The request was queued for too long.
    TimedOut,
}

struct QueuedGuard<'a>(&'a AtomicUsize);

impl Drop for QueuedGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl RequestAdmission {
    pub(crate) fn new(limits: &ClientLimits) -> Self {
        RequestAdmission {
            places: Arc::new(Semaphore::new(limits.in_flight.min(Semaphore::MAX_PERMITS))),
            bodies: BodyMemory::new(limits.bodies),
            waiting: AtomicUsize::new(0),
            queue: limits.queue,
            wait: limits.queue_wait,
        }
    }

    /// Waits for a slot. Dropping the permit frees the slot.
    pub(crate) async fn enter(&self) -> Result<OwnedSemaphorePermit, AdmissionError> {
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Ok(place);
        }
        let waiting = QueuedGuard(&self.waiting);
        if self.waiting.fetch_add(1, Relaxed) >= self.queue {
            drop(waiting);
            return Err(AdmissionError::Full);
        }
        let place = tokio::time::timeout(self.wait, Arc::clone(&self.places).acquire_owned()).await;
        place.map_err(|_| AdmissionError::TimedOut)?.map_err(|_| AdmissionError::Full)
    }

    /// Returns the memory for request bodies.
    pub(crate) fn bodies(&self) -> &BodyMemory {
        &self.bodies
    }

    /// Grows a body's permit as [`BodyMemory::widen`] does.
    pub(crate) fn widen(&self, permit: &mut BodyPermit, bytes: usize) -> bool {
        self.bodies.widen(permit, bytes)
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Relaxed)
    }
}

impl BodyMemory {
    /// Returns memory of this size.
    pub fn new(bytes: usize) -> Self {
        BodyMemory(Arc::new(Semaphore::new(bytes.div_ceil(1024).min(Semaphore::MAX_PERMITS))))
    }

    /// Grows a body's permit to `bytes` in total, and returns false if there is not enough memory.
    /// Does not wait: a waiting body would hold memory that other bodies need.
    pub fn widen(&self, permit: &mut BodyPermit, bytes: usize) -> bool {
        let have = permit.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let Ok(more) = u32::try_from(bytes.div_ceil(1024).saturating_sub(have)) else {
            return false;
        };
        if more == 0 {
            return true;
        }
        let Ok(taken) = Arc::clone(&self.0).try_acquire_many_owned(more) else { return false };
        match &mut permit.0 {
            Some(held) => held.merge(taken),
            none => *none = Some(taken),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(queue: usize, wait: u64) -> RequestAdmission {
        let limits = ClientLimits {
            in_flight: 1,
            queue,
            queue_wait: Duration::from_millis(wait),
            ..ClientLimits::default()
        };
        RequestAdmission::new(&limits)
    }

    #[tokio::test]
    async fn requests_beyond_the_queue_are_rejected() {
        let admission = Arc::new(admission(1, 10_000));
        let first = admission.enter().await.unwrap();
        let second = tokio::spawn({
            let admission = Arc::clone(&admission);
            async move { admission.enter().await.map(drop) }
        });
        while admission.waiting() == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(admission.enter().await.unwrap_err(), AdmissionError::Full);
        drop(first);
        assert_eq!(second.await.unwrap(), Ok(()));
        assert_eq!(admission.waiting(), 0);
    }

    #[test]
    fn bodies_share_memory_and_return_it() {
        let limits = ClientLimits { bodies: 4096, ..ClientLimits::default() };
        let admission = RequestAdmission::new(&limits);
        let (mut one, mut other) = (BodyPermit::default(), BodyPermit::default());
        assert!(admission.widen(&mut one, 1) && admission.widen(&mut one, 3000));
        assert!(admission.widen(&mut other, 1024) && !admission.widen(&mut other, 1025));
        drop(one);
        assert!(admission.widen(&mut other, 4096));
    }

    #[tokio::test]
    async fn waiting_is_bounded_and_cancelled_waiters_are_not_counted() {
        let admission = admission(1, 5);
        let _first = admission.enter().await.unwrap();
        assert_eq!(admission.enter().await.unwrap_err(), AdmissionError::TimedOut);
        assert_eq!(admission.waiting(), 0);
        drop(tokio::time::timeout(Duration::from_millis(1), admission.enter()).await);
        assert_eq!(admission.waiting(), 0);
    }
}
