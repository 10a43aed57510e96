//! The requesting side of the side channel, without a socket.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};

use super::{ClockReading, Expectation, HandshakePayload, HandshakeRequest, NixlAgentMetadata};
use crate::ids::WorkerRank;
use crate::time::{ClockOffset, Time};

/// A handshake with one engine: a request for each of its workers that the local worker needs.
/// Requests are sent one after the other over the same REQ socket, each with its own time limit.
///
/// The caller sends the result of [`request`](Self::request), passes the answer to
/// [`received`](Self::received), and calls [`tick`](Self::tick) at [`answer_by`](Self::answer_by).
/// An error ends the handshake: close the socket. The workers must exist, as `tp_size` and
/// `pp_size` in the parameters say, and the version must be the peer's. vLLM's listener does not
/// survive a request for a worker that does not exist, or a request of another form.
///
/// ```
/// use std::time::Duration;
/// use kvx_vllm::Version;
/// use kvx_vllm::engine::{Time, WorkerRank};
/// use kvx_vllm::wire::{CompatibilityHash, Expectation, Handshake, Listener, NixlAgentMetadata};
/// # fn main() -> Result<(), kvx_core::Error> {
/// let hash = CompatibilityHash::foreign("ab".repeat(32));
/// let rank = WorkerRank { pp: 0, tp: 0 };
/// let mut metadata = NixlAgentMetadata::new("prefill-0", Version::V0_33);
/// metadata.block_size = 16;
/// let mut listener = Listener::new(hash.clone());
/// listener.publish(rank, &metadata);
///
/// let at = |milliseconds| Time::from_origin(Duration::from_millis(milliseconds));
/// let expectation = Expectation::new(Version::V0_33, "prefill-0", hash);
/// let mut handshake = Handshake::new(expectation, [rank], (1, 1))?;
/// while let Some(request) = handshake.request(at(10)) {
///     let message = [&b"me"[..], b"", &request];
///     let answer = listener.answer(&message, at(5000))?;
///     let frames: Vec<&[u8]> = answer.frames().skip(2).collect();
///     handshake.received(&frames, at(12))?;
/// }
/// let peer = handshake.finish()?;
/// assert_eq!(peer.workers[&rank], metadata);
/// assert_eq!(peer.clock.unwrap().seconds, 4.989);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Handshake {
    expectation: Expectation,
    limit: Duration,
    /// The requests without an answer, the next one last.
    left: Vec<HandshakeRequest>,
    asked: Option<Time>,
    failed: bool,
    peer: HandshakenPeer,
}

/// The result of a handshake.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HandshakenPeer {
    /// The metadata of each requested worker.
    pub workers: BTreeMap<WorkerRank, NixlAgentMetadata>,
    /// The offset of the peer's clock, from the answer with the shortest round trip. vLLM 0.25 and
    /// older do not send it.
    pub clock: Option<ClockOffset>,
}

impl Handshake {
    /// The time that vLLM waits for an answer.
    pub const LIMIT: Duration = Duration::from_secs(5);

    /// Creates a handshake with these workers of an engine with `(pp_size, tp_size)` workers, in
    /// this order. Each answer must arrive within [`LIMIT`](Self::LIMIT).
    ///
    /// # Errors
    ///
    /// No worker, or one that the engine does not have; a pipeline stage that the version does not
    /// support.
    pub fn new(
        expectation: Expectation,
        workers: impl IntoIterator<Item = WorkerRank>,
        (pp_size, tp_size): (u32, u32),
    ) -> Result<Self> {
        let mut left = Vec::new();
        for rank in workers {
            if rank.pp >= pp_size || rank.tp >= tp_size {
                return Err(ErrorKind::Invalid.because(format!(
                    "engine {} has {pp_size} x {tp_size} workers, but no pp {} tp {}; a request \
                     for it would end its listener",
                    expectation.engine_id, rank.pp, rank.tp
                )));
            }
            left.push(HandshakeRequest::new(rank, expectation.version)?);
        }
        if left.is_empty() {
            return Err(ErrorKind::Invalid.because("a handshake needs at least one worker"));
        }
        left.reverse();
        Ok(Handshake {
            expectation,
            limit: Self::LIMIT,
            left,
            asked: None,
            failed: false,
            peer: HandshakenPeer::default(),
        })
    }

