//! One engine with one worker of a MooncakeConnector. The test checks its actions and answers them.

use std::time::Duration;

use kvx_vllm::config::Role;
use kvx_vllm::engine::mooncake::{
    AskId, Mooncake, MooncakeAction, MooncakeWorker, PullId, QueryId, Unanswered,
};
use kvx_vllm::engine::{
    Action, Address, Allocation, Arrival, BlockLists, Ending, Finished, Move, MoveId, Outcome,
    OutputAggregator, PeerPlan, RequestId, Scheduler, Settings, Status, Time, TransferStats,
    Transferred, WorkerRank,
};
use kvx_vllm::params::{MooncakeLeg, MooncakeParams, MooncakeTransferId};
use kvx_vllm::wire::mooncake::{
    Directory, ListedEngine, PullRequest, PullResponse, PullStatus, PulledRequest,
};

/// The tokens in a block.
pub(crate) const BLOCK: u32 = 16;

pub(crate) fn at(seconds: f64) -> Time {
    Time::from_origin(Duration::from_secs_f64(seconds))
}

pub(crate) fn settings(engine: &str, role: Role) -> Settings {
    let address = Address { host: format!("{engine}.host").into(), port: 8998 };
    Settings::new(engine, address).with_mooncake(Mooncake::new(role))
}

/// Returns the description of a decode worker.
pub(crate) fn told(tp: (u32, u32), layout_id: u64) -> PullRequest {
    let mut told = PullRequest::new("d.host", 7000 + tp.0 as u16, tp.1, tp.0);
    told.kv_caches_base_addr = vec![1 << 20];
    (told.block_lens, told.kv_block_lens) = (vec![4096], vec![4096]);
    told.layout_id = layout_id;
    told
}

/// Returns a decode worker's request for blocks of these transfers.
pub(crate) fn question(tp: (u32, u32), asked: &[(&str, &str, &[u32])]) -> PullRequest {
    let mut question = told(tp, 7);
    question.kvx_engine_id = Some("p".into());
    question.req_blocks = asked
        .iter()
        .map(|(request, transfer, blocks)| PulledRequest {
            request_id: (*request).into(),
            transfer_id: (*transfer).into(),
            block_ids: if blocks.is_empty() { Vec::new() } else { vec![blocks.to_vec()] },
        })
        .collect();
    question
}

pub(crate) fn directory(engine: &str, tp: u32, pp: u32) -> Directory {
    let mut listed = ListedEngine { engine_id: engine.into(), ..ListedEngine::default() };
    for (pp, tp) in (0..pp).flat_map(|pp| (0..tp).map(move |tp| (pp, tp))) {
        listed
            .workers
            .insert(WorkerRank { pp, tp }, format!("tcp://p.host:{}", 4000 + 10 * pp + tp));
    }
    Directory { engines: [(0, listed)].into() }
}

pub(crate) fn response(status: PullStatus, ok: &[&str], err: &[&str]) -> PullResponse {
    let names = |names: &[&str]| {
        (!names.is_empty()).then(|| names.iter().map(|name| (*name).into()).collect())
    };
    let mut response = PullResponse::new(status);
    (response.ok_reqs, response.err_reqs) = (names(ok), names(err));
    response
}

pub(crate) struct Rig {
    pub(crate) scheduler: Scheduler,
    pub(crate) worker: MooncakeWorker,
    aggregator: OutputAggregator,
    pub(crate) stats: TransferStats,
    pub(crate) log: Vec<String>,
}

impl Rig {
    pub(crate) fn new(settings: Settings, tp: u32, layout_id: u64) -> Self {
        let rank = WorkerRank { pp: 0, tp };
        let own = told((tp, settings.tp_size), layout_id);
        Rig {
            worker: MooncakeWorker::new(settings.clone(), rank, own).unwrap(),
            scheduler: Scheduler::new(settings),
            aggregator: OutputAggregator::new(1),
            stats: TransferStats::default(),
            log: Vec::new(),
        }
    }

    pub(crate) fn prefill() -> Self {
        Rig::new(settings("p", Role::Producer), 0, 7)
    }

    pub(crate) fn decode() -> Self {
        Rig::new(settings("d", Role::Consumer), 0, 7)
    }

    pub(crate) fn arrive(&mut self, request: &str, prompt: u32, transfer: &str, leg: MooncakeLeg) {
        let request = RequestId::from(request);
        let arrival = Arrival {
            request: &request,
            prompt_tokens: prompt,
            params: None,
            deadline: Some(at(1000.0)),
        };
        let params = MooncakeParams::new(MooncakeTransferId::new(transfer).unwrap(), leg);
        self.scheduler.on_new_transfer(arrival, &params).unwrap();
    }

