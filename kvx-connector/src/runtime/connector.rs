//! The connector of one engine, by the names of vLLM's `KVConnectorBase_V1`.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvx_config::KvTransferConfig;
use kvx_core::{Completion, Deadline, Error, ErrorKind, Registry, Result};

use super::builder::ConnectorBuilder;
use super::group::JoinAddress;
use super::rank::Rank;
use super::state::Shared;
use crate::engine::{
    Address, Allocation, Arrival, BlockLists, Ending, EngineId, Finished, Matched, NotLoaded,
    Outcome, RequestId, Settings, Time, WorkerRank,
};
use crate::wire::CompatibilityFactors;

/// How long a connector that is dropped without a shutdown takes to end what it has begun.
const AT_DROP: Duration = Duration::from_secs(1);

/// The connector of one engine. Cheap to clone; it ends with [`shutdown`](Self::shutdown), or with its last clone.
///
/// The calls of a step loop have the names of vLLM's `KVConnectorBase_V1`, return at once and wait for nothing, but for
/// [`request_finished`](Self::request_finished) with `kvx_digest`, or where blocks are copied to the host:
///
/// 1. [`on_new_request`](Self::on_new_request) when a request arrives; when it is admitted
///    [`get_num_new_matched_tokens`](Self::get_num_new_matched_tokens), blocks for it, and
///    [`update_state_after_alloc`](Self::update_state_after_alloc).
/// 2. [`step`](Self::step) once a step, and then [`Rank::start_load_kv`] on each worker.
/// 3. [`outcomes`](Self::outcomes), and what they ask for.
/// 4. [`request_finished`](Self::request_finished) for requests that end.
///
/// An idle engine sleeps in [`outcomes_ready`](Self::outcomes_ready). What need not wait for a step (leases, heartbeats, deadlines, peers
/// that fetch) goes on without it. Blocks are checked by their generations at both ends, and the engine has nothing to
/// do for it.
#[derive(Clone)]
pub struct Connector(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        drop(self.shared.shutdown(AT_DROP.into()));
    }
}

impl Connector {
    /// Begins a connector of this configuration, over the backends of `registry`. `model` is what this engine and its
    /// peers must have in common: a peer whose handshake says otherwise is refused.
    pub fn builder(
        config: &KvTransferConfig,
        registry: Registry,
        model: CompatibilityFactors,
    ) -> ConnectorBuilder {
        ConnectorBuilder::new(config, registry, model)
    }

