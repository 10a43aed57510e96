//! An engine with a step loop around the two halves: admission, blocks, computation, outcomes.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use kvx_vllm::config::BlockRelease;
use kvx_vllm::engine::mooncake::{MooncakeAction, MooncakeWorker};
use kvx_vllm::engine::{
    Action, Address, Allocation, Arrival, BlockLists, ConnectorMeta, Ending, Kept, LoadFailure,
    MoveFailure, MoveId, Outcome, OutputAggregator, RequestId, Scheduler, Settings, Status, Then,
    Time, Transferred, Worker, WorkerOutput, WorkerRank,
};
use kvx_vllm::params::{MooncakeParams, OlderMooncakeParams, TransferParams};

use crate::simulation::memory::Pool;

/// A monotonic clock of one process, with a different origin and a slightly different rate.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    pub(crate) origin: u64,
    pub(crate) drift_ppm: i64,
}

impl Clock {
    pub(crate) fn at(self, now: u64) -> Time {
        let drift = now as i64 / 1_000_000 * self.drift_ppm;
        Time::from_origin(Duration::from_micros(self.origin + now.wrapping_add_signed(drift)))
    }

    /// Returns the time at which this clock has reached `time`.
    pub(crate) fn when(self, time: Time, now: u64) -> u64 {
        now + time.since(self.at(now)).as_micros() as u64 + 50
    }
}

/// The state of a request.
#[derive(Debug, PartialEq)]
enum Doing {
    /// Without blocks.
    Queued,
    /// The connector is loading.
    Loading,
    /// The engine computes until this time.
    Computing(u64),
}

pub(crate) struct Request {
    pub(crate) client: usize,
    pub(crate) conversation: u32,
    pub(crate) prompt: u32,
    /// The tokens that it generates.
    pub(crate) output: u32,
    pub(crate) deadline: u64,
    blocks: Vec<u32>,
    /// The blocks found in the engine's own cache.
    cached: u32,
    doing: Doing,
    not_before: u64,
}

/// The end of a request, for its client.
pub(crate) enum End {
    Finished(Option<Box<TransferParams>>),
    Error,
}

type MoveResult = Result<Transferred, MoveFailure>;

/// The worker half of either connector.
pub(crate) trait Half: Debug {
    type Action: Debug;

    fn next_action(&mut self) -> Option<Self::Action>;
    fn start_load_kv(&mut self, now: Time, meta: ConnectorMeta);
    fn get_finished(&mut self, now: Time) -> WorkerOutput;
    fn next_deadline(&self) -> Option<Time>;
    fn move_resolved(&mut self, now: Time, id: MoveId, result: MoveResult);
    fn move_settled(&mut self, now: Time, id: MoveId);
    fn move_forgotten(&mut self, now: Time, id: MoveId);
    fn fenced(&mut self, now: Time, request: &RequestId);
    /// Returns whether the worker is idle.
    fn ends(&mut self, now: Time) -> bool;
}

impl Half for Worker {
    type Action = Action;

    fn next_action(&mut self) -> Option<Action> {
        Worker::next_action(self)
    }

    fn start_load_kv(&mut self, now: Time, meta: ConnectorMeta) {
        Worker::start_load_kv(self, now, meta);
    }

    fn get_finished(&mut self, now: Time) -> WorkerOutput {
        Worker::get_finished(self, now)
    }

    fn next_deadline(&self) -> Option<Time> {
        Worker::next_deadline(self)
    }

    fn move_resolved(&mut self, now: Time, id: MoveId, result: MoveResult) {
        Worker::move_resolved(self, now, id, result);
    }

    fn move_settled(&mut self, now: Time, id: MoveId) {
        Worker::move_settled(self, now, id);
    }

    fn move_forgotten(&mut self, now: Time, id: MoveId) {
        Worker::move_forgotten(self, now, id);
    }

    fn fenced(&mut self, now: Time, request: &RequestId) {
        Worker::fenced(self, now, request);
    }

