//! The cost of a request in the protocol code of both engines, without moving bytes.
//!
//! 1,000 concurrent requests between a prefill and a decode engine, with 60 layers and 2,000 blocks
//! each: from the arrival at the prefill side to the release of the blocks there, with the
//! parameters as values and the index lists paired for all layers. Then the same parameters as
//! JSON. `cargo bench -p kvx-vllm --bench requests` runs criterion. With `-- --bars` it prints the
//! figures that have a bar, one JSON object per line.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, Throughput};
use kvx_core::{Indices, Op};
use kvx_testkit::median_time;
use kvx_vllm::Version;
use kvx_vllm::engine::{
    Action, Address, Allocation, Arrival, BlockLists, Ending, Outcome, OutputAggregator, PeerPlan,
    RequestId, Scheduler, Settings, Status, Time, Transferred, Worker, WorkerRank,
};
use kvx_vllm::mapping::{
    Caches, Heads, KvLayout, KvTensors, LayerCache, MappingOptions, MemoryType, PeerMap, Remote, Tp,
};
use kvx_vllm::params::TransferParams;
use kvx_vllm::wire::EngineNotification;

/// Concurrent requests.
const REQUESTS: u32 = 1000;
/// Blocks per request.
const BLOCKS: u32 = 2000;
/// Layers of the model.
const LAYERS: u64 = 60;
/// Tokens per block.
const TOKENS: u32 = 16;

/// An engine with one worker.
struct Engine {
    scheduler: Scheduler,
    worker: Worker,
    aggregator: OutputAggregator,
}

impl Engine {
    fn new(name: &str) -> Self {
        let settings = Settings::new(name, Address { host: name.into(), port: 5600 });
        Engine {
            worker: Worker::new(settings.clone(), WorkerRank::default()),
            scheduler: Scheduler::new(settings),
            aggregator: OutputAggregator::new(1),
        }
    }

    fn step(&mut self, now: Time) -> Vec<Action> {
        let meta = self.scheduler.build_connector_meta(now);
        self.worker.start_load_kv(now, meta);
        self.actions()
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.worker.next_action()).collect()
    }

    fn outcomes(&mut self, now: Time) -> Vec<Outcome> {
        let output = self.aggregator.add([(0, self.worker.get_finished(now))]);
        self.scheduler.update_connector_output(now, output)
    }
}

/// A request with its names and the blocks that both engines have given it.
struct Given {
    prefill: RequestId,
    decode: RequestId,
    there: BlockLists,
    here: BlockLists,
}

/// Returns the KV caches of a worker, with one region per layer.
fn caches() -> Caches {
    let layer = |layer: u64| LayerCache {
        name: format!("model.layers.{layer}.self_attn").into(),
        tensors: KvTensors::Together((layer + 1) << 40),
        block_len: 4096,
        block_stride: 4096,
        blocks: REQUESTS * BLOCKS,
        group: 0,
        memory: MemoryType::Vram,
        heads: Heads::Sharded(8),
    };
    Caches::of_layers((0..LAYERS).map(layer).collect(), KvLayout::Lbhnc, TOKENS, 1, 0)
        .expect("a valid model")
}

struct Both {
    prefill: Engine,
    decode: Engine,
    map: PeerMap,
    given: Vec<Given>,
    transferred: Transferred,
}

impl Both {
    fn new() -> Self {
        let caches = caches();
        let ranks = [(WorkerRank { pp: 0, tp: 0 }, caches.geometry().clone())];
        let remote = Remote { tp_size: 1, pp_size: 1, dcp_size: 1, ranks: &ranks };
        let tp = Tp::new(0, 1).expect("one rank");
        let map = PeerMap::new(Op::Read, &caches, tp, &remote, &MappingOptions::default())
            .expect("equal engines");
        let given = |request: u32| {
            // The blocks of a request are scattered.
            let block = |at: u32, salt: u32| at * REQUESTS + (request * 7 + at * salt) % REQUESTS;
            let list = |salt| {
                BlockLists::single((0..BLOCKS).map(|at| block(at, salt)).collect::<Vec<_>>())
            };
            Given {
                prefill: format!("cmpl-7f9c2ba4-{request}-0-0000abcd").into(),
                decode: format!("cmpl-7f9c2ba4-{request}-0-0000ef01").into(),
                there: list(13),
                here: list(29),
            }
        };
        let time = Duration::from_millis(1);
        let transferred = Transferred { time, post: time, bytes: 1, descriptors: 1 };
        let plan = PeerPlan::of(&map, caches.geometry(), caches.geometry());
        let mut both = Both {
            prefill: Engine::new("prefill"),
            decode: Engine::new("decode"),
            map,
            given: (0..REQUESTS).map(given).collect(),
            transferred,
        };
        both.connect(plan);
        both
    }

    /// Connects, for the first request.
    fn connect(&mut self, plan: PeerPlan) {
        let now = Time::default();
        let given = &self.given[0];
        let params = self.prefill.published(now, given);
        self.decode.admit(now, given, &params);
        for action in self.decode.step(now) {
            if let Action::Handshake { connection, .. } = action {
                self.decode.worker.connected(now, connection, Ok(plan.clone()));
            }
        }
        let actions = self.decode.actions();
        self.finish(now, actions, 1);
    }

