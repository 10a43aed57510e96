//! Releases blocks that a prefill keeps for a decode that will never fetch them.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::random_number;
use kvx_core::backend::sync::Mutex;
use kvx_core::{Agent, Error, ErrorKind, Options, Peer, Registry, Result, Secret};
use serde_json::{Map, json};
use tokio::sync::watch;
use tokio::time::timeout;

use super::clock::Clock;
use super::handshake::link;
use super::setup::RIXL;
use super::side::{PeerKind, SideClient};
use crate::nixl::NixlPeer;
use kvx_vllm::Version;
use kvx_vllm::engine::{Address, ParamsTrust, SideChannels, WorkerRank};
use kvx_vllm::ids::MAX_RANKS;
use kvx_vllm::params::{RemoteBlocks, TransferMode};
use kvx_vllm::wire::{EngineNotification, NixlAgentMetadata};

/// The most engines to stay connected with. The one that was used the longest ago is dropped for a
/// new one.
const MAX_ENGINES: usize = 256;
/// The longest request id, engine id or host, in bytes.
const MAX_TEXT_LEN: usize = 1024;
/// The time for which a proof is valid.
const PROOF_VALID_FOR: Duration = Duration::from_secs(60);
/// The time for which an error that a new attempt would only repeat is returned without one.
const RETRY_PAUSE: Duration = Duration::from_secs(30);

/// A client of prefill engines that releases blocks which no decode will fetch.
///
/// It asks the side channel of an engine as a decode does, and sends each worker the notification
/// that ends the lease. For vLLM, that is the one with which a decode reports a complete load.
/// Engines of kvx get a release, which has a proof if the fleet has a secret. vLLM is reached over
/// the backend `RIXL`, or over any other one if its NIXL has the backend KVX.
///
/// Release blocks only if no decode has accepted a request for them: the engine reuses them at
/// once, and a decode that still reads would get another request's data.
///
/// ```
/// # mod kvx {
/// #     pub use {kvx_connector as connector, kvx_core::*};
/// #     pub fn registry() -> Registry { Registry::new() }
/// # }
/// use kvx::connector::{Releaser, TransferParams};
///
/// # async fn example(answer: &serde_json::Value) -> Result<(), Box<dyn std::error::Error>> {
/// let releaser = Releaser::new(kvx::registry(), ["SHM", "TCP"], None);
/// // answer: that of a prefill, whose decode was given up. In a runtime of tokio:
/// let params = TransferParams::from_value(&answer["kv_transfer_params"])?;
/// releaser.release(&params.remote_blocks()?, params.version()).await?;
/// # Ok(())
/// # }
/// ```
pub struct Releaser {
    registry: Registry,
    backends: Vec<String>,
    secret: Option<Secret>,
    trust: ParamsTrust,
    side: SideClient,
    /// The last opening of the agent.
    opening: Mutex<Option<watch::Receiver<Opening>>>,
    engines: Mutex<Engines>,
}

/// The engines that were released at, by the addresses of their side channels.
#[derive(Default)]
struct Engines {
    slots: HashMap<Address, Slot>,
    uses: u64,
}

struct Slot {
    /// The lock is held while a connection is made, so that others wait for it.
    engine: Arc<tokio::sync::Mutex<Connection>>,
    last_use: u64,
}

/// The connection to the engine at an address.
#[derive(Default)]
enum Connection {
    #[default]
    None,
    Up(Arc<ConnectedEngine>),
    /// The engine of this id cannot be reached, or refuses this client. The next attempt is made
    /// [`RETRY_PAUSE`] later.
    Refused {
        engine: String,
        error: Error,
        at: Instant,
    },
}

/// The result of opening the agent, and when it ended. `None`: it continues.
type Opening = Option<(Result<Agent>, Instant)>;

/// The workers of an engine.
struct ConnectedEngine {
    id: String,
    workers: Vec<Peer>,
    /// True if it is kvx, so that it knows the message of a release.
    is_kvx: bool,
}

impl fmt::Debug for Releaser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Releaser").field("backends", &self.backends).finish_non_exhaustive()
    }
}

impl Releaser {
    /// The time limit of a release, with the connection to a new engine.
    pub const LIMIT: Duration = Duration::from_secs(5);