    /// Lets a prefill leg arrive.
    pub(crate) fn prefills(&mut self, request: &str, transfer: &str) {
        self.arrive(request, 40, transfer, MooncakeLeg::Prefill);
    }

    /// Ends a prefill leg with blocks of 40 tokens.
    pub(crate) fn ends(
        &mut self,
        now: f64,
        request: &str,
        status: Status,
        blocks: &[u32],
    ) -> Finished {
        let ending = Ending {
            status,
            blocks: BlockLists::single(blocks),
            computed: blocks.len() as u32 * BLOCK,
            cached: None,
            reference: None,
        };
        self.scheduler.request_finished(at(now), &request.into(), ending)
    }

    /// Computes a prefill leg with three blocks from 10 on.
    pub(crate) fn has_prefilled(
        &mut self,
        now: f64,
        request: &str,
        transfer: &str,
    ) -> Vec<MooncakeAction> {
        self.prefills(request, transfer);
        let finished = self.ends(now, request, Status::LengthCapped, &[10, 11, 12]);
        assert!(finished.delay_free && finished.params.is_none(), "{finished:?}");
        self.step(now)
    }

    /// Lets a decode leg arrive, and gives it blocks from `first` on for 40 tokens.
    pub(crate) fn loads(&mut self, now: f64, request: &str, transfer: &str, first: u32) {
        self.arrive(request, 40, transfer, decode_leg("p"));
        self.allocate(now, request, first, 0);
    }

    pub(crate) fn allocate(&mut self, now: f64, request: &str, first: u32, computed: u32) {
        let request = request.into();
        let external =
            self.scheduler.get_num_new_matched_tokens(at(now), &request, computed).tokens;
        let fill: Vec<u32> = (first..first + external.div_ceil(BLOCK)).collect();
        let allocation = Allocation { fill: BlockLists::single(&fill[..]), computed, external };
        self.scheduler.update_state_after_alloc(at(now), &request, allocation);
    }

    pub(crate) fn step(&mut self, now: f64) -> Vec<MooncakeAction> {
        let meta = self.scheduler.build_connector_meta(at(now));
        self.worker.start_load_kv(at(now), meta);
        self.actions()
    }

    pub(crate) fn actions(&mut self) -> Vec<MooncakeAction> {
        std::iter::from_fn(|| self.worker.next_action()).collect()
    }

    pub(crate) fn outcomes(&mut self, now: f64) -> Vec<Outcome> {
        let output = self.worker.get_finished(at(now));
        // As in engines, an empty output is not forwarded.
        let mut output = self.aggregator.add((!output.is_empty()).then_some((0, output)));
        self.log.extend(output.failures.drain(..).map(|failure| failure.to_string()));
        self.stats.aggregate(output.stats.take());
        let mut outcomes = self.scheduler.update_connector_output(at(now), output);
        outcomes.extend(self.scheduler.poll(at(now)));
        outcomes
    }

    /// Runs the step that orders a load, with the bootstrap server's answer. Returns the requests.
    pub(crate) fn queries(&mut self, now: f64, directory: &Directory) -> Vec<Asked> {
        let actions = self.step(now);
        let [MooncakeAction::Query { query, .. }] = &actions[..] else {
            panic!("expected one query: {actions:?}")
        };
        self.queried(now, *query, Ok(directory.clone()))
    }

    pub(crate) fn queried(
        &mut self,
        now: f64,
        query: QueryId,
        result: Result<Directory, String>,
    ) -> Vec<Asked> {
        self.worker.queried(at(now), query, result);
        asked(&self.actions())
    }

    pub(crate) fn answered(
        &mut self,
        now: f64,
        pull: PullId,
        response: &PullResponse,
    ) -> Vec<MooncakeAction> {
        self.worker.answered(at(now), pull, PullResponse::decode(&response.encode()));
        self.actions()
    }

    pub(crate) fn unanswered(
        &mut self,
        now: f64,
        pull: PullId,
        delivered: bool,
    ) -> Vec<MooncakeAction> {
        let error = "no route".into();
        self.worker.unanswered(at(now), pull, Unanswered { delivered, error });
        self.actions()
    }