    /// Completes the reads, notifies the prefill side, and collects both reports.
    fn finish(&mut self, now: Time, actions: Vec<Action>, requests: usize) {
        for action in actions {
            if let Action::Read(what) = action {
                // The runtime posts one pair of lists for all layers.
                let lists = &what.lists;
                let local: Vec<Indices> =
                    lists.local.groups().iter().map(|list| Arc::clone(list).into()).collect();
                let remote: Vec<Indices> =
                    lists.remote.groups().iter().map(|list| Arc::clone(list).into()).collect();
                let moves = self.map.moves(&kvx_vllm::mapping::BlockPairs {
                    local: &local,
                    remote: &remote,
                    tokens: lists.tokens,
                });
                let moves = moves.expect("right lists");
                assert_eq!(moves.blocks, u64::from(BLOCKS) * LAYERS);
                let note = what.notification.expect("the read carries it");
                self.decode.worker.move_resolved(now, what.id, Ok(self.transferred));
                let note = EngineNotification::decode(&note).expect("a notification");
                self.prefill.worker.notified(now, "decode/0", note).expect("a completion");
            }
        }
        let loaded = self.decode.outcomes(now);
        assert_eq!(loaded.len(), requests);
        assert_eq!(self.prefill.outcomes(now).len(), requests);
        for outcome in loaded {
            let Outcome::Loaded { request, .. } = outcome else { panic!("{outcome:?}") };
            black_box(self.decode.scheduler.request_finished(
                now,
                &request,
                ending(&BlockLists::default(), 0),
            ));
        }
    }

    /// Runs all requests from arrival to release.
    fn run(&mut self, now: Time) {
        let mut params = Vec::with_capacity(self.given.len());
        for given in &self.given {
            params.push(self.prefill.published(now, given));
        }
        assert!(self.prefill.step(now).is_empty());
        for (given, params) in self.given.iter().zip(&params) {
            self.decode.admit(now, given, params);
        }
        let actions = self.decode.step(now);
        self.finish(now, actions, REQUESTS as usize);
    }
}

fn ending(blocks: &BlockLists, computed: u32) -> Ending {
    Ending {
        status: Status::LengthCapped,
        blocks: blocks.clone(),
        computed,
        cached: None,
        reference: None,
    }
}

impl Engine {
    fn published(&mut self, now: Time, given: &Given) -> TransferParams {
        let asked = TransferParams::ask_prefill();
        let arrival = Arrival {
            request: &given.prefill,
            prompt_tokens: BLOCKS * TOKENS,
            params: Some(&asked),
            deadline: None,
        };
        self.scheduler.on_new_request(now, arrival).expect("right parameters");
        let allocation = Allocation { fill: BlockLists::default(), computed: 0, external: 0 };
        self.scheduler.update_state_after_alloc(now, &given.prefill, allocation);
        let finished = self.scheduler.request_finished(
            now,
            &given.prefill,
            ending(&given.there, BLOCKS * TOKENS),
        );
        if self.worker.is_empty() {
            self.step(now);
        }
        finished.params.expect("it publishes")
    }

    fn admit(&mut self, now: Time, given: &Given, params: &TransferParams) {
        let arrival = Arrival {
            request: &given.decode,
            prompt_tokens: BLOCKS * TOKENS,
            params: Some(params),
            deadline: None,
        };
        self.scheduler.on_new_request(now, arrival).expect("right parameters");
        let matched = self.scheduler.get_num_new_matched_tokens(now, &given.decode, 0);
        assert_eq!(matched.tokens, BLOCKS * TOKENS);
        let allocation =
            Allocation { fill: given.here.clone(), computed: 0, external: matched.tokens };
        self.scheduler.update_state_after_alloc(now, &given.decode, allocation);
    }
}

/// Writes the parameters of one request as text, and reads them.
fn as_json(params: &TransferParams) -> TransferParams {
    let text = params.to_value(Version::default()).expect("right parameters").to_string();
    TransferParams::from_value(&serde_json::from_str(&text).expect("JSON"))
        .expect("right parameters")
}

fn criterion(mut criterion: Criterion) {
    let mut both = Both::new();
    let params = Engine::new("another").published(Time::default(), &both.given[0]);
    let mut group = criterion.benchmark_group("1,000 requests of 60 layers x 2,000 blocks");
    group.throughput(Throughput::Elements(REQUESTS.into()));
    group.sample_size(20);
    let mut now = Time::default();
    group.bench_function("both engines, arrival to release", |bencher| {
        bencher.iter(|| {
            now = now + Duration::from_secs(1);
            both.run(now);
        });
    });
    group.finish();
    criterion.bench_function("parameters of 2,000 blocks as JSON, written and read", |bencher| {
        bencher.iter(|| as_json(&params));
    });
    criterion.final_summary();
}

/// Returns the median time of a call, in microseconds.
fn microseconds(times: usize, call: impl FnMut()) -> f64 {
    median_time(times, call).as_secs_f64() * 1e6
}

/// Prints the figures that have a bar.
fn bars() {
    let say = |cost: &str, value: f64| println!("{{\"cost\":\"{cost}\",\"value\":{value}}}");
    let mut both = Both::new();
    let params = Engine::new("another").published(Time::default(), &both.given[0]);
    let mut now = Time::default();
    let all = microseconds(21, || {
        now = now + Duration::from_secs(1);
        both.run(now);
    });
    say("request_us", all / f64::from(REQUESTS));
    say("params_json_us", microseconds(101, || drop(black_box(as_json(&params)))));
}

fn main() {
    if std::env::args().any(|argument| argument == "--bars") {
        return bars();
    }
    criterion(Criterion::default().configure_from_args());
}
