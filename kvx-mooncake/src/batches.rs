//! Batches in flight, and their progress. If the engine does not report the state of a whole batch,
//! each piece is queried.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::fabric::{EndpointId, Event, JobId};
use kvx_core::{Error, ErrorKind};

use crate::error;
use crate::ffi::{Batch, Engine, TransferState};

/// How often the pieces of a batch in progress are queried one by one: the engine does not count
/// all ends.
const DOUBTS: Duration = Duration::from_secs(1);

/// A batch in flight.
pub(crate) struct InFlightBatch {
    pub(crate) batch: Batch,
    pub(crate) job: JobId,
    pub(crate) endpoint: EndpointId,
    pub(crate) to: Arc<str>,
    /// The length of each piece.
    pub(crate) lens: Box<[u64]>,
    /// The sum of their lengths.
    pub(crate) bytes: u64,
    /// Why pieces failed, if any did.
    pub(crate) failed: Option<BatchFailure>,
    /// The number of pieces that have ended, in order.
    ended: usize,
    /// The time of the last query of each piece.
    doubted: Instant,
}

impl InFlightBatch {
    pub(crate) fn new(
        batch: Batch,
        job: JobId,
        endpoint: EndpointId,
        to: Arc<str>,
        lens: Box<[u64]>,
    ) -> Self {
        let (bytes, doubted) = (lens.iter().sum(), Instant::now() + DOUBTS);
        InFlightBatch { batch, job, endpoint, to, lens, bytes, failed: None, ended: 0, doubted }
    }

    /// Queries the batch. Returns whether all of it has ended.
    fn look(&mut self, engine: &Engine, now: Instant) -> bool {
        if self.ended == 0 && self.failed.is_none() {
            match engine.batch_state(&self.batch) {
                Some(TransferState::Completed(bytes)) if bytes == self.bytes => {
                    self.ended = self.lens.len();
                    return true;
                }
                Some(TransferState::InProgress) if now < self.doubted => return false,
                _ => self.doubted = now + DOUBTS,
            }
        }
        while let Some(len) = self.lens.get(self.ended) {
            let (why, code) = match engine.piece_state(&self.batch, self.ended) {
                Ok(TransferState::InProgress) | Err(_) => return false,
                Ok(TransferState::Completed(bytes)) if bytes == *len => {
                    self.ended += 1;
                    continue;
                }
                Ok(TransferState::Completed(bytes)) => {
                    (format!("completed with {bytes} of {len} bytes"), 4)
                }
                Ok(TransferState::Failed(state)) => {
                    let (code, text) = error::of_state(state);
                    (text.to_owned(), code)
                }
            };
            let failure = self.failed.get_or_insert(BatchFailure { count: 0, why, code });
            failure.count += 1;
            self.ended += 1;
        }
        true
    }
}

/// All batches in flight.
#[derive(Default)]
pub(crate) struct Batches(VecDeque<InFlightBatch>);

impl Batches {
    pub(crate) fn push(&mut self, moving: InFlightBatch) {
        self.0.push_back(moving);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Queries the next batch in turn, and returns it if it has ended.
    pub(crate) fn poll_next(&mut self, engine: &Engine, now: Instant) -> Option<InFlightBatch> {
        let mut moving = self.0.pop_front()?;
        if moving.look(engine, now) {
            return Some(moving);
        }
        self.0.push_back(moving);
        None
    }
}

/// The failure of a batch's pieces.
#[derive(Clone, Debug)]
pub(crate) struct BatchFailure {
    count: usize,
    why: String,
    code: i64,
}

impl BatchFailure {
    /// Returns the error. `lives`: the peer is known to be alive; `log`: the engine's last log
    /// lines.
    pub(crate) fn error(&self, lives: bool, log: &Option<String>) -> Error {
        let BatchFailure { count, why, code } = self;
        let said =
            log.as_deref().map_or_else(String::new, |log| format!("; it last logged: {log}"));
        let why = format!("{why}{said}");
        let peer = if lives { "although the peer is alive" } else { "and the peer may have ended" };
        Error::new(
            ErrorKind::Native,
            format!(
                "Mooncake failed to move {count} pieces {peer}: its memory may be unregistered, or it was silent for 30 s"
            ),
        )
        .with_native(*code, why)
    }
}

/// A failed batch whose peer is being probed.
pub(crate) struct FailedBatch {
    pub(crate) job: JobId,
    pub(crate) endpoint: EndpointId,
    pub(crate) to: Arc<str>,
    pub(crate) pieces: u32,
    pub(crate) failure: BatchFailure,
}

impl FailedBatch {
    /// Returns the event for its end.
    pub(crate) fn moved(&self, why: Error) -> Event {
        Event::Completed { job: self.job, pieces: self.pieces, result: Err(why) }
    }
}