    fn ends(&mut self, _: Time) -> bool {
        self.shutdown();
        while self.next_action().is_some() {}
        self.is_empty()
    }
}

impl Half for MooncakeWorker {
    type Action = MooncakeAction;

    fn next_action(&mut self) -> Option<MooncakeAction> {
        MooncakeWorker::next_action(self)
    }

    fn start_load_kv(&mut self, now: Time, meta: ConnectorMeta) {
        MooncakeWorker::start_load_kv(self, now, meta);
    }

    fn get_finished(&mut self, now: Time) -> WorkerOutput {
        MooncakeWorker::get_finished(self, now)
    }

    fn next_deadline(&self) -> Option<Time> {
        MooncakeWorker::next_deadline(self)
    }

    fn move_resolved(&mut self, now: Time, id: MoveId, result: MoveResult) {
        MooncakeWorker::move_resolved(self, now, id, result);
    }

    fn move_settled(&mut self, now: Time, id: MoveId) {
        MooncakeWorker::move_settled(self, now, id);
    }

    fn move_forgotten(&mut self, now: Time, id: MoveId) {
        MooncakeWorker::move_forgotten(self, now, id);
    }

    fn fenced(&mut self, now: Time, request: &RequestId) {
        MooncakeWorker::fenced(self, now, request);
    }

    fn ends(&mut self, now: Time) -> bool {
        self.shutdown(now);
        while self.next_action().is_some() {}
        self.is_empty()
    }
}

/// `kv_transfer_params` of either connector.
pub(crate) enum Asked {
    Nixl(Option<Box<TransferParams>>),
    Mooncake(MooncakeParams),
    OlderMooncake(OlderMooncakeParams),
}

pub(crate) struct Engine<W> {
    pub(crate) id: String,
    pub(crate) settings: Settings,
    pub(crate) scheduler: Scheduler,
    pub(crate) aggregator: OutputAggregator,
    pub(crate) workers: Vec<W>,
    pub(crate) clocks: Vec<Clock>,
    pub(crate) clock: Clock,
    pub(crate) pool: Pool,
    pub(crate) requests: BTreeMap<RequestId, Request>,
    /// Blocks that the connector holds, by request: of ended requests, and of ended loads.
    kept: BTreeMap<(RequestId, bool), Vec<u32>>,
    /// The time until which published blocks are kept for peers, unless the peers confirm their
    /// reads earlier.
    published: BTreeMap<RequestId, u64>,
    /// Whether references to blocks are checked against generations.
    pub(crate) generations: bool,
    pub(crate) life: u32,
    pub(crate) loaded: u32,
    pub(crate) recomputed: u32,
    pub(crate) stale: u32,
    pub(crate) lost: u32,
}

/// The parameters of a new engine.
pub(crate) struct Birth {
    pub(crate) settings: Settings,
    pub(crate) blocks: u32,
    pub(crate) clock: Clock,
    pub(crate) clocks: Vec<Clock>,
    pub(crate) random: u64,
    pub(crate) generations: bool,
    pub(crate) life: u32,
    pub(crate) registration: u64,
}

impl<W: Half> Engine<W> {
    pub(crate) fn new(birth: Birth, worker: impl Fn(&Settings, WorkerRank) -> W) -> Self {
        let Birth { settings, blocks, clock, clocks, random, generations, life, registration } =
            birth;
        let mut scheduler = Scheduler::new(settings.clone());
        scheduler.registered(registration);
        let workers = (0..settings.tp_size).map(|tp| worker(&settings, WorkerRank { pp: 0, tp }));
        Engine {
            id: settings.engine.to_string(),
            scheduler,
            aggregator: OutputAggregator::new(settings.tp_size as usize),
            workers: workers.collect(),
            pool: Pool::new(settings.tp_size as usize, blocks, random),
            clocks,
            clock,
            settings,
            requests: BTreeMap::new(),
            kept: BTreeMap::new(),
            published: BTreeMap::new(),
            generations,
            life,
            loaded: 0,
            recomputed: 0,
            stale: 0,
            lost: 0,
        }
    }

