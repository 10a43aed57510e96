//! The answering side of the side channel, without its socket.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvx_core::{Error, ErrorKind, Result};

use super::{ClockReading, HandshakePayload, HandshakeRequest, NixlAgentMetadata};
use crate::ids::WorkerRank;
use crate::time::Time;
use crate::wire::CompatibilityHash;

/// Frames before a request that are given back unread: the identity, and what brokers on the way add.
const MAX_ENVELOPE: usize = 8;
/// Bytes in each of them: ZMQ's own limit for identities.
const MAX_IDENTITY: usize = 255;

/// Answers handshakes for all workers of an engine: what a ROUTER socket receives goes in, what it shall send comes
/// out.
///
/// Every request that can be answered is answered: with a worker's metadata, or with words
/// ([`HandshakePayload::refused`]), which a vLLM peer reports and survives. Nothing is remembered of peers.
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

/// What to send back.
#[derive(Clone, Debug)]
pub struct Reply<'a, F> {
    envelope: &'a [F],
    payload: Arc<[u8]>,
    clock: Option<[u8; 9]>,
    refusal: Option<Error>,
}

impl Listener {
    /// A listener without workers. Its hash goes into every answer.
    pub fn new(compatibility_hash: CompatibilityHash) -> Self {
        Listener { compatibility_hash, payloads: BTreeMap::new(), registration_generation: 0 }
    }

    /// Sets what is answered for a worker. Metadata that differs from its last begins a new
    /// [generation](Self::registration_generation).
    pub fn publish(&mut self, rank: WorkerRank, metadata: &NixlAgentMetadata) {
        let payload =
            HandshakePayload::new(self.compatibility_hash.clone(), metadata.encode()).encode();
        let old = self.payloads.insert(rank, Ok(payload.clone().into()));
        let changed = old.is_some_and(|old| old.is_ok_and(|old| *old != *payload));
        self.registration_generation += u64::from(changed);
    }

    /// Answers for a worker with words instead.
    pub fn refuse(&mut self, rank: WorkerRank, why: Error) {
        self.payloads.insert(rank, Err(why));
    }

    /// There is nothing to tell of a worker any more: its memory was given back. That, too, begins a new
    /// [generation](Self::registration_generation).
    pub fn withdraw(&mut self, rank: WorkerRank) {
        let old = self.payloads.remove(&rank);
        self.registration_generation += u64::from(old.is_some_and(|old| old.is_ok()));
    }

    /// How often what was published has changed: what [`Scheduler::registered`](crate::engine::Scheduler::registered)
    /// is to be told, and the only count of it.
    pub fn registration_generation(&self) -> u64 {
        self.registration_generation
    }

    /// Answers one message. `now` is on the clock of the engine's [`Scheduler`](crate::engine::Scheduler): the expiry
    /// times that it publishes are on that clock, and a peer compares it with its own by the answer.
    ///
    /// # Errors
    ///
    /// A message that nothing can be sent back for: no frames, no identity in front, or an envelope beyond ZMQ's
    /// limits.
    pub fn answer<'a, F: AsRef<[u8]>>(&self, frames: &'a [F], now: Time) -> Result<Reply<'a, F>> {
        let (_, request) = opened(frames)?;
        let request = match request {
            [one] => HandshakeRequest::decode(one.as_ref()),
            several => Err(Error::new(
                ErrorKind::Malformed,
                format!("malformed handshake request: {} frames, 1 wanted", several.len()),
            )),
        };
        self.answer_with(frames, now, request)
    }

    /// Answers a message that asks for this, or cannot be answered for this reason.
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
                // An older peer takes one frame, a newer one two: a request that was not understood is not an older
                // one's.
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
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this engine has pipeline stages, and the request (of vLLM 0.25 or older) cannot name one",
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
        Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "there is no worker pp {pp} tp {tp}: {known}; tp_size and pp_size in kv_transfer_params say how many \
                 there are"
            ),
        ))
    }
}

impl<F: AsRef<[u8]>> Reply<'_, F> {
    /// The frames to send, the peer's identity first.
    pub fn frames(&self) -> impl Iterator<Item = &[u8]> {
        let clock = self.clock.as_ref().map(<[u8; 9]>::as_slice);
        self.envelope.iter().map(AsRef::as_ref).chain([&*self.payload]).chain(clock)
    }

    /// The payload among them.
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Gives them another payload.
    #[must_use]
    pub fn with_payload(self, payload: &HandshakePayload) -> Self {
        Reply { payload: payload.encode().into(), ..self }
    }

    /// Why the peer gets words instead of metadata, for the log.
    pub fn refusal(&self) -> Option<&Error> {
        self.refusal.as_ref()
    }
}

/// The envelope to give back, with the empty frame that ends it, and the rest.
fn opened<F: AsRef<[u8]>>(frames: &[F]) -> Result<(&[F], &[F])> {
    let unanswerable = |why: &str| {
        Error::new(ErrorKind::Malformed, format!("a message that cannot be answered: {why}"))
    };
    if frames.first().is_none_or(|identity| identity.as_ref().is_empty()) {
        return Err(unanswerable("it has no identity in front"));
    }
    // A DEALER may leave the empty frame out: then the identity alone is the envelope.
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
