//! The answering side of the side channel, without a socket.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvx_core::{Error, ErrorKind, Result};

use super::{ClockReading, HandshakePayload, HandshakeRequest, NixlAgentMetadata};
use crate::ids::WorkerRank;
use crate::time::Time;
use crate::wire::CompatibilityHash;

/// The most frames before a request that are returned unread: the identity, and frames that brokers
/// add.
const MAX_ENVELOPE: usize = 8;
/// The most bytes in each of these frames: ZeroMQ's limit for identities.
const MAX_IDENTITY: usize = 255;

/// The listener that answers handshakes for all workers of an engine. Its input is a message that a
/// ROUTER socket received; its output is the message to send.
///
/// It answers every request that it can: with a worker's metadata, or with a reason for the refusal
/// ([`HandshakePayload::refused`]), which a vLLM peer logs and survives. It keeps no state for
/// peers.
///
/// ```
/// use kvx_vllm::Version;
/// use kvx_vllm::engine::{Time, WorkerRank};
/// use kvx_vllm::wire::{CompatibilityHash, Listener, NixlAgentMetadata};
/// let mut listener = Listener::new(CompatibilityHash::foreign("ab".repeat(32)));
/// listener.publish(WorkerRank { pp: 0, tp: 0 }, &NixlAgentMetadata::new("prefill-0", Version::V0_33));
///
/// let received: [&[u8]; 3] = [b"identity", b"", b"\x93\xc4\x0cget_meta_msg\x00\x00"];
/// let answer = listener.answer(&received, Time::default())?;
/// let sent: Vec<&[u8]> = answer.frames().collect();
/// assert_eq!(sent[..2], received[..2]);
/// assert_eq!(sent[3], *b"\xcb\0\0\0\0\0\0\0\0");
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Listener {
    compatibility_hash: CompatibilityHash,
    payloads: BTreeMap<WorkerRank, Result<Arc<[u8]>>>,
    registration_generation: u64,
}

/// The message to send back.
#[derive(Clone, Debug)]
pub struct Reply<'a, F> {
    envelope: &'a [F],
    payload: Arc<[u8]>,
    clock: Option<[u8; 9]>,
    refusal: Option<Error>,
}

impl Listener {
    /// Creates a listener without workers. The hash is part of every answer.
    pub fn new(compatibility_hash: CompatibilityHash) -> Self {
        Listener { compatibility_hash, payloads: BTreeMap::new(), registration_generation: 0 }
    }

    /// Sets the answer for a worker. Metadata that differs from the last begins a new
    /// [generation](Self::registration_generation).
    pub fn publish(&mut self, rank: WorkerRank, metadata: &NixlAgentMetadata) {
        let payload =
            HandshakePayload::new(self.compatibility_hash.clone(), metadata.encode()).encode();
        let old = self.payloads.insert(rank, Ok(payload.clone().into()));
        let changed = old.is_some_and(|old| old.is_ok_and(|old| *old != *payload));
        self.registration_generation += u64::from(changed);
    }

    /// Sets an error as the answer for a worker.
    pub fn refuse(&mut self, rank: WorkerRank, why: Error) {
        self.payloads.insert(rank, Err(why));
    }

    /// Removes the answer for a worker whose memory was released. This, too, begins a new
    /// [generation](Self::registration_generation).
    pub fn withdraw(&mut self, rank: WorkerRank) {
        let old = self.payloads.remove(&rank);
        self.registration_generation += u64::from(old.is_some_and(|old| old.is_ok()));
    }

    /// Returns how many times the published metadata has changed. Pass it to
    /// [`Scheduler::registered`](crate::engine::Scheduler::registered): no other component counts
    /// it.
    pub fn registration_generation(&self) -> u64 {
        self.registration_generation
    }

