//! The server of a side channel.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, ErrorKind, Result, Secret};
use tokio::net::TcpListener;

use super::super::clock::Clock;
use super::super::refusal_log::RefusalLog;
use super::super::zmtp::{Handler, MessageLimits, PeerLimits, Router, RouterLimits, resolve};
use super::{SideSettings, proof};
use kvx_vllm::engine::{Address, WorkerRank};
use kvx_vllm::wire::{
    CompatibilityHash, HandshakePayload, KvxChallenge, KvxRequest, Listener, NixlAgentMetadata,
};

/// The longest question has some 100 bytes, after an identity of up to 255.
const QUESTION: MessageLimits = MessageLimits { frames: 16, bytes: 4 << 10 };

/// The limits for peers: 512 silent ones take less than 1 MiB, 512 with a whole question each 4
/// MiB.
const PEERS: PeerLimits = PeerLimits { connections: 512, message: QUESTION, bytes: 4 << 20 };

/// The limits for all connections, of which each serves one handshake. Peers that do not read their
/// answers take as much as two of the longest answers.
const LIMITS: RouterLimits = RouterLimits {
    unauthenticated: PEERS,
    authenticated: PEERS,
    answers: 2 * HandshakePayload::MAX_LEN,
    patience: Duration::from_secs(5),
};

/// A side channel that listens until it is dropped.
#[derive(Debug)]
pub(crate) struct SideServer {
    address: Address,
    handler: Arc<SideHandler>,
    routers: Vec<Router>,
}

/// The source of the answers.
#[derive(Debug)]
struct SideHandler {
    clock: Clock,
    secret: Option<Secret>,
    told: Mutex<SideListeners>,
    /// Limits the log lines about kvx decodes without a valid proof.
    refusals: RefusalLog,
    /// Limits the log lines about other refused handshakes.
    handshakes: Arc<RefusalLog>,
}

#[derive(Debug)]
struct SideListeners {
    /// The answers to questions in vLLM's form.
    anybody: Listener,
    /// The answers to kvx decodes. With a secret, only to those that have proved it.
    invited: Listener,
}

impl SideServer {
    /// Listens, on tasks of the current runtime. `clock` is that of the engine's `Scheduler`.
    ///
    /// Errors: `Exhausted`: the port is taken, and the error names the variable to set and a free
    /// port; `Invalid`: the host is not of this machine.
    pub(crate) async fn bind(
        settings: &SideSettings,
        hash: CompatibilityHash,
        clock: Clock,
    ) -> Result<Self> {
        for warning in &settings.warnings {
            tracing::warn!("{warning}");
        }
        let told =
            SideListeners { anybody: Listener::new(hash.clone()), invited: Listener::new(hash) };
        let handler = Arc::new(SideHandler {
            clock,
            secret: settings.secret.clone(),
            told: Mutex::new(told),
            refusals: RefusalLog::default(),
            handshakes: Arc::default(),
        });
        let mut routers = Vec::new();
        for port in &settings.ports {
            let listener = listen(settings, *port).await?;
            routers.push(Router::serve(listener, LIMITS, Arc::clone(&handler))?);
        }
        let first = routers
            .first()
            .ok_or_else(|| ErrorKind::Invalid.because("a side channel without a port"))?;
        let address = Address { host: Arc::clone(&settings.advertise), port: first.local().port() };
        let server = SideServer { address, handler, routers };
        let at: Vec<_> = server.listens_at().collect();
        let secret = settings.secret.is_some();
        tracing::info!(?at, advertised = %server.address.host, secret, "the side channel listens");
        Ok(server)
    }

    /// Returns the address for parameters: the host that peers connect to, and the port of the
    /// engine or of its first worker.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Yields the addresses where it listens.
    pub(crate) fn listens_at(&self) -> impl Iterator<Item = SocketAddr> {
        self.routers.iter().map(Router::local)
    }

    /// Sets the answer for a worker, with the worker's `kvx_metadata` in it. Without
    /// `agent_metadata`, the blob of a NIXL agent, decodes of vLLM get an error that says why.
    /// Returns the registration generation, which the `Scheduler` needs.
    pub(crate) fn publish(&self, rank: WorkerRank, metadata: &NixlAgentMetadata) -> u64 {
        let mut told = self.handler.told.lock();
        told.invited.publish(rank, metadata);
        if metadata.agent_metadata.is_empty() {
            told.anybody.refuse(
                rank,
                ErrorKind::Unsupported.because(
                    "this engine has no NIXL agent that a vLLM could load from: add RIXL to its \
                     kv_connector_extra_config.backends, and check that `kvx backends` finds \
                     NIXL's library; or add KVX, if vLLM's NIXL has that backend",
                ),
            );
        } else if self.handler.secret.is_some() {
            let mut open = metadata.clone();
            open.kvx_metadata = None;
            told.anybody.publish(rank, &open);
        } else {
            told.anybody.publish(rank, metadata);
        }
        told.invited.registration_generation()
    }

    /// Removes the answer for a worker. Returns the registration generation.
    pub(crate) fn withdraw(&self, rank: WorkerRank) -> u64 {
        let mut told = self.handler.told.lock();
        told.anybody.withdraw(rank);
        told.invited.withdraw(rank);
        told.invited.registration_generation()
    }

    #[cfg(test)]
    pub(super) fn connections(&self) -> usize {
        self.routers.iter().map(Router::connections).sum()
    }
}

