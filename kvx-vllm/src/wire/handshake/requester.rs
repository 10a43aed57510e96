//! The asking side of the side channel, without its socket.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};

use super::{ClockReading, Expectation, HandshakePayload, HandshakeRequest, NixlAgentMetadata};
use crate::ids::WorkerRank;
use crate::time::{ClockOffset, Time};

/// One handshake with an engine: a question for each of its workers that this one needs, one after the other, each
/// over the same REQ socket and with a time limit of its own.
///
/// The caller sends what [`request`](Self::request) gives, passes the answer to [`received`](Self::received), and
/// calls [`tick`](Self::tick) when [`answer_by`](Self::answer_by) has come. After an error the handshake is over:
/// close the socket. The workers must exist, as `tp_size` and `pp_size` in the parameters say, and the version must
/// be the peer's: vLLM's listener does not survive a question for a worker that it does not have, or one of another
/// form.
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
    /// The questions that are not answered yet, the next one last.
    left: Vec<HandshakeRequest>,
    asked: Option<Time>,
    failed: bool,
    peer: HandshakenPeer,
}

/// What a handshake has brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HandshakenPeer {
    /// The metadata of each worker that was asked for.
    pub workers: BTreeMap<WorkerRank, NixlAgentMetadata>,
    /// How far the peer's clock is ahead, by the answer with the shortest round trip. vLLM 0.25 and older do not say.
    pub clock: Option<ClockOffset>,
}

impl Handshake {
    /// How long vLLM waits for an answer.
    pub const LIMIT: Duration = Duration::from_secs(5);

    /// Will ask for these workers of an engine with `(pp_size, tp_size)` workers, in this order; each answer has
    /// [`LIMIT`](Self::LIMIT) to come.
    ///
    /// # Errors
    ///
    /// No worker, or one that the engine does not have; a pipeline stage that the version cannot name.
    pub fn new(
        expectation: Expectation,
        workers: impl IntoIterator<Item = WorkerRank>,
        (pp_size, tp_size): (u32, u32),
    ) -> Result<Self> {
        let mut left = Vec::new();
        for rank in workers {
            if rank.pp >= pp_size || rank.tp >= tp_size {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!(
                        "engine {} has {pp_size} x {tp_size} workers, none is pp {} tp {}; asking would end its \
                         listener",
                        expectation.engine_id, rank.pp, rank.tp
                    ),
                ));
            }
            left.push(HandshakeRequest::new(rank, expectation.version)?);
        }
        if left.is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "a handshake needs at least one worker to ask for",
            ));
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

    /// Gives each answer so long to come.
    #[must_use]
    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// The next question, to be sent at `now`, on the clock of the [`Worker`](crate::engine::Worker) that asked for the
    /// handshake, as all times here. `None`: an answer is awaited, or nothing is left to ask.
    pub fn request(&mut self, now: Time) -> Option<Vec<u8>> {
        if self.failed || self.asked.is_some() {
            return None;
        }
        let request = self.left.last()?;
        self.asked = Some(now);
        Some(request.encode())
    }

    /// When the awaited answer must have come.
    pub fn answer_by(&self) -> Option<Time> {
        self.asked.map(|asked| asked + self.limit)
    }

    /// Looks at the clock.
    ///
    /// # Errors
    ///
    /// [`TimedOut`](ErrorKind::TimedOut): the awaited answer has not come in time.
    pub fn tick(&mut self, now: Time) -> Result<()> {
        match (self.answer_by(), self.left.last()) {
            (Some(by), Some(request)) if now.has_reached(by) => {
                let WorkerRank { pp, tp } = request.rank();
                self.over(Error::new(
                    ErrorKind::TimedOut,
                    format!(
                        "the side channel of engine {} did not answer for worker pp {pp} tp {tp} within {:?}; it \
                         is down, \
                         or vLLM's listener has ended: restart the instance",
                        self.expectation.engine_id, self.limit
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Takes an answer: the frames that a REQ socket receives.
    ///
    /// # Errors
    ///
    /// An answer to no question, one that comes too late, one that is not of the form of the version, and those of
    /// [`Expectation::check`].
    pub fn received<F: AsRef<[u8]>>(&mut self, frames: &[F], now: Time) -> Result<()> {
        self.tick(now)?;
        let (Some(asked), Some(request)) = (self.asked, self.left.last().copied()) else {
            return self.over(Error::new(
                ErrorKind::Malformed,
                "an answer came on the side channel before a question",
            ));
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

    /// What the handshake has brought.
    ///
    /// # Errors
    ///
    /// It is not complete.
    pub fn finish(self) -> Result<HandshakenPeer> {
        if self.failed || !self.left.is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("the handshake with engine {} is not complete", self.expectation.engine_id),
            ));
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
            return Err(Error::new(ErrorKind::Malformed, "malformed handshake answer: no frames"));
        };
        // A refusal says more than the number of its frames.
        let refused = HandshakePayload::decode(payload.as_ref())
            .is_ok_and(|payload| payload.refusal.is_some());
        if frames.len() != wanted && !refused {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!(
                    "malformed handshake answer: {} frames, {wanted} wanted; the peer may speak another version \
                     than {}: set \
                     kv_compat to its version",
                    frames.len(),
                    self.expectation.version
                ),
            ));
        }
        let metadata = self.expectation.check(payload.as_ref())?;
        let Some(clock) = clock.first() else { return Ok((metadata, None)) };
        let ClockReading(seconds) = ClockReading::decode(clock.as_ref())?;
        Ok((metadata, ClockOffset::sampled(asked, now, seconds)))
    }
}