    /// Takes a request from the proxy.
    pub(crate) fn arrive(
        &mut self,
        now: u64,
        id: &RequestId,
        request: (usize, u32, u32, u32),
        params: Asked,
        (deadline, not_before, cached): (u64, u64, u32),
    ) {
        let (client, conversation, prompt, output) = request;
        let deadline_here = Some(self.clock.at(deadline));
        let arrival = |params| Arrival {
            request: id,
            prompt_tokens: prompt,
            params,
            deadline: deadline_here,
        };
        // The simulation has no invalid parameters.
        match &params {
            Asked::Nixl(params) => {
                self.scheduler.on_new_request(self.clock.at(now), arrival(params.as_deref()))
            }
            Asked::Mooncake(params) => self.scheduler.on_new_transfer(arrival(None), params),
            Asked::OlderMooncake(params) => {
                self.scheduler.on_new_older_transfer(arrival(None), params)
            }
        }
        .expect("right parameters");
        let request = Request {
            client,
            conversation,
            prompt,
            output,
            deadline,
            blocks: Vec::new(),
            cached,
            doing: Doing::Queued,
            not_before,
        };
        self.requests.insert(id.clone(), request);
    }

    /// Aborts a request whose client is gone.
    pub(crate) fn abort(&mut self, now: u64, id: &RequestId) -> Result<(), String> {
        self.end(now, id, Status::Aborted).map(|_| ())
    }

    fn end(
        &mut self,
        now: u64,
        id: &RequestId,
        status: Status,
    ) -> Result<Option<Box<TransferParams>>, String> {
        let Some(request) = self.requests.remove(id) else { return Ok(None) };
        let normal = status == Status::LengthCapped;
        let ending = Ending {
            status,
            blocks: BlockLists::single(request.blocks.clone()),
            computed: if normal { request.prompt + request.output.saturating_sub(1) } else { 0 },
            cached: None,
            reference: self.generations.then(|| self.pool.reference()),
        };
        let finished = self.scheduler.request_finished(self.clock.at(now), id, ending);
        if let Some(why) = finished.withheld {
            return Err(format!("{id}: parameters were withheld: {why}"));
        }
        if finished.delay_free {
            // A prefill leg of a MooncakeConnector has no load; since vLLM 0.16 its answer has no
            // parameters.
            let published =
                finished.params.is_some() || (self.settings.mooncake.is_some() && normal);
            if published {
                let for_next_turn =
                    finished.params.as_ref().is_some_and(|params| params.do_remote_decode);
                let kept = match self.settings.release {
                    _ if for_next_turn => self.settings.decoder_ttl,
                    BlockRelease::Lease(lease) => lease.duration,
                    BlockRelease::After(duration) => duration,
                };
                // Clocks differ in rate.
                let kept = kept.as_micros() as u64;
                self.published.insert(id.clone(), now + kept - kept / 500);
            }
            self.kept.insert((id.clone(), published), request.blocks);
        } else {
            self.pool.give_back(id, &request.blocks)?;
        }
        Ok(finished.params.map(Box::new))
    }

    /// Runs one step. Returns the requests that ended, by client.
    pub(crate) fn step(&mut self, now: u64) -> Result<Vec<(usize, RequestId, End)>, String> {
        let time = self.clock.at(now);
        let mut ended = Vec::new();
        let outputs = self
            .workers
            .iter_mut()
            .zip(&self.clocks)
            .map(|(worker, clock)| worker.get_finished(clock.at(now)));
        let outputs: Vec<_> = outputs.enumerate().collect();
        let output = self.aggregator.add(outputs);
        let mut outcomes = self.scheduler.update_connector_output(time, output);
        outcomes.extend(self.scheduler.poll(time));
        for outcome in outcomes {
            self.heed(now, outcome, &mut ended)?;
        }
        self.admit(now)?;
        self.finish_computed(now, &mut ended)?;
        let meta = self.scheduler.build_connector_meta(time);
        if !meta.is_empty() {
            for (worker, clock) in self.workers.iter_mut().zip(&self.clocks) {
                worker.start_load_kv(clock.at(now), meta.clone());
            }
        }
        Ok(ended)
    }