    /// Answers one message. `now` is on the clock of the engine's
    /// [`Scheduler`](crate::engine::Scheduler). The scheduler publishes expiry times on that clock,
    /// and the answer lets a peer compare it with its own.
    ///
    /// # Errors
    ///
    /// A message that cannot be answered: no frames, no identity at the front, or an envelope
    /// beyond ZeroMQ's limits.
    pub fn answer<'a, F: AsRef<[u8]>>(&self, frames: &'a [F], now: Time) -> Result<Reply<'a, F>> {
        let (_, request) = opened(frames)?;
        let request = match request {
            [one] => HandshakeRequest::decode(one.as_ref()),
            several => Err(ErrorKind::Malformed.because(format!(
                "malformed handshake request: expected 1 frame, found {}",
                several.len()
            ))),
        };
        self.answer_with(frames, now, request)
    }

    /// Answers a message with this decoded request, or with the reason why it cannot be answered.
    #[doc(hidden)]
    pub fn answer_with<'a, F: AsRef<[u8]>>(
        &self,
        frames: &'a [F],
        now: Time,
        request: Result<HandshakeRequest>,
    ) -> Result<Reply<'a, F>> {
        let (envelope, _) = opened(frames)?;
        let answer = request.and_then(|request| Ok((self.payload(request)?, request)));
        Ok(match answer {
            Ok((payload, request)) => {
                let clock = request.pipeline_aware().then(|| ClockReading::from(now).encode());
                Reply { envelope, payload, clock, refusal: None }
            }
            Err(refusal) => {
                // An older peer expects one frame, a newer one two. A request that could not be
                // decoded is treated as a newer one's.
                let older = self.older_form(frames);
                Reply {
                    envelope,
                    payload: HandshakePayload::refused(&refusal).encode().into(),
                    clock: (!older).then(|| ClockReading::from(now).encode()),
                    refusal: Some(refusal),
                }
            }
        })
    }

    fn older_form<F: AsRef<[u8]>>(&self, frames: &[F]) -> bool {
        frames.last().is_some_and(|last| {
            HandshakeRequest::decode(last.as_ref()).is_ok_and(|request| !request.pipeline_aware())
        })
    }

    fn payload(&self, request: HandshakeRequest) -> Result<Arc<[u8]>> {
        let rank = request.rank();
        if !request.pipeline_aware() && self.payloads.keys().any(|rank| rank.pp > 0) {
            return Err(ErrorKind::Unsupported.because(
                "this engine has pipeline stages, but the request (of vLLM 0.25 or older) cannot \
                 name one",
            ));
        }
        if let Some(payload) = self.payloads.get(&rank) {
            return payload.clone();
        }
        let WorkerRank { pp, tp } = rank;
        let known = match self.payloads.keys().next_back() {
            None => "no worker has registered its memory yet".to_owned(),
            Some(last) => {
                format!("the last worker of this engine is pp {} tp {}", last.pp, last.tp)
            }
        };
        Err(ErrorKind::Invalid.because(format!(
            "there is no worker pp {pp} tp {tp}: {known}; tp_size and pp_size in \
             kv_transfer_params give the numbers of workers"
        )))
    }
}

impl<F: AsRef<[u8]>> Reply<'_, F> {
    /// Returns the frames to send, the peer's identity first.
    pub fn frames(&self) -> impl Iterator<Item = &[u8]> {
        let clock = self.clock.as_ref().map(<[u8; 9]>::as_slice);
        self.envelope.iter().map(AsRef::as_ref).chain([&*self.payload]).chain(clock)
    }

    /// Returns the payload.
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Replaces the payload.
    #[must_use]
    pub fn with_payload(self, payload: &HandshakePayload) -> Self {
        Reply { payload: payload.encode().into(), ..self }
    }

    /// Returns the error that the peer gets instead of metadata, for the log.
    pub fn refusal(&self) -> Option<&Error> {
        self.refusal.as_ref()
    }
}

/// Splits a message into the envelope to return, with its empty last frame, and the rest.
fn opened<F: AsRef<[u8]>>(frames: &[F]) -> Result<(&[F], &[F])> {
    let unanswerable = |why: &str| {
        ErrorKind::Malformed.because(format!("a message that cannot be answered: {why}"))
    };
    if frames.first().is_none_or(|identity| identity.as_ref().is_empty()) {
        return Err(unanswerable("it does not begin with an identity"));
    }
    // A DEALER may omit the empty frame. Then the envelope is only the identity.
    let end = frames
        .iter()
        .take(MAX_ENVELOPE)
        .position(|frame| frame.as_ref().is_empty())
        .map_or(1, |at| at + 1);
    let (envelope, request) = frames.split_at(end);
    if envelope.iter().any(|frame| frame.as_ref().len() > MAX_IDENTITY) {
        return Err(unanswerable("a frame of its envelope is longer than 255 bytes"));
    }
    Ok((envelope, request))
}
