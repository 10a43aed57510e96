//! One engine with one worker, stepped by hand. The test checks its actions and answers them.

use std::time::Duration;

use kvx_vllm::Version;
use kvx_vllm::engine::{
    Action, Address, Allocation, Arrival, BlockLists, Connection, Ending, Finished, Move, Outcome,
    OutputAggregator, PeerPlan, RequestId, Scheduler, Settings, Status, Time, TransferStats,
    Transferred, Worker, WorkerOutput, WorkerRank,
};
use kvx_vllm::params::{RemoteBlocks, TransferMode, TransferParams};
use kvx_vllm::wire::EngineNotification;

/// The tokens in a block.
pub(crate) const BLOCK: u32 = 16;
/// The blocks in every pool.
pub(crate) const BLOCKS: u32 = 1000;

pub(crate) fn at(seconds: f64) -> Time {
    Time::from_origin(Duration::from_secs_f64(seconds))
}

pub(crate) fn settings(engine: &str) -> Settings {
    Settings::new(engine, Address { host: format!("{engine}.host").into(), port: 5600 })
}

pub(crate) fn plan() -> PeerPlan {
    PeerPlan::one_to_one(BLOCK, BLOCKS).unwrap()
}

/// Returns blocks from `first` on that hold this many tokens.
pub(crate) fn blocks(first: u32, tokens: u32) -> Vec<u32> {
    (first..first + tokens.div_ceil(BLOCK)).collect()
}

pub(crate) fn remote(
    engine: &str,
    request: &str,
    block_ids: Vec<u32>,
    tokens: u32,
) -> RemoteBlocks {
    let mut remote =
        RemoteBlocks::new(engine, request, format!("{engine}.host"), 5600, vec![block_ids]);
    remote.num_tokens = Some(tokens.into());
    remote
}

/// Returns a prefill engine's answer: blocks 500 and on.
pub(crate) fn prefilled(engine: &str, request: &str, tokens: u32) -> TransferParams {
    TransferParams::prefilled(
        remote(engine, request, blocks(500, tokens), tokens),
        Version::default(),
    )
}

/// An engine.
pub(crate) struct Rig {
    pub(crate) scheduler: Scheduler,
    pub(crate) worker: Worker,
    aggregator: OutputAggregator,
    /// The statistics of all steps so far.
    pub(crate) stats: TransferStats,
    /// The log lines of all steps so far.
    pub(crate) log: Vec<String>,
    pub(crate) last: WorkerOutput,
}

impl Rig {
    pub(crate) fn new(settings: Settings) -> Self {
        Rig::ranked(settings, 0)
    }

    pub(crate) fn ranked(settings: Settings, tp: u32) -> Self {
        Rig {
            worker: Worker::new(settings.clone(), WorkerRank { pp: 0, tp }),
            scheduler: Scheduler::new(settings),
            aggregator: OutputAggregator::new(1),
            stats: TransferStats::default(),
            log: Vec::new(),
            last: WorkerOutput::default(),
        }
    }

    pub(crate) fn arrive(&mut self, now: f64, id: &str, prompt: u32, params: &TransferParams) {
        let request = id.into();
        let arrival = Arrival {
            request: &request,
            prompt_tokens: prompt,
            params: Some(params),
            deadline: Some(at(now + 1000.0)),
        };
        self.scheduler.on_new_request(at(now), arrival).unwrap();
    }

    pub(crate) fn matched(&self, now: f64, id: &str, computed: u32) -> u32 {
        let matched = self.scheduler.get_num_new_matched_tokens(at(now), &id.into(), computed);
        assert_eq!(matched.asynchronous, matched.tokens > 0);
        matched.tokens
    }

    /// Allocates blocks from `first` on for the tokens that can be loaded beyond `computed`.
    pub(crate) fn allocate(&mut self, now: f64, id: &str, first: u32, computed: u32) -> Vec<u32> {
        let external = self.matched(now, id, computed);
        let fill = if external == 0 { Vec::new() } else { blocks(first, external) };
        let allocation = Allocation { fill: BlockLists::single(&fill[..]), computed, external };
        self.scheduler.update_state_after_alloc(at(now), &id.into(), allocation);
        fill
    }

    /// Lets a request arrive, and gives it blocks 100 and on.
    pub(crate) fn load(
        &mut self,
        now: f64,
        id: &str,
        prompt: u32,
        params: &TransferParams,
    ) -> Vec<u32> {
        self.arrive(now, id, prompt, params);
        self.allocate(now, id, 100, 0)
    }

    /// Passes the step's message to the worker. Returns the worker's actions.
    pub(crate) fn step(&mut self, now: f64) -> Vec<Action> {
        let meta = self.scheduler.build_connector_meta(at(now));
        self.worker.start_load_kv(at(now), meta);
        self.actions()
    }

