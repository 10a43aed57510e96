//! The connector of one engine, by the names of vLLM's `KVConnectorBase_V1`.

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

/// How long a connector that is dropped without a shutdown takes to end what it has begun.
const AT_DROP: Duration = Duration::from_secs(1);

/// The connector of one engine. Cheap to clone; it ends with [`shutdown`](Self::shutdown), or with
/// its last clone.
///
/// The calls of a step loop have the names of vLLM's `KVConnectorBase_V1`, return at once and wait
/// for nothing, but for [`request_finished`](Self::request_finished) with `kvx_digest`, or where
/// blocks are copied to the host:
///
/// 1. [`on_new_request`](Self::on_new_request) when a request arrives; when it is admitted
///    [`get_num_new_matched_tokens`](Self::get_num_new_matched_tokens), blocks for it, and
///    [`update_state_after_alloc`](Self::update_state_after_alloc).
/// 2. [`step`](Self::step) once a step, and then
///    [`Rank::start_load_kv`](super::Rank::start_load_kv) on each worker.
/// 3. [`outcomes`](Self::outcomes), and what they ask for.
/// 4. [`request_finished`](Self::request_finished) for requests that end.
///
/// An idle engine sleeps in [`outcomes_ready`](Self::outcomes_ready). Leases, heartbeats, deadlines
/// and peers that fetch are served on the connector's own thread, however long a step takes. Both
/// ends check blocks by their generations; the engine does nothing for it.
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

    /// The name under which peers know this engine.
    pub fn engine_id(&self) -> &EngineId {
        &self.settings().engine
    }

    /// The address of its side channel, as peers know it.
    pub fn address(&self) -> &Address {
        &self.settings().address
    }

    /// The settings that it was built with.
    pub fn settings(&self) -> &Settings {
        &self.shared().setup.settings
    }

    /// A moment on the clock that times of requests are on.
    pub fn time(&self, deadline: impl Into<Deadline>) -> Time {
        let left = deadline.into().left();
        self.shared().clock.now() + left
    }

    /// Announces a request. From now on heartbeats tell the peer that keeps its blocks that they
    /// are wanted.
    ///
    /// # Errors
    /// The parameters cannot be used; the request is computed here, as if it had none.
    pub fn on_new_request(&self, arrival: Arrival<'_>) -> Result<(), NotLoaded> {
        arrive(self.shared(), arrival, |_| ())
    }

    /// Returns how many tokens beyond `computed` can be loaded. Changes nothing, and may be called
    /// again.
    pub fn get_num_new_matched_tokens(&self, request: &RequestId, computed: u32) -> Matched {
        let shared = self.shared();
        let now = shared.clock.now();
        shared.state.lock().scheduler.get_num_new_matched_tokens(now, request, computed)
    }

    /// Orders the load of a request, which has blocks now, for the next [`step`](Self::step). A
    /// second call for the same load changes nothing.
    ///
    /// # Errors
    /// `Invalid` for another number of lists than KV cache groups, and if no caches are registered;
    /// `OutOfBounds` for blocks beyond them; `PeerLost`: a rank of this engine has not joined, or
    /// is lost. Then the load is not ordered and has no outcome: compute the prompt here, or fail
    /// the request.
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

    /// The end of a step: what it has ordered goes to the workers, which begin it at their
    /// [`start_load_kv`](super::Rank::start_load_kv).
    pub fn step(&self) {
        self.shared().with_state(|state, now| {
            state.pass_on_ready(now, None);
            let meta = state.scheduler.build_connector_meta(now);
            if !meta.is_empty() {
                state.ranks.iter_mut().for_each(|(_, held)| held.hold(&meta));
            }
        });
    }

    /// Takes the outcomes of loads and of kept blocks since the last call, without those that
    /// [`Prefill`](super::Prefill) and [`Decode`](super::Decode) wait for.
    pub fn outcomes(&self) -> Vec<Outcome> {
        self.shared().state.lock().outcomes.take()
    }

    /// Ends when there are [`outcomes`](Self::outcomes), or the connector was shut down. Under any
    /// executor.
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

    /// Blocks as [`outcomes_ready`](Self::outcomes_ready), without a runtime. False: not by the
    /// deadline.
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

    /// Notes that the first `tokens` tokens of a request are computed on all workers: the devices
    /// have ended that work, and the blocks stay as they are until the request ends or is
    /// [preempted](Self::preempted). `blocks` are its lists from the first token on, as
    /// [`request_finished`](Self::request_finished) takes them.
    ///
    /// Call it for each chunk of a long prompt: where peers see copies of the caches in host memory
    /// (`kv_buffer_device: cpu`), its whole blocks are copied while the next chunk is computed, and
    /// `request_finished` waits for the rest alone. Otherwise, and for requests that keep no blocks
    /// for a peer, it does nothing. Returns at once.
    pub fn computed(&self, request: &RequestId, blocks: &BlockLists, tokens: u32) {
        copies::computed(self.shared(), request, blocks, tokens);
    }

    /// Notes that blocks of a request go to others before it ends, and forgets what was
    /// [computed](Self::computed).
    pub fn preempted(&self, request: &RequestId) {
        self.shared().state.lock().saves.forget(request);
    }

    /// Ends a request, in whatever state it is. Waits, for at most 30 s, where blocks that are kept
    /// for a peer are still to be hashed (`kvx_digest`) or copied to the host (`kv_buffer_device:
    /// cpu`).
    pub fn request_finished(&self, request: &RequestId, ending: Ending) -> Finished {
        requests::finish(self.shared(), request, ending)
    }

    /// The number of blocks of failed loads that a transfer may still touch.
    pub fn blocks_held(&self) -> usize {
        self.shared().state.lock().scheduler.blocks_held()
    }

    /// Returns whether it knows of no request and keeps no blocks.
    pub fn is_idle(&self) -> bool {
        self.shared().state.lock().is_idle()
    }

    /// Ends everything: loads fail, peers are refused, memory is given back, the thread ends. `Ok`:
    /// nothing touches any block any more.
    ///
    /// # Errors
    /// `StillShared` or `TimedOut`: that could not be proven by the deadline, and memory stays
    /// quarantined.
    pub fn shutdown(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        shutdown::request(self.shared(), deadline.into())
    }
}

/// A request has arrived. `wait` says who receives its outcome, from its first moment on.
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