/// Opens the port of a side channel, at the first address of its host, where ZeroMQ would bind.
async fn listen(settings: &SideSettings, port: u16) -> Result<TcpListener> {
    let host = &settings.bind;
    let addresses =
        resolve(host, port, LIMITS.patience).await.map_err(|error| foreign_host(host, &error))?;
    let address = addresses[0];
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            Err(busy(address, settings.ports.len()).await)
        }
        Err(error) if error.kind() == std::io::ErrorKind::AddrNotAvailable => {
            Err(foreign_host(host, &error))
        }
        Err(error) => Err(Error::os(format!("the side channel cannot listen at {address}"), error)),
    }
}

fn foreign_host(host: &str, why: &dyn std::fmt::Display) -> Error {
    ErrorKind::Invalid.because(format!(
        "the side channel cannot listen at {host:?}, which is not an address of this machine \
         ({why}): set VLLM_NIXL_SIDE_CHANNEL_HOST to one, or \
         kv_connector_extra_config.side_channel_bind to the one to listen at and the variable to \
         the one that peers can reach"
    ))
}

async fn busy(taken: SocketAddr, ports: usize) -> Error {
    let mut free = None;
    for base in (taken.port()..=u16::MAX).step_by(ports.max(1)).skip(1).take(64) {
        let mut open = Vec::new();
        for port in base..=base.saturating_add(ports as u16 - 1) {
            open.extend(TcpListener::bind(SocketAddr::new(taken.ip(), port)).await);
        }
        if open.len() == ports {
            free = Some(base);
            break;
        }
    }
    let free = free.map_or("a free port".to_owned(), |free| format!("a free port, such as {free}"));
    ErrorKind::Exhausted.because(format!(
        "port {} of {} is taken, so the side channel cannot listen there; another engine may \
         have it: set VLLM_NIXL_SIDE_CHANNEL_PORT to {free} (data-parallel ranks use the ports \
         after it)",
        taken.port(),
        taken.ip()
    ))
}

/// The state of a connection: a challenge for one question, and a refusal that is not logged yet.
#[derive(Debug, Default)]
pub(crate) struct Session {
    challenge: Option<[u8; 32]>,
    /// The refusal of a question in vLLM's form, and the limit of its log lines. A kvx decode asks
    /// again, in kvx's form, on the same connection.
    refused: Option<(Error, Arc<RefusalLog>)>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some((refusal, log)) = &self.refused {
            log_refusal(log, refusal);
        }
    }
}

fn log_refusal(log: &RefusalLog, refusal: &Error) {
    if let Some(suppressed) = log.count() {
        tracing::info!(%refusal, suppressed, "a handshake was refused");
    }
}

impl Handler for SideHandler {
    type Session = Session;

    fn answer(&self, session: &mut Session, message: &[Vec<u8>]) -> Option<Vec<Arc<[u8]>>> {
        let answered = match message.last() {
            Some(question) if KvxRequest::is_one(question) => {
                session.refused = None;
                self.answer_kvx(session.challenge.take(), message, question)
            }
            _ => self.answer_anybody(session, message),
        };
        match answered {
            Ok(frames) => Some(frames),
            Err(error) => {
                tracing::debug!(%error, "a message to the side channel got no answer");
                None
            }
        }
    }
}

impl SideHandler {
    fn answer_anybody(&self, session: &mut Session, message: &[Vec<u8>]) -> Result<Vec<Arc<[u8]>>> {
        let nonce = kvx_core::backend::random_key()?;
        let reply = self.told.lock().anybody.answer(message, self.clock.now())?;
        session.refused =
            reply.refusal().map(|refusal| (refusal.clone(), Arc::clone(&self.handshakes)));
        let mut payload = HandshakePayload::decode(reply.payload())?;
        payload.kvx_challenge =
            Some(KvxChallenge { secret: self.secret.is_some(), nonce }.encode());
        session.challenge = Some(nonce);
        Ok(reply.with_payload(&payload).frames().map(Arc::from).collect())
    }

    fn answer_kvx(
        &self,
        challenge: Option<[u8; 32]>,
        message: &[Vec<u8>],
        question: &[u8],
    ) -> Result<Vec<Arc<[u8]>>> {
        let asked = KvxRequest::decode(question).and_then(|request| {
            proof::check_question(self.secret.as_ref(), challenge, &request).map(|()| request)
        });
        let request = match asked {
            Ok(request) => request,
            Err(refusal) => {
                if let Some(suppressed) = self.refusals.count() {
                    tracing::warn!(%refusal, suppressed, "the side channel refused a kvx decode");
                }
                let told = self.told.lock();
                let reply = told.invited.answer_with(message, self.clock.now(), Err(refusal))?;
                return Ok(reply.frames().map(Arc::from).collect());
            }
        };
        let (now, asked) = (self.clock.now(), Ok(request.request));
        let reply = self.told.lock().invited.answer_with(message, now, asked)?;
        if let Some(refusal) = reply.refusal() {
            log_refusal(&self.handshakes, refusal);
        }
        let (Some(secret), Some(challenge)) = (&self.secret, &challenge) else {
            return Ok(reply.frames().map(Arc::from).collect());
        };
        let mut payload = HandshakePayload::decode(reply.payload())?;
        payload.kvx_proof = Some(proof::prove_answer(secret, challenge, &request, &payload));
        Ok(reply.with_payload(&payload).frames().map(Arc::from).collect())
    }
}