    pub(crate) fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.worker.next_action()).collect()
    }

    /// Runs [`step`](Self::step), which begins one handshake.
    pub(crate) fn step_to_handshake(&mut self, now: f64) -> Connection {
        let actions = self.step(now);
        let [Action::Handshake { connection, .. }] = &actions[..] else {
            panic!("expected one handshake: {actions:?}")
        };
        *connection
    }

    pub(crate) fn connected(
        &mut self,
        now: f64,
        connection: Connection,
        plan: PeerPlan,
    ) -> Vec<Action> {
        self.worker.connected(at(now), connection, Ok(plan));
        self.actions()
    }

    /// Starts a load and returns its only read.
    pub(crate) fn load_to_read(
        &mut self,
        now: f64,
        id: &str,
        prompt: u32,
        params: &TransferParams,
    ) -> Move {
        self.load(now, id, prompt, params);
        let connection = self.step_to_handshake(now);
        let mut reads = reads(&self.connected(now, connection, plan()));
        assert_eq!(reads.len(), 1);
        reads.remove(0)
    }

    pub(crate) fn read_done(&mut self, now: f64, what: &Move) -> Vec<Action> {
        self.worker.move_resolved(at(now), what.id, Ok(transferred()));
        self.actions()
    }

    /// Passes the worker's output to the scheduler. Returns the outcomes.
    pub(crate) fn outcomes(&mut self, now: f64) -> Vec<Outcome> {
        let output = self.worker.get_finished(at(now));
        self.last = output.clone();
        let output = self.aggregator.add([(0, output)]);
        self.stats.aggregate(output.stats.clone());
        self.log.extend(output.failures.iter().map(ToString::to_string));
        let mut outcomes = self.scheduler.update_connector_output(at(now), output);
        outcomes.extend(self.scheduler.poll(at(now)));
        outcomes
    }

    pub(crate) fn ends(&mut self, now: f64, id: &str, status: Status, tokens: u32) -> Finished {
        let ending = Ending {
            status,
            blocks: BlockLists::single(blocks(100, tokens)),
            computed: tokens,
            cached: None,
            reference: None,
        };
        self.scheduler.request_finished(at(now), &id.into(), ending)
    }

    /// Runs a prefill of `tokens` tokens from its arrival to its parameters, in blocks 100 and on.
    pub(crate) fn prefill(&mut self, now: f64, id: &str, tokens: u32) -> TransferParams {
        self.arrive(now, id, tokens, &TransferParams::ask_prefill());
        self.allocate(now, id, 100, 0);
        assert!(self.step(now).is_empty());
        let finished = self.ends(now, id, Status::LengthCapped, tokens);
        assert!(finished.delay_free);
        assert!(self.step(now).is_empty());
        finished.params.unwrap()
    }

    pub(crate) fn notified(&mut self, now: f64, from: &str, bytes: &[u8]) -> Vec<Action> {
        self.try_notified(now, from, bytes).unwrap();
        self.actions()
    }

    pub(crate) fn try_notified(
        &mut self,
        now: f64,
        from: &str,
        bytes: &[u8],
    ) -> kvx_core::Result<()> {
        self.worker.notified(at(now), from, EngineNotification::decode(bytes)?)
    }

    /// Returns how many times a metric was observed, or its count.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        self.stats
            .observations()
            .filter(|(metric, _)| metric.name == name)
            .map(|(_, value)| value)
            .sum()
    }
}

pub(crate) fn transferred() -> Transferred {
    let time = Duration::from_millis(1);
    Transferred { time, post: time, bytes: 4096, descriptors: 1 }
}

pub(crate) fn reads(actions: &[Action]) -> Vec<Move> {
    let read = |action: &Action| match action {
        Action::Read(what) => Some(what.clone()),
        _ => None,
    };
    actions.iter().filter_map(read).collect()
}

pub(crate) fn writes(actions: &[Action]) -> Vec<Move> {
    let write = |action: &Action| match action {
        Action::Write(what) => Some(what.clone()),
        _ => None,
    };
    actions.iter().filter_map(write).collect()
}

/// Returns all notifications except heartbeats as text, with the tensor-parallel rank that gets
/// each.
pub(crate) fn notes(actions: &[Action]) -> Vec<(u32, String)> {
    said(actions).into_iter().filter(|(_, text)| !text.starts_with("HB:")).collect()
}

/// Returns the heartbeats as text, with the tensor-parallel rank that gets each.
pub(crate) fn beats(actions: &[Action]) -> Vec<(u32, String)> {
    said(actions).into_iter().filter(|(_, text)| text.starts_with("HB:")).collect()
}

fn said(actions: &[Action]) -> Vec<(u32, String)> {
    let text =
        |rank: &WorkerRank, bytes: &[u8]| (rank.tp, String::from_utf8_lossy(bytes).into_owned());
    let note = |action: &Action| match action {
        Action::Notify { rank, bytes, .. } => vec![text(rank, bytes)],
        Action::Register { ranks, registration, .. } => {
            let bytes = EngineNotification::Registration(registration.clone()).encode();
            ranks.iter().map(|rank| text(rank, &bytes)).collect()
        }
        _ => Vec::new(),
    };
    actions.iter().flat_map(note).collect()
}

pub(crate) fn handshakes(actions: &[Action]) -> Vec<Connection> {
    let handshake = |action: &Action| match action {
        Action::Handshake { connection, .. } => Some(*connection),
        _ => None,
    };
    actions.iter().filter_map(handshake).collect()
}

pub(crate) fn disconnects(actions: &[Action]) -> Vec<Connection> {
    let disconnect = |action: &Action| match action {
        Action::Disconnect { connection } => Some(*connection),
        _ => None,
    };
    actions.iter().filter_map(disconnect).collect()
}

/// Returns the pairs of local and remote blocks of a move.
pub(crate) fn pairs(what: &Move) -> Vec<(u32, u32)> {
    let of = |group: &kvx_vllm::engine::GroupMove| {
        (0..group.local.len())
            .map(|place| (group.local.at(place), group.remote.at(place)))
            .collect::<Vec<_>>()
    };
    what.groups.iter().flat_map(of).collect()
}

pub(crate) fn note_of(what: &Move) -> Option<String> {
    what.notification.as_ref().map(|bytes| String::from_utf8_lossy(bytes).into_owned())
}

pub(crate) fn loaded(request: &str, computed: u32) -> Outcome {
    Outcome::Loaded { request: RequestId::from(request), computed }
}

pub(crate) fn push(settings: Settings) -> Settings {
    Settings { mode: TransferMode::Push, ..settings }
}
