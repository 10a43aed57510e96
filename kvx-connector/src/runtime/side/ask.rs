//! The client of side channels, which opens a socket for each handshake.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, Result, Secret};

use super::super::clock::Clock;
use super::super::zmtp::{Budget, Client, Message, MessageLimits, SocketType, resolve};
use super::proof;
use kvx_vllm::Version;
use kvx_vllm::engine::{Address, HandshakeFailure, RemoteEngine, SideChannels, WorkerRank};
use kvx_vllm::ids::is_loopback;
use kvx_vllm::wire::{
    Expectation, Handshake, HandshakePayload, HandshakeRequest, HandshakenPeer, KvxChallenge,
    KvxRequest,
};

/// An answer has the payload, the clock, and frames that later versions may add.
const ANSWER: MessageLimits = MessageLimits { frames: 4, bytes: HandshakePayload::MAX_LEN + 1024 };
/// The limit for the answers in memory of all handshakes of an engine.
const BYTES: usize = 64 << 20;

/// A client that asks side channels for one engine.
#[derive(Clone, Debug)]
pub(crate) struct SideClient {
    clock: Clock,
    secret: Option<Secret>,
    ports: SideChannels,
    budget: Arc<Budget>,
    limit: Duration,
}

/// The result of a handshake.
#[derive(Debug)]
pub(crate) struct HandshakeOutcome {
    /// The workers' metadata. It contains `kvx_metadata` only if that may be used: with a secret,
    /// only from a [proven](PeerKind::Proven) peer.
    pub(crate) peer: HandshakenPeer,
    /// The kind of the peer.
    pub(crate) standing: PeerKind,
}

/// The answer of a side channel.
#[derive(Debug)]
pub(crate) struct ProbeAnswer {
    pub(crate) payload: HandshakePayload,
    /// The kind of the peer. An error if it is a kvx engine and only one end has a secret.
    pub(crate) standing: Result<PeerKind>,
    pub(crate) round_trip: Duration,
}

/// The kind of engine behind a side channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerKind {
    /// A vLLM engine, reached through its NIXL blob.
    Foreign,
    /// A kvx engine. Neither end has a secret.
    Kvx,
    /// A kvx engine. Both ends have proved that they have the same secret.
    Proven,
}

impl SideClient {
    /// Creates the client of an engine with this clock, secret and port rule.
    pub(crate) fn new(clock: Clock, secret: Option<Secret>, ports: SideChannels) -> Self {
        SideClient { clock, secret, ports, budget: Budget::new(BYTES), limit: Handshake::LIMIT }
    }

    /// Sets the time limit of each answer.
    pub(crate) fn with_limit(self, limit: Duration) -> Self {
        SideClient { limit, ..self }
    }

    /// Performs one handshake: asks for these workers of the peer, one after the other.
    ///
    /// Each error names the setting to change. `TimedOut`, `PeerLost`: nobody answers at the
    /// address. `Authentication`: one end has another secret, or none. Further errors are those of
    /// [`Handshake::new`] and [`Expectation::check`]: another engine id, hash or version; a worker
    /// that does not exist; malformed answers.
    pub(crate) async fn ask(
        &self,
        peer: &RemoteEngine,
        ranks: &[WorkerRank],
        expectation: Expectation,
    ) -> Result<HandshakeOutcome> {
        let engine = expectation.engine_id.clone();
        let version = expectation.version;
        let sizes = (peer.pp_size, peer.tp_size);
        // For the state machine, both questions to a kvx peer are one. Each has its own limit.
        let handshake = Handshake::new(expectation, ranks.iter().copied(), sizes)?;
        let mut handshake = handshake.with_limit(self.limit * 2);
        let mut standing = None;
        let mut socket: Option<(Address, Client)> = None;
        for rank in ranks {
            let address = self.ports.of(&peer.address, *rank)?;
            let in_context = |error| unanswered(error, &address, &engine);
            if socket.as_ref().is_none_or(|(of, _)| *of != address) {
                drop(socket.take());
                let client = self.connect(&address).await.map_err(in_context)?;
                socket = Some((address.clone(), client));
            }
            let (_, client) = socket.as_mut().expect("connected above");
            let Some(question) = handshake.request(self.clock.now()) else { break };
            let mut answer = client.ask(&question, self.limit).await.map_err(in_context)?;
            let challenge = challenge(&answer)?;
            let this = challenge
                .as_ref()
                .map_or(Ok(PeerKind::Foreign), |challenge| self.standing(challenge))?;
            // All workers have to be of one kind: the proof of the second must not vouch for the
            // metadata of the first.
            if standing.replace(this).is_some_and(|before| before != this) {
                return Err(ErrorKind::Malformed.because(format!(
                    "malformed handshake answers of engine {engine}: some of its workers are \
                     kvx's and some are not: use the same connector for all of them"
                )));
            }
            // Without a secret the first answer is complete, unless it is a refusal meant for vLLM.
            if let Some(challenge) = challenge
                && (this == PeerKind::Proven || refused(&answer).is_some())
            {
                let request = HandshakeRequest::new(*rank, version)?;
                answer = self.ask_as_kvx(client, challenge, request).await.map_err(in_context)?;
            }
            handshake.received(answer.frames(), self.clock.now())?;
        }
        let mut peer = handshake.finish()?;
        let standing = standing.unwrap_or(PeerKind::Foreign);
        if self.secret.is_some() && standing != PeerKind::Proven {
            for metadata in peer.workers.values_mut() {
                metadata.kvx_metadata = None;
            }
        }
        Ok(HandshakeOutcome { peer, standing })
    }