    fn heed(
        &mut self,
        now: u64,
        outcome: Outcome,
        ended: &mut Vec<(usize, RequestId, End)>,
    ) -> Result<(), String> {
        let size = self.settings.block_size;
        match outcome {
            Outcome::Loaded { request: id, computed } => {
                let request = self
                    .requests
                    .get_mut(&id)
                    .ok_or_else(|| format!("{id} is loaded, but has ended"))?;
                self.pool
                    .check(request.conversation, &request.blocks, computed, size)
                    .map_err(|why| format!("STALE: {id}: {why}"))?;
                self.loaded += 1;
                let rest = request.blocks.split_at((computed / size) as usize).1;
                self.pool.compute(
                    request.conversation,
                    rest,
                    computed / size,
                    request.prompt + request.output,
                    size,
                );
                request.doing = Doing::Computing(now + 5_000);
            }
            Outcome::Failed { request: id, failure, then, invalid, held } => {
                self.stale += u32::from(failure == LoadFailure::Stale);
                let request = self
                    .requests
                    .get_mut(&id)
                    .ok_or_else(|| format!("{id} has failed, but had ended"))?;
                let held: Vec<u32> = held.iter().collect();
                if !held.is_empty() {
                    request.blocks.retain(|block| !held.contains(block));
                    self.kept.insert((id.clone(), false), held);
                }
                match then {
                    Then::Fail => {
                        let client = request.client;
                        self.end(now, &id, Status::Failed)?;
                        ended.push((client, id, End::Error));
                    }
                    Then::Recompute { .. }
                        if request.blocks.is_empty() && request.doing == Doing::Queued => {}
                    Then::Recompute { computed } => {
                        self.recomputed += 1;
                        self.pool
                            .check(request.conversation, &request.blocks, computed, size)
                            .map_err(|why| format!("STALE: {id} keeps invalid blocks: {why}"))?;
                        let kept = &request.blocks[..(computed / size) as usize];
                        if kept.iter().any(|block| invalid.contains(block)) {
                            return Err(format!("{id} keeps a block that is invalid"));
                        }
                        let needed = (request.prompt + request.output).div_ceil(size) as usize;
                        let missing = needed - request.blocks.len();
                        if self.pool.available() < missing {
                            // Starts again, as an engine does after a preemption.
                            let blocks = std::mem::take(&mut request.blocks);
                            self.pool.give_back(&id, &blocks)?;
                            request.cached = 0;
                            request.doing = Doing::Queued;
                            return Ok(());
                        }
                        request.blocks.extend(self.pool.take(&id, missing)?);
                        let rest = request.blocks.split_at((computed / size) as usize).1;
                        let tokens = request.prompt + request.output;
                        self.pool.compute(
                            request.conversation,
                            rest,
                            computed / size,
                            tokens,
                            size,
                        );
                        request.doing = Doing::Computing(now + 20_000);
                    }
                }
            }
            Outcome::Free { request: id, kept } => {
                let published = kept == Kept::Request;
                let blocks = self
                    .kept
                    .remove(&(id.clone(), published))
                    .ok_or_else(|| format!("{id}: {kept:?} is to be freed, but is not kept"))?;
                // Only an expired lease may free blocks during a read. The reader notices by their
                // generations.
                let leased =
                    published && self.published.remove(&id).is_some_and(|until| now < until);
                if leased && self.pool.read_by_peers.get(&id).is_some_and(|reads| *reads > 0) {
                    return Err(format!(
                        "the blocks of {id} are freed while a peer reads them, within their lease"
                    ));
                }
                self.pool.give_back(&id, &blocks)?;
            }
            Outcome::Lost { request: id, kept } => {
                let blocks = self.kept.remove(&(id.clone(), kept == Kept::Request));
                let blocks =
                    blocks.ok_or_else(|| format!("{id}: {kept:?} is lost, but is not kept"))?;
                self.published.remove(&id);
                self.lost += 1;
                self.pool.lose(&id, &blocks)?;
            }
        }
        Ok(())
    }