    /// Creates a client that reaches engines over these backends. It opens them at the first
    /// release. A secret does not prevent opening `RIXL`, which cannot prove one, if it is named
    /// here.
    pub fn new<S: Into<String>>(
        registry: Registry,
        backends: impl IntoIterator<Item = S>,
        secret: Option<Secret>,
    ) -> Self {
        let side = SideClient::new(Clock::new(), secret.clone(), SideChannels::OfEngine);
        Releaser {
            registry,
            backends: backends.into_iter().map(Into::into).collect(),
            trust: ParamsTrust::new::<String>(secret.as_ref(), []),
            secret,
            side: side.with_limit(Self::LIMIT),
            opening: Mutex::default(),
            engines: Mutex::default(),
        }
    }

    /// Releases blocks within [`LIMIT`](Self::LIMIT), in a runtime of tokio. `version` is one whose
    /// side channel the engine has: see [`TransferParams::version`](crate::TransferParams::version).
    /// An engine that does not know the request, or not any more, ignores the release. The backends
    /// are opened in the background: while this takes longer than the limit, releases fail. An error
    /// of the opening, and `NoRoute` and `Authentication` of an engine, are returned for 30 s
    /// without another attempt.
    ///
    /// # Errors
    /// - `TimedOut`, `PeerLost`: the engine does not answer, or the backends are still being opened.
    /// - `PeerRestarted`: another engine answers at the address, so the blocks are gone.
    /// - `Authentication`: only one of the two has a secret, or the secrets differ.
    /// - `NoRoute`: no backend reaches the engine.
    /// - `Unsupported`: the blocks are pushed.
    /// - Further errors as [`probe`](crate::probe).
    pub async fn release(&self, blocks: &RemoteBlocks, version: Version) -> Result<()> {
        let late = || {
            ErrorKind::TimedOut
                .because(format!("the blocks were not released within {:?}", Self::LIMIT))
        };
        timeout(Self::LIMIT, self.try_release(blocks, version)).await.map_err(|_| late())?
    }

    async fn try_release(&self, blocks: &RemoteBlocks, version: Version) -> Result<()> {
        if blocks.mode == TransferMode::Push {
            return Err(ErrorKind::Unsupported.because(
                "blocks that are pushed are not released by a notification: the prefill frees them \
                 when its own time limit ends",
            ));
        }
        let texts = [&blocks.engine_id, &blocks.request_id, &blocks.host];
        if texts.iter().any(|text| text.len() > MAX_TEXT_LEN) {
            return Err(ErrorKind::Exhausted.because(format!(
                "the parameters have an id or a host of more than {MAX_TEXT_LEN} bytes"
            )));
        }
        let slot = self.slot(blocks);
        let mut may_retry = true;
        loop {
            let (engine, is_new) = self.connected(&slot, blocks, version).await?;
            match self.notify(&engine, &blocks.request_id).await {
                Ok(()) => return Ok(()),
                // The engine may have restarted since.
                Err(error) if !is_new && may_retry && may_have_restarted(error.kind()) => {
                    may_retry = false;
                }
                Err(error) => return Err(error),
            }
            let known = &mut *slot.lock().await;
            if matches!(known, Connection::Up(known) if Arc::ptr_eq(known, &engine)) {
                *known = Connection::None;
            }
        }
    }

    /// Returns the slot of an engine, and drops that of another one if there are too many.
    fn slot(&self, blocks: &RemoteBlocks) -> Arc<tokio::sync::Mutex<Connection>> {
        let address = Address { host: blocks.host.as_str().into(), port: blocks.port };
        let engines = &mut *self.engines.lock();
        engines.uses += 1;
        let oldest = engines.slots.iter().min_by_key(|(_, slot)| slot.last_use);
        if engines.slots.len() >= MAX_ENGINES
            && !engines.slots.contains_key(&address)
            && let Some(oldest) = oldest.map(|(address, _)| address.clone())
        {
            engines.slots.remove(&oldest);
        }
        let slot = engines
            .slots
            .entry(address)
            .or_insert_with(|| Slot { engine: Arc::default(), last_use: 0 });
        slot.last_use = engines.uses;
        Arc::clone(&slot.engine)
    }