    pub(super) fn of(shared: Arc<Shared>) -> Self {
        Connector(Arc::new(Handle { shared }))
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// The name under which peers know this engine.
    pub fn engine_id(&self) -> &EngineId {
        &self.settings().engine
    }

    /// Where its side channel listens, as peers are told.
    pub fn address(&self) -> &Address {
        &self.settings().address
    }

    /// What it was built with.
    pub fn settings(&self) -> &Settings {
        &self.shared().setup.settings
    }

    /// A moment on the clock that times of requests are on.
    pub fn time(&self, deadline: impl Into<Deadline>) -> Time {
        let left = deadline.into().left();
        self.shared().clock.now() + left
    }

    /// A worker of this engine, to register its caches. Errors: `Invalid` for one that it does not have.
    pub fn rank(&self, rank: WorkerRank) -> Result<Rank> {
        if self.shared().has_rank(rank) {
            return Ok(Rank { connector: self.clone(), rank });
        }
        let Settings { tp_size, pp_size, .. } = self.settings();
        Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "there is no worker pp {} tp {}: the connector was built for {pp_size} x {tp_size}, see \
                 ConnectorBuilder::workers",
                rank.pp, rank.tp
            ),
        ))
    }

    /// Lets the workers that have not registered their caches here run in processes of their own, each of which joins
    /// at this path, a Unix socket, by [`Rank::join`]. Peers hear of all of them when the last has registered its
    /// caches: the completion is `Ok` then, and until then nothing is published or loaded.
    ///
    /// What the engine does stays as it is: [`step`](Self::step) and [`Rank::start_load_kv`] are called here, for these
    /// ranks too. One that ends, or of which nothing is heard for 10 s, ends the loads of the engine: each fails with
    /// [`LoadFailure::Rank`](crate::engine::LoadFailure::Rank), which names it, and no other begins. So does one that
    /// is not there at the deadline, one that is started twice, and one that the engine does not have.
    ///
    /// # Errors
    /// `Unsupported` for a MooncakeConnector; `Invalid` when all workers have their caches, or
    /// ranks join already; `Exhausted` for a path that is in use; what the system says of it. Later `TimedOut`,
    /// `PeerLost` and `Invalid`: a rank did not come, has gone, or was started twice.
    pub fn group(&self, path: impl AsRef<Path>, deadline: impl Into<Deadline>) -> Completion<()> {
        self.shared().group(JoinAddress::Path(path.as_ref().to_owned()), deadline.into())
    }

    /// As [`group`](Self::group), for ranks on other hosts too: each joins by [`Rank::join_over_tcp`]. Both ends prove
    /// to each other that they have the fleet's secret (`KVX_SECRET_FILE`), and seal what they say. At `0.0.0.0` ranks
    /// come in by any address of this host.
    ///
    /// Two things are other than with ranks of one host. Blocks whose lease is taken back ([`Lease`](super::Lease)
    /// dropped) are the engine's when [`outcomes`](Self::outcomes) says `Free`, after a word to each of these ranks and
    /// back. And nobody can prove that a rank has died unless it has said so: what it kept or filled is `Lost`.
    ///
    /// # Errors
    /// As [`group`](Self::group); `Invalid` without a secret, and for port 0.
    pub fn group_over_tcp(
        &self,
        address: SocketAddr,
        deadline: impl Into<Deadline>,
    ) -> Completion<()> {
        self.shared().group(JoinAddress::Tcp(address), deadline.into())
    }

    /// A request has arrived. From now on a peer that keeps its blocks is told that they are wanted.
    ///
    /// # Errors
    /// The parameters cannot be used; the request is computed here, as if it had none.
    pub fn on_new_request(&self, arrival: Arrival<'_>) -> Result<(), NotLoaded> {
        self.shared().on_new_request(arrival, |_| ())
    }

    /// How many tokens beyond `computed` can be loaded. Changes nothing: it may be asked again.
    pub fn get_num_new_matched_tokens(&self, request: &RequestId, computed: u32) -> Matched {
        self.shared().matched(request, computed)
    }

    /// Blocks were given to a request: its load is ordered for the next [`step`](Self::step). A second call for the
    /// same load changes nothing.
    ///
    /// # Errors
    /// `Invalid` for another number of lists than KV cache groups, and if no caches are registered; `OutOfBounds` for
    /// blocks beyond them; `PeerLost`: a rank of this engine has not joined, or is lost. Nothing is ordered then, and
    /// no outcome comes: compute the prompt here, or fail the request.
    pub fn update_state_after_alloc(
        &self,
        request: &RequestId,
        allocation: Allocation,
    ) -> Result<()> {
        self.shared().allocated(request, allocation)
    }

    /// The end of a step: what it has ordered goes to the workers, which begin it at their
    /// [`start_load_kv`](Rank::start_load_kv).
    pub fn step(&self) {
        self.shared().step();
    }

    /// What has become of loads and of kept blocks since the last call, but of those that [`Prefill`](super::Prefill)
    /// and [`Decode`](super::Decode) wait for.
    pub fn outcomes(&self) -> Vec<Outcome> {
        self.shared().outcomes()
    }

    /// Ends when there are [`outcomes`](Self::outcomes), or the connector was shut down. Under any executor.
    pub async fn outcomes_ready(&self) {
        loop {
            let rung = self.shared().news.notified();
            let mut rung = std::pin::pin!(rung);
            rung.as_mut().enable();
            if self.shared().has_news() {
                return;
            }
            rung.await;
        }
    }

    /// As [`outcomes_ready`](Self::outcomes_ready), without a runtime: blocks until then or until the deadline, and says which it was.
    pub fn wait(&self, deadline: impl Into<Deadline>) -> bool {
        self.shared().wait(deadline.into())
    }

    /// So many tokens of a request are computed, on all workers: the devices have ended that work, and the blocks stay
    /// as they are until the request ends or is [preempted](Self::preempted). `blocks` are its lists from the first
    /// token on, as [`request_finished`](Self::request_finished) takes them. To be called for each chunk of a long
    /// prompt: where peers see copies of the caches in memory of the host (`kv_buffer_device: cpu`), its whole blocks
    /// are copied while the next chunk is computed, and `request_finished` waits for the rest alone. Otherwise, and for
    /// requests of which nothing is kept for a peer, it does nothing. Does not wait.
    pub fn computed(&self, request: &RequestId, blocks: &BlockLists, tokens: u32) {
        self.shared().computed(request, blocks, tokens);
    }

    /// Blocks of a request go to others before it ends. What was [computed](Self::computed) of it counts no more.
    pub fn preempted(&self, request: &RequestId) {
        self.shared().preempted(request);
    }

    /// A request has ended, in whatever state it was. Waits, for 30 s at most, where blocks that are kept for a peer
    /// are still to be hashed (`kvx_digest`) or copied to the host (`kv_buffer_device: cpu`).
    pub fn request_finished(&self, request: &RequestId, ending: Ending) -> Finished {
        self.shared().request_finished(request, ending)
    }

    /// Blocks that nobody waits for, but that a transfer may still touch.
    pub fn blocks_held(&self) -> usize {
        self.shared().blocks_held()
    }

    /// Whether it knows of no request and keeps no blocks.
    pub fn is_idle(&self) -> bool {
        self.shared().is_idle()
    }

    /// Ends everything: loads fail, peers are refused, memory is given back, the thread ends. `Ok`: nothing touches any
    /// block any more.
    ///
    /// # Errors
    /// `StillShared` or `TimedOut`: that could not be proven by the deadline, and memory stays quarantined.
    pub fn shutdown(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        self.shared().shutdown(deadline.into())
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { engine, address, .. } = self.settings();
        write!(f, "Connector({engine:?}, {}:{})", address.host, address.port)
    }
}