    /// Asks the side channel at an address for one worker, and expects nothing of the answer.
    ///
    /// Errors: nobody answers, or the answer is malformed.
    pub(crate) async fn look(
        &self,
        address: &Address,
        rank: WorkerRank,
        version: Version,
    ) -> Result<ProbeAnswer> {
        let mut client = self.connect(address).await?;
        let request = HandshakeRequest::new(rank, version)?;
        let began = Instant::now();
        let mut answer = client.ask(&request.encode(), self.limit).await?;
        let round_trip = began.elapsed();
        let challenge = challenge(&answer)?;
        let standing = match &challenge {
            None => Ok(PeerKind::Foreign),
            Some(challenge) => self.standing(challenge),
        };
        if let (Some(challenge), Ok(standing)) = (challenge, &standing)
            && (*standing == PeerKind::Proven || refused(&answer).is_some())
        {
            answer = self.ask_as_kvx(&mut client, challenge, request).await?;
        }
        let payload =
            HandshakePayload::decode(answer.frames().first().map_or(&[][..], Vec::as_slice))?;
        Ok(ProbeAnswer { payload, standing, round_trip })
    }

    async fn connect(&self, address: &Address) -> Result<Client> {
        let addresses = resolve(&address.host, address.port, self.limit).await?;
        Client::connect(SocketType::Req, &addresses, ANSWER, &self.budget, self.limit).await
    }

    fn standing(&self, challenge: &KvxChallenge) -> Result<PeerKind> {
        match (&self.secret, challenge.secret) {
            (None, false) => Ok(PeerKind::Kvx),
            (Some(_), true) => Ok(PeerKind::Proven),
            (None, true) => Err(proof::denied(
                "the prefill has a shared secret and this engine has none: set KVX_SECRET_FILE \
                 here to the same secret",
            )),
            (Some(_), false) => Err(proof::denied(
                "this engine has a shared secret and the prefill has none: set KVX_SECRET_FILE of \
                 both to the same secret, or of neither",
            )),
        }
    }

    async fn ask_as_kvx(
        &self,
        client: &mut Client,
        challenge: KvxChallenge,
        request: HandshakeRequest,
    ) -> Result<Message> {
        let secret = self.secret.as_ref();
        let request = KvxRequest { request, nonce: kvx_core::backend::random_key()?, proof: None };
        let request = proof::prove_question(secret, &challenge, request);
        let answer = client.ask(&request.encode(), self.limit).await?;
        let Some(secret) = secret else { return Ok(answer) };
        let payload =
            HandshakePayload::decode(answer.frames().first().map_or(&[][..], Vec::as_slice))?;
        match payload.refusal.as_ref().filter(|_| payload.kvx_proof.is_none()) {
            // A peer with the same secret proves its refusals too, so this one has another secret.
            Some(why) => Err(ErrorKind::Authentication
                .because(format!("the prefill refused this engine: {why}"))),
            None => proof::check_answer(secret, &challenge, &request, &payload).map(|()| answer),
        }
    }
}

/// Returns the challenge in an answer, if a kvx engine has sent it.
fn challenge(answer: &Message) -> Result<Option<KvxChallenge>> {
    // The state machine reports answers that cannot be decoded.
    let payload = answer.frames().first().and_then(|frame| HandshakePayload::decode(frame).ok());
    payload
        .and_then(|payload| payload.kvx_challenge)
        .map(|challenge| KvxChallenge::decode(&challenge))
        .transpose()
}

fn refused(answer: &Message) -> Option<String> {
    HandshakePayload::decode(answer.frames().first()?).ok()?.refusal
}

/// Adds the address to an error, and what to set if nobody answered.
fn unanswered(error: Error, address: &Address, engine: &str) -> Error {
    let Address { host, port } = address;
    let there = format!("the side channel of engine {engine} at {host} port {port}");
    let cure = match error.kind() {
        ErrorKind::PeerLost | ErrorKind::TimedOut if is_loopback(host) => {
            "; that is this machine: if the engine is on another one, set \
             VLLM_NIXL_SIDE_CHANNEL_HOST there to an address that can be reached from here (TCP \
             listens there too, unless kv_connector_extra_config.tcp.bind names another address)"
        }
        ErrorKind::PeerLost | ErrorKind::TimedOut => {
            "; the instance is down, its listener has ended, or a firewall drops the packets: \
             restart it, check VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT there, \
             or run `kvx probe`"
        }
        _ => "",
    };
    Error::new(error.kind(), format!("{there}: {}{cure}", error.sentence()))
}

/// Converts an error to the form that the worker takes.
pub(crate) fn handshake_failure(error: &Error) -> HandshakeFailure {
    let unanswered = matches!(
        error.kind(),
        ErrorKind::TimedOut | ErrorKind::PeerLost | ErrorKind::Malformed | ErrorKind::Native
    );
    HandshakeFailure { setup: !unanswered, error: error.to_string() }
}
