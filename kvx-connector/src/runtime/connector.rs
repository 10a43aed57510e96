//! The connector of one engine, with the method names of vLLM's `KVConnectorBase_V1`.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Completion, Deadline, Result};

use super::outcomes::Outcomes;
use super::shared::Shared;
use super::slot::until;
use super::{copies, requests, shutdown};
use kvx_vllm::engine::{
    Address, Allocation, Arrival, BlockLists, Ending, EngineId, Finished, Matched, NotLoaded,
    Outcome, RequestId, Settings, Time,
};
use kvx_vllm::params::OlderMooncakeParams;

/// How long a connector that is dropped without a shutdown has to end its work.
const AT_DROP: Duration = Duration::from_secs(1);

/// The connector of one engine. Cheap to clone. It ends with [`shutdown`](Self::shutdown), or when
/// its last clone is dropped.
///
/// The calls of a step loop have the names of vLLM's `KVConnectorBase_V1`. They return at once,
/// except [`request_finished`](Self::request_finished), which may block with `kvx_digest` or where
/// blocks are copied to the host:
///
/// 1. [`on_new_request`](Self::on_new_request) when a request arrives. When it is admitted:
///    [`get_num_new_matched_tokens`](Self::get_num_new_matched_tokens), the allocation of blocks,
///    and [`update_state_after_alloc`](Self::update_state_after_alloc).
/// 2. [`step`](Self::step) once a step, then [`Rank::start_load_kv`](super::Rank::start_load_kv) on
///    each worker.
/// 3. [`outcomes`](Self::outcomes), each of which says what the engine does next.
/// 4. [`request_finished`](Self::request_finished) for requests that end.
///
/// An idle engine sleeps in [`outcomes_ready`](Self::outcomes_ready). The connector's own thread
/// serves leases, heartbeats, deadlines and peers that fetch, however long a step takes. Both ends
/// check blocks by their generations, without any call of the engine.
#[derive(Clone)]
pub struct Connector(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        drop(shutdown::request(&self.shared, AT_DROP.into()));
    }
}