    /// Passes a request to the worker.
    pub(crate) fn asked(
        &mut self,
        now: f64,
        ask: u64,
        question: &PullRequest,
    ) -> Vec<MooncakeAction> {
        let question = PullRequest::decode(&question.encode());
        let _ = self.worker.asked(at(now), AskId(ask), question);
        self.actions()
    }

    /// Passes a request for ready blocks to the worker, and connects to its decode engine. Returns
    /// the writes.
    pub(crate) fn asked_and_connected(
        &mut self,
        now: f64,
        ask: u64,
        question: &PullRequest,
    ) -> Vec<Move> {
        let actions = self.asked(now, ask, question);
        self.connected(now, &actions)
    }

    pub(crate) fn connected(&mut self, now: f64, actions: &[MooncakeAction]) -> Vec<Move> {
        for action in actions {
            if let MooncakeAction::Connect { connection, .. } = action {
                self.worker.connected(
                    at(now),
                    *connection,
                    Ok(PeerPlan::one_to_one(BLOCK, 1000).unwrap()),
                );
            }
        }
        let further = self.actions();
        writes(actions).into_iter().chain(writes(&further)).collect()
    }

    pub(crate) fn written(&mut self, now: f64, id: MoveId) -> Vec<MooncakeAction> {
        let time = Duration::from_millis(20);
        let done = Transferred { time, post: Duration::ZERO, bytes: 4096, descriptors: 1 };
        self.worker.move_resolved(at(now), id, Ok(done));
        self.actions()
    }
}

pub(crate) fn decode_leg(engine: &str) -> MooncakeLeg {
    MooncakeLeg::Decode {
        remote_engine_id: engine.into(),
        remote_bootstrap_addr: format!("http://{engine}.host:8998"),
    }
}

/// A request that was sent.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) pull: PullId,
    pub(crate) address: String,
    pub(crate) request: PullRequest,
}

impl Asked {
    /// Returns the requested blocks: request, transfer, blocks.
    pub(crate) fn wants(&self) -> Vec<(&str, &str, Vec<u32>)> {
        let blocks = |each: &PulledRequest| each.block_ids.concat();
        self.request
            .req_blocks
            .iter()
            .map(|each| (&*each.request_id, &*each.transfer_id, blocks(each)))
            .collect()
    }
}

pub(crate) fn asked(actions: &[MooncakeAction]) -> Vec<Asked> {
    let question = |action: &MooncakeAction| match action {
        MooncakeAction::Ask { pull, address, question, .. } => Some(Asked {
            pull: *pull,
            address: address.to_string(),
            request: PullRequest::decode(&question.encode()).unwrap(),
        }),
        _ => None,
    };
    actions.iter().filter_map(question).collect()
}

pub(crate) fn writes(actions: &[MooncakeAction]) -> Vec<Move> {
    let write = |action: &MooncakeAction| match action {
        MooncakeAction::Write { what, .. } => Some(what.clone()),
        _ => None,
    };
    actions.iter().filter_map(write).collect()
}

pub(crate) fn answers(actions: &[MooncakeAction]) -> Vec<(u64, PullResponse)> {
    let answer = |action: &MooncakeAction| match action {
        MooncakeAction::Answer { ask, bytes } => {
            Some((ask.0, PullResponse::decode(bytes).unwrap()))
        }
        _ => None,
    };
    actions.iter().filter_map(answer).collect()
}

/// Returns the only answer: its receiver, status, written and failed requests.
pub(crate) fn answer(actions: &[MooncakeAction]) -> (u64, PullStatus, Vec<String>, Vec<String>) {
    let [(ask, answer)] = &answers(actions)[..] else { panic!("expected one answer: {actions:?}") };
    let names = |names: &Option<Vec<String>>| names.clone().unwrap_or_default();
    (*ask, answer.status, names(&answer.ok_reqs), names(&answer.err_reqs))
}

pub(crate) fn fences(actions: &[MooncakeAction]) -> usize {
    let fence =
        |action: &&MooncakeAction| matches!(action, MooncakeAction::Engine(Action::Fence { .. }));
    actions.iter().filter(fence).count()
}

/// Returns the pairs of local and remote blocks.
pub(crate) fn pairs(write: &Move) -> Vec<(u32, u32)> {
    let places = write.groups.iter().flat_map(|group| {
        (0..group.local.len()).map(|place| (group.local.at(place), group.remote.at(place)))
    });
    places.collect()
}

pub(crate) fn loaded(request: &str) -> Outcome {
    Outcome::Loaded { request: request.into(), computed: 40 }
}