    fn admit(&mut self, now: u64) -> Result<(), String> {
        let time = self.clock.at(now);
        let size = self.settings.block_size;
        let (pool, scheduler) = (&mut self.pool, &mut self.scheduler);
        for (id, request) in &mut self.requests {
            let needed = (request.prompt + request.output).div_ceil(size) as usize;
            if request.doing != Doing::Queued
                || now < request.not_before
                || pool.available() < needed
            {
                continue;
            }
            request.blocks = pool.take(id, needed)?;
            let computed = request.cached * size;
            let (cached, rest) = request.blocks.split_at(request.cached as usize);
            pool.compute(request.conversation, cached, 0, computed, size);
            let matched = scheduler.get_num_new_matched_tokens(time, id, computed);
            // Blocks for future tokens are not loaded.
            let fill = rest
                .len()
                .min((computed + matched.tokens).div_ceil(size) as usize - request.cached as usize);
            let fill = BlockLists::single(&rest[..fill]);
            scheduler.update_state_after_alloc(
                time,
                id,
                Allocation { fill, computed, external: matched.tokens },
            );
            if matched.tokens > 0 {
                request.doing = Doing::Loading;
            } else {
                let tokens = request.prompt + request.output;
                pool.compute(request.conversation, rest, request.cached, tokens, size);
                request.doing = Doing::Computing(now + 1_000 + u64::from(request.prompt) * 100);
            }
        }
        Ok(())
    }

    fn finish_computed(
        &mut self,
        now: u64,
        ended: &mut Vec<(usize, RequestId, End)>,
    ) -> Result<(), String> {
        let over = self.requests.iter().filter_map(|(id, request)| match request.doing {
            Doing::Computing(until) if now >= until => Some((id.clone(), Status::LengthCapped)),
            _ if now >= request.deadline => Some((id.clone(), Status::Failed)),
            _ => None,
        });
        let over: Vec<_> = over.collect();
        for (id, status) in over {
            let client = self.requests[&id].client;
            if status == Status::Failed && self.requests[&id].doing == Doing::Loading {
                return Err(format!("{id} is still loading at its deadline"));
            }
            let params = self.end(now, &id, status)?;
            let end = if status == Status::Failed { End::Error } else { End::Finished(params) };
            ended.push((client, id, end));
        }
        Ok(())
    }

    /// Returns the time of the next step.
    pub(crate) fn next_step(&self, now: u64) -> Option<u64> {
        if !self.requests.is_empty() {
            return Some(now + 10_000);
        }
        let scheduler =
            self.scheduler.next_deadline(self.clock.at(now)).map(|time| self.clock.when(time, now));
        let workers = self.workers.iter().zip(&self.clocks);
        let workers =
            workers.filter_map(|(worker, clock)| Some(clock.when(worker.next_deadline()?, now)));
        workers.chain(scheduler).min()
    }

    /// Checks that an idle engine holds no blocks and no state.
    pub(crate) fn check_quiet(&mut self, now: u64) -> Result<(), String> {
        let leaked = self.pool.leaked();
        if !leaked.is_empty() {
            return Err(format!("{} has leaked blocks: {leaked:?}", self.id));
        }
        if !self.scheduler.is_empty() {
            return Err(format!("the scheduler of {} still knows {:?}", self.id, self.scheduler));
        }
        if self.aggregator.incomplete() > 0 {
            return Err(format!(
                "{}: reports of some workers only: {:?}",
                self.id, self.aggregator
            ));
        }
        for worker in &mut self.workers {
            if !worker.ends(self.clock.at(now)) {
                return Err(format!("a worker of {} still knows {worker:?}", self.id));
            }
        }
        Ok(())
    }
}

pub(crate) fn address(engine: usize) -> Address {
    Address { host: format!("host-{engine}").into(), port: 5600 }
}