    /// Returns the connection to an engine, and whether it is new.
    async fn connected(
        &self,
        slot: &tokio::sync::Mutex<Connection>,
        blocks: &RemoteBlocks,
        version: Version,
    ) -> Result<(Arc<ConnectedEngine>, bool)> {
        let mut known = slot.lock().await;
        match &*known {
            Connection::Up(engine)
                if engine.id == blocks.engine_id
                    && engine.workers.iter().all(|one| one.lost().is_none()) =>
            {
                return Ok((Arc::clone(engine), false));
            }
            Connection::Refused { engine, error, at }
                if *engine == blocks.engine_id && at.elapsed() < RETRY_PAUSE =>
            {
                return Err(error.clone());
            }
            Connection::None | Connection::Up(_) | Connection::Refused { .. } => {}
        }
        *known = Connection::None;
        let agent = self.agent().await?;
        match self.connect(&agent, blocks, version).await {
            Ok(engine) => {
                let engine = Arc::new(engine);
                *known = Connection::Up(Arc::clone(&engine));
                Ok((engine, true))
            }
            Err(error) => {
                if matches!(error.kind(), ErrorKind::NoRoute | ErrorKind::Authentication) {
                    let (engine, error) = (blocks.engine_id.clone(), error.clone());
                    *known = Connection::Refused { engine, error, at: Instant::now() };
                }
                Err(error)
            }
        }
    }

    /// Connects to all workers of an engine: each has to release its part of the blocks.
    async fn connect(
        &self,
        agent: &Agent,
        blocks: &RemoteBlocks,
        version: Version,
    ) -> Result<ConnectedEngine> {
        let workers = u64::from(blocks.pp_size) * u64::from(blocks.tp_size);
        if workers == 0 || workers > u64::from(MAX_RANKS) {
            return Err(ErrorKind::Invalid.because(format!(
                "the parameters name {} pipeline ranks of {} workers each; at least 1 and at most \
                 {MAX_RANKS} workers are supported",
                blocks.pp_size, blocks.tp_size
            )));
        }
        let mut engine =
            ConnectedEngine { id: blocks.engine_id.clone(), workers: Vec::new(), is_kvx: true };
        for pp in 0..blocks.pp_size {
            for tp in 0..blocks.tp_size {
                let rank = WorkerRank { pp, tp };
                let (peer, kind) = self.worker(agent, blocks, rank, version).await?;
                engine.workers.push(peer);
                engine.is_kvx &= kind != PeerKind::Foreign;
            }
        }
        Ok(engine)
    }

    async fn worker(
        &self,
        agent: &Agent,
        blocks: &RemoteBlocks,
        rank: WorkerRank,
        version: Version,
    ) -> Result<(Peer, PeerKind)> {
        let address = Address { host: blocks.host.as_str().into(), port: blocks.port };
        let answer = self.side.look(&address, rank, version).await?;
        let kind = answer.standing?;
        if let Some(why) = &answer.payload.refusal {
            return Err(
                ErrorKind::Invalid.because(format!("the engine refuses the handshake: {why}"))
            );
        }
        let metadata = NixlAgentMetadata::decode(&answer.payload.agent_metadata_bytes, version)?;
        if metadata.engine_id != blocks.engine_id {
            return Err(ErrorKind::PeerRestarted.because(format!(
                "engine {} answers in place of {}, whose blocks are gone",
                metadata.engine_id, blocks.engine_id
            )));
        }
        // With a secret, only an engine that has proved it names kvx agents.
        let trusted = self.secret.is_none() || kind == PeerKind::Proven;
        let peer = match metadata.kvx_metadata.filter(|_| trusted) {
            Some(bytes) => agent.connect(bytes),
            None if NixlPeer::is_offered(&metadata.agent_metadata) => {
                NixlPeer::connect(agent, &metadata.agent_metadata).map(|nixl| nixl.peer().clone())
            }
            None => agent.connect_foreign(RIXL, &metadata.agent_metadata),
        };
        Ok((link(peer).await?, kind))
    }

    async fn notify(&self, engine: &ConnectedEngine, request: &str) -> Result<()> {
        let notification = if engine.is_kvx {
            let proof = self.trust.sign_release(&engine.id, request, PROOF_VALID_FOR);
            EngineNotification::release(request, proof.unwrap_or_default())?
        } else {
            EngineNotification::done(request, 1)?
        };
        let bytes = notification.encode();
        let sent: Vec<_> =
            engine.workers.iter().map(|worker| worker.notify(&bytes, Self::LIMIT)).collect();
        for sent in sent {
            sent.await?;
        }
        Ok(())
    }