impl Connector {
    pub(super) fn of(shared: Arc<Shared>) -> Self {
        Connector(Arc::new(Handle { shared }))
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// Returns the name under which peers know this engine.
    pub fn engine_id(&self) -> &EngineId {
        &self.settings().engine
    }

    /// Returns the address of the side channel, as peers know it.
    pub fn address(&self) -> &Address {
        &self.settings().address
    }

    /// Returns the settings that the connector was built with.
    pub fn settings(&self) -> &Settings {
        &self.shared().setup.settings
    }

    /// Converts a deadline to the connector's clock, which the times of requests use.
    pub fn time(&self, deadline: impl Into<Deadline>) -> Time {
        let left = deadline.into().left();
        self.shared().clock.now() + left
    }

    /// Announces a request. From now on heartbeats renew the lease that a peer holds for its
    /// blocks.
    ///
    /// # Errors
    /// The reason why the parameters cannot be used. The engine computes the prompt itself, as if
    /// the request had no parameters.
    pub fn on_new_request(&self, arrival: Arrival<'_>) -> Result<(), NotLoaded> {
        arrive(self.shared(), arrival, |_| ())
    }

    /// Returns how many tokens beyond `computed` can be loaded. Has no side effects.
    pub fn get_num_new_matched_tokens(&self, request: &RequestId, computed: u32) -> Matched {
        let shared = self.shared();
        let now = shared.clock.now();
        shared.state.lock().scheduler.get_num_new_matched_tokens(now, request, computed)
    }

    /// Orders the load of a request, which has blocks by now, for the next [`step`](Self::step). A
    /// second call for the same load has no effect.
    ///
    /// # Errors
    /// The load is then not ordered and has no outcome: compute the prompt here, or fail the
    /// request.
    ///
    /// - `Invalid`: the number of lists differs from that of the KV cache groups, or a worker has
    ///   no caches registered.
    /// - `OutOfBounds`: a block lies beyond the registered caches.
    /// - `PeerLost`: a rank of this engine has not joined, or is lost.
    pub fn update_state_after_alloc(
        &self,
        request: &RequestId,
        allocation: Allocation,
    ) -> Result<()> {
        let groups = self.settings().groups.len();
        self.shared().with_state(|state, now| {
            if allocation.external > 0 {
                state.check_blocks(&allocation.fill, groups)?;
            }
            state.scheduler.update_state_after_alloc(now, request, allocation);
            Ok(())
        })
    }

    /// Ends a step. The loads that it ordered go to the workers, which start them in
    /// [`start_load_kv`](super::Rank::start_load_kv).
    pub fn step(&self) {
        self.shared().wake_if(|state, now| {
            let passed = state.pass_on_ready(now, None);
            let meta = state.scheduler.build_connector_meta(now);
            if meta.is_empty() {
                return passed;
            }
            state.ranks.iter_mut().for_each(|(_, held)| held.hold(&meta));
            true
        });
    }

    /// Takes the outcomes of loads and of kept blocks since the last call, except those that a
    /// [`Prefill`](super::Prefill) or [`Decode`](super::Decode) handle waits for.
    pub fn outcomes(&self) -> Vec<Outcome> {
        self.shared().state.lock().outcomes.take()
    }

    /// Waits until there are [`outcomes`](Self::outcomes), or the connector was shut down. Runs
    /// under any executor.
    pub async fn outcomes_ready(&self) {
        loop {
            let rung = self.shared().news.notified();
            let mut rung = std::pin::pin!(rung);
            rung.as_mut().enable();
            if self.shared().state.lock().has_news() {
                return;
            }
            rung.await;
        }
    }

    /// Blocks the thread as [`outcomes_ready`](Self::outcomes_ready) waits. Returns false if the
    /// deadline passed first.
    pub fn outcomes_ready_blocking(&self, deadline: impl Into<Deadline>) -> bool {
        let (shared, until) = (self.shared(), until(deadline.into()));
        let mut state = shared.state.lock();
        while !state.has_news() {
            if Instant::now() >= until {
                return false;
            }
            state = shared.news_blocking.wait_until(state, Some(until));
        }
        true
    }

    /// Records that all workers have computed the first `tokens` tokens of a request.
    ///
    /// The devices have ended that work, and the blocks stay unchanged until the request ends or is
    /// [preempted](Self::preempted). `blocks` are the request's lists from the first token on, as
    /// [`request_finished`](Self::request_finished) takes them.
    ///
    /// Call it for each chunk of a long prompt. Where peers see copies of the caches in host memory
    /// (`kv_buffer_device: cpu`), whole blocks are copied while the next chunk is computed, and
    /// `request_finished` waits for the rest only. Otherwise, and for requests that keep no blocks
    /// for a peer, it does nothing. Returns at once.
    pub fn computed(&self, request: &RequestId, blocks: &BlockLists, tokens: u32) {
        copies::computed(self.shared(), request, blocks, tokens);
    }

    /// Records that other requests get the blocks of a request before it ends. Forgets what was
    /// [computed](Self::computed).
    pub fn preempted(&self, request: &RequestId) {
        self.shared().state.lock().saves.forget(request);
    }

    /// Ends a request, in whatever state it is. Blocks for at most 30 s while blocks that are kept
    /// for a peer are hashed (`kvx_digest`) or copied to the host (`kv_buffer_device: cpu`).
    pub fn request_finished(&self, request: &RequestId, ending: Ending) -> Finished {
        requests::finish(self.shared(), request, ending)
    }

    /// Returns the number of blocks of failed loads that a transfer may still touch.
    pub fn blocks_held(&self) -> usize {
        self.shared().state.lock().scheduler.blocks_held()
    }

    /// Returns whether the connector has no requests and keeps no blocks.
    pub fn is_idle(&self) -> bool {
        self.shared().state.lock().is_idle()
    }

    /// Ends the connector. Loads fail, peers are refused, memory is released, and the thread ends.
    /// After `Ok` nothing touches any block any more.
    ///
    /// # Errors
    /// `StillShared` or `TimedOut`: the end could not be proven by the deadline. Memory stays
    /// quarantined.
    pub fn shutdown(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        shutdown::request(self.shared(), deadline.into())
    }
}

/// Handles the arrival of a request. `wait` registers the receiver of its outcome before any
/// outcome can arise.
pub(super) fn arrive<T>(
    shared: &Shared,
    arrival: Arrival<'_>,
    wait: impl FnOnce(&mut Outcomes) -> T,
) -> Result<T, NotLoaded> {
    let settings = &shared.setup.settings;
    let mut unsigned = None;
    let arrived = shared.with_state(|state, now| {
        if state.is_closing() {
            return Err(NotLoaded::Closed);
        }
        let request = arrival.request;
        match (arrival.params, &settings.mooncake) {
            (None, _) | (_, None) => state.scheduler.on_new_request(now, arrival),
            (Some(params), Some(mooncake)) if mooncake.is_older() => {
                let params = OlderMooncakeParams::from_params(params).map_err(NotLoaded::Params)?;
                state.scheduler.on_new_older_transfer(arrival, &params)
            }
            (Some(params), Some(_)) => {
                let params = params.mooncake().map_err(NotLoaded::Params)?;
                state.scheduler.on_new_transfer(arrival, &params)
            }
        }?;
        if let Some(params) = arrival.params.filter(|params| params.do_remote_prefill) {
            let engine = params.remote_engine_id.as_deref().unwrap_or_default();
            state.traces.arrived(now, request, engine);
            unsigned = state.note_unsigned(params, &shared.setup);
        }
        Ok(wait(&mut state.outcomes))
    });
    if let Some(host) = unsigned {
        tracing::warn!(
            "the engine at {host} does not sign its parameters, and they are taken because \
             allow_unsigned_params names it: keep this server away from clients that could write their own"
        );
    }
    arrived
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings { engine, address, .. } = self.settings();
        write!(f, "Connector({engine:?}, {}:{})", address.host, address.port)
    }
}