    /// Sets the time limit of each answer.
    #[must_use]
    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Returns the next request, to be sent at `now`. All times here are on the clock of the
    /// [`Worker`](crate::engine::Worker) that needs the handshake. `None`: an answer is pending, or
    /// no request is left.
    pub fn request(&mut self, now: Time) -> Option<Vec<u8>> {
        if self.failed || self.asked.is_some() {
            return None;
        }
        let request = self.left.last()?;
        self.asked = Some(now);
        Some(request.encode())
    }

    /// Returns the deadline of the pending answer.
    pub fn answer_by(&self) -> Option<Time> {
        self.asked.map(|asked| asked + self.limit)
    }

    /// Checks the time limit.
    ///
    /// # Errors
    ///
    /// [`TimedOut`](ErrorKind::TimedOut): the pending answer has not arrived in time.
    pub fn tick(&mut self, now: Time) -> Result<()> {
        match (self.answer_by(), self.left.last()) {
            (Some(by), Some(request)) if now.has_reached(by) => {
                let WorkerRank { pp, tp } = request.rank();
                self.over(ErrorKind::TimedOut.because(format!(
                    "the side channel of engine {} did not answer for worker pp {pp} tp {tp} \
                     within {:?}; it is down, or vLLM's listener has ended: restart the instance",
                    self.expectation.engine_id, self.limit
                )))
            }
            _ => Ok(()),
        }
    }

    /// Takes an answer: the frames that a REQ socket received.
    ///
    /// # Errors
    ///
    /// An answer without a request, one that is late or not in the form of the version, and the
    /// errors of [`Expectation::check`].
    pub fn received<F: AsRef<[u8]>>(&mut self, frames: &[F], now: Time) -> Result<()> {
        self.tick(now)?;
        let (Some(asked), Some(request)) = (self.asked, self.left.last().copied()) else {
            return self.over(
                ErrorKind::Malformed.because("the side channel sent an answer without a request"),
            );
        };
        match self.read(frames, asked, now) {
            Ok((metadata, clock)) => {
                self.asked = None;
                self.left.pop();
                self.peer.clock = match (self.peer.clock, clock) {
                    (Some(best), Some(clock)) => Some(best.better(clock)),
                    (best, clock) => best.or(clock),
                };
                self.peer.workers.insert(request.rank(), metadata);
                Ok(())
            }
            Err(error) => self.over(error),
        }
    }

    /// Returns the result of the handshake.
    ///
    /// # Errors
    ///
    /// The handshake is not complete.
    pub fn finish(self) -> Result<HandshakenPeer> {
        if self.failed || !self.left.is_empty() {
            return Err(ErrorKind::Invalid.because(format!(
                "the handshake with engine {} is not complete",
                self.expectation.engine_id
            )));
        }
        Ok(self.peer)
    }

    fn over(&mut self, error: Error) -> Result<()> {
        self.failed = true;
        self.asked = None;
        Err(error)
    }

    fn read<F: AsRef<[u8]>>(
        &self,
        frames: &[F],
        asked: Time,
        now: Time,
    ) -> Result<(NixlAgentMetadata, Option<ClockOffset>)> {
        let wanted = if self.expectation.version.asks_for_pipeline_rank() { 2 } else { 1 };
        let [payload, clock @ ..] = frames else {
            return Err(ErrorKind::Malformed.because("malformed handshake answer: no frames"));
        };
        // A refusal is reported even if the number of frames is wrong.
        let refused = HandshakePayload::decode(payload.as_ref())
            .is_ok_and(|payload| payload.refusal.is_some());
        if frames.len() != wanted && !refused {
            return Err(ErrorKind::Malformed.because(format!(
                "malformed handshake answer: {} frames instead of {wanted}; the peer may speak \
                 another version than {}: set kv_compat to its version",
                frames.len(),
                self.expectation.version
            )));
        }
        let metadata = self.expectation.check(payload.as_ref())?;
        let Some(clock) = clock.first() else { return Ok((metadata, None)) };
        let ClockReading(seconds) = ClockReading::decode(clock.as_ref())?;
        Ok((metadata, ClockOffset::sampled(asked, now, seconds)))
    }
}