    /// Waits for the agent, which is opened once.
    async fn agent(&self) -> Result<Agent> {
        let mut opening = {
            let last = &mut *self.opening.lock();
            match last.as_ref().filter(|last| !may_open_again(last)) {
                Some(last) => last.clone(),
                None => last.insert(self.open()?).clone(),
            }
        };
        let lost = || ErrorKind::Closed.because("the backends were not opened: the thread ended");
        let opened = opening.wait_for(Option::is_some).await.map_err(|_| lost())?;
        opened.as_ref().map_or_else(|| Err(lost()), |(result, _)| result.clone())
    }

    /// Opens the agent on its own thread, because that may load libraries and take long.
    fn open(&self) -> Result<watch::Receiver<Opening>> {
        // Two routers of a fleet have different names: an engine would take the second for the
        // first, restarted.
        let name = format!("router-{:016x}", random_number()?);
        let named = self
            .backends
            .iter()
            .filter(|name| self.registry.canonical(name).is_ok_and(|canonical| canonical == RIXL));
        let unauthenticated = json!(named.collect::<Vec<_>>());
        let options = Map::from_iter([("unauthenticated".to_owned(), unauthenticated)]);
        let mut builder = Agent::builder(name)
            .registry(self.registry.clone())
            .backends(self.backends.iter().map(String::as_str))
            .options(Options::from_json(options));
        if let Some(secret) = &self.secret {
            builder = builder.secret(secret.clone());
        }
        let (ended, opening) = watch::channel(None);
        tokio::task::spawn_blocking(move || {
            // An error: the releaser was dropped.
            let _ = ended.send(Some((builder.build(), Instant::now())));
        });
        Ok(opening)
    }
}

/// Returns true if the opening has failed long enough ago, or its thread has ended without a result.
fn may_open_again(opening: &watch::Receiver<Opening>) -> bool {
    let has_ended = opening.has_changed().is_err();
    match &*opening.borrow() {
        Some((Ok(_), _)) => false,
        Some((Err(_), at)) => at.elapsed() >= RETRY_PAUSE,
        None => has_ended,
    }
}

/// Returns true if an engine whose connection fails so may be reached again.
fn may_have_restarted(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::PeerLost | ErrorKind::PeerRestarted | ErrorKind::Native)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent() -> Result<Agent> {
        Err(ErrorKind::Unavailable.because("no such library"))
    }

    #[test]
    fn a_failed_opening_is_repeated_after_a_pause() {
        let (ended, opening) = watch::channel(None);
        assert!(!may_open_again(&opening), "it continues");
        ended.send(Some((agent(), Instant::now()))).unwrap();
        assert!(!may_open_again(&opening), "it has just failed");
        let before = Instant::now().checked_sub(RETRY_PAUSE).expect("the machine runs for longer");
        ended.send(Some((agent(), before))).unwrap();
        assert!(may_open_again(&opening));
        let (ended, opening) = watch::channel(None);
        drop(ended);
        assert!(may_open_again(&opening), "its thread has panicked");
    }

    #[test]
    fn only_errors_of_a_lost_engine_reconnect() {
        let kinds = ErrorKind::ALL.iter().filter(|kind| may_have_restarted(**kind));
        let retried = [ErrorKind::PeerLost, ErrorKind::PeerRestarted, ErrorKind::Native];
        assert_eq!(kinds.copied().collect::<Vec<_>>(), retried);
    }

    /// One release waits in vain for a slow opening, and the next ones use the same.
    #[test]
    fn an_opening_is_shared_and_outlives_the_release_that_began_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let releaser = Releaser::new(Registry::new(), ["TCP"], None);
            let (ended, opening) = watch::channel(None);
            *releaser.opening.lock() = Some(opening);
            let short = Duration::from_millis(10);
            assert!(timeout(short, releaser.agent()).await.is_err(), "it is slow");
            ended.send(Some((agent(), Instant::now()))).unwrap();
            let error = releaser.agent().await.expect_err("its result");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "the shared one, and no new one");
        });
    }
}
