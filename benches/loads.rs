//! Loads of one connector from another's pool, in another process, over every backend that works here.
//!
//! This program starts itself again as the prefill. `--bars` prints the figures that `cargo xtask limits` asks for, and
//! `--rixl PYTHON` those over RIXL, beside NIXL in that Python, and `--mooncake` those of the MooncakeConnector over
//! MOONCAKE, where the prefill writes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufRead, Write};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use criterion::{Criterion, SamplingMode, Throughput};
use kvx::config::{KvTransferConfig, Surroundings};
use kvx::connector::{
    Arrival, BlockLists, Caches, CompatibilityFactors, Connector, Decode, Heads, KvLayout,
    KvTensors, LayerCache, Lease, MemoryType, Prefill, RequestId, TransferParams, Version,
    WorkerRank,
};
use kvx::{Agent, Grid, GridSet, Memory, Op, Options, Peer, Plan, Region};
use kvx_testkit::{Child, cpu_time};

/// Set in a prefill's process: the backend that it opens.
const PREFILL: &str = "KVX_BENCH_PREFILL";
/// Set beside it: how many blocks it has, on how many workers.
const PREFILL_BLOCKS: &str = "KVX_BENCH_PREFILL_BLOCKS";
const PREFILL_WORKERS: &str = "KVX_BENCH_PREFILL_WORKERS";
/// Set in the process of a decode that times its own loads: the backend that it opens.
const DECODE: &str = "KVX_BENCH_DECODE";
/// Layers, bytes of a block in each, blocks of a pool (most, or few), tokens of a block.
const LAYERS: u64 = 8;
const BLOCK: u64 = 16 << 10;
const BLOCKS: u32 = 1024;
const FEW: u32 = 16;
const TOKENS: u32 = 16;
/// Blocks of 64 MiB.
const WHOLE: u32 = 512;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Counts what is allocated: what a queued request costs.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls go to the system's allocator as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Over Mooncake's backend its connector is measured, the others are NixlConnectors.
fn the_prefill_writes(backend: &str) -> bool {
    backend == "MOONCAKE"
}

/// The heads of a model, and the workers of an engine that they lie on.
#[derive(Clone, Copy)]
struct Split {
    heads: u32,
    workers: u32,
}

impl Split {
    const NONE: Split = Split { heads: 1, workers: 1 };

    /// Bytes of a block in a layer, on each worker.
    fn block(self) -> u64 {
        BLOCK * u64::from(self.heads / self.workers)
    }
}

/// An engine, and the pools of its workers.
fn connector(
    name: &str,
    backend: &str,
    blocks: u32,
    split: Split,
) -> (Connector, Vec<Arc<Memory>>) {
    let kind = if the_prefill_writes(backend) { "MooncakeConnector" } else { "NixlConnector" };
    let json = format!(
        r#"{{"kv_connector": "{kind}", "kv_role": "kv_both", "engine_id": "{name}",
             "kv_connector_extra_config": {{"backends": ["{backend}"]}}}}"#
    );
    let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
    let config = KvTransferConfig::from_json(&json, &surroundings).expect("a right configuration");
    let mut factors = CompatibilityFactors::new(Version::default(), "a model");
    (factors.num_kv_heads, factors.num_hidden_layers) = (split.heads, LAYERS as u32);
    let builder =
        Connector::builder(&config, kvx::registry(), factors).block_size(TOKENS).any_port();
    let connector = builder.workers(split.workers, 1).build_blocking().expect("a side channel");
    let layer_len = u64::from(blocks) * split.block();
    let pool = |tp| {
        let memory =
            Arc::new(Memory::pool((LAYERS * layer_len) as usize).build().expect("128 MiB at most"));
        let layer = |at: u64| LayerCache {
            name: format!("layers.{at}").into(),
            tensors: KvTensors::Together(memory.address() + at * layer_len),
            blocks,
            block_len: split.block(),
            block_stride: split.block(),
            group: 0,
            heads: if split.heads == 1 { Heads::Replicated } else { Heads::Sharded(split.heads) },
            memory: MemoryType::Dram,
        };
        let layers = (0..LAYERS).map(layer).collect();
        let caches =
            Caches::of_layers(layers, KvLayout::Lbhnc, TOKENS, 1, 0).expect("right caches");
        let rank = connector.rank(WorkerRank { pp: 0, tp }).expect("one of its workers");
        rank.register(caches, [Arc::clone(&memory)]).expect("host memory");
        memory
    };
    let pools = (0..split.workers).map(pool).collect();
    (connector, pools)
}

/// An engine, and for each of its workers an agent that knows nothing of connectors, on the same pool.
struct Engine {
    connector: Connector,
    agents: Vec<(Agent, Region)>,
}

impl Engine {
    fn new(name: &str, backend: &str, blocks: u32, split: Split) -> Self {
        let (connector, pools) = connector(name, backend, blocks, split);
        let beside = |memory| {
            let agent = Agent::builder(name).backends([backend]).registry(kvx::registry()).build();
            let agent = agent.expect("it is available");
            let pool = agent.register("pool", memory).expect("host memory");
            (agent, pool)
        };
        Engine { connector, agents: pools.into_iter().map(beside).collect() }
    }
}

/// As many blocks of a pool, from the first of them on in an order in which no two are neighbours.
fn scattered(first: u32, blocks: u32, of: u32) -> Vec<u32> {
    (0..blocks).map(|at| (first + at * 509 % blocks.next_power_of_two()) % of).collect()
}

/// In a process that others ask: the way to answer them.
fn asked() -> impl Fn(String) {
    let answers = kvx_testkit::answers_apart().expect("there is a standard error");
    move |line| writeln!(&answers, "{line}").expect("somebody reads it")
}

/// Publishes what is asked for, line by line, until standard input ends.
fn prefill(backend: &str) {
    let say = asked();
    let number =
        |name| -> u32 { std::env::var(name).expect("it is set").parse().expect("a number") };
    let (of, workers) = (number(PREFILL_BLOCKS), number(PREFILL_WORKERS));
    let name = format!("prefill-{}", std::process::id());
    let engine = Engine::new(&name, backend, of, Split { heads: workers, workers });
    let metadata = |(agent, _): &(Agent, Region)| -> String {
        agent.metadata().expect("it has some").iter().map(|byte| format!("{byte:02x}")).collect()
    };
    say(engine.agents.iter().map(metadata).collect::<Vec<_>>().join(" "));
    let (mut leases, mut published): (Vec<Lease>, u64) = (Vec::new(), 0);
    for line in std::io::stdin().lock().lines() {
        let blocks: u32 = line.expect("text").parse().expect("a number of blocks");
        engine.agents.iter().for_each(|(agent, _)| while agent.try_notification().is_some() {});
        leases = leases
            .into_iter()
            .filter_map(|lease| lease.wait_blocking(Duration::ZERO).err())
            .collect();
        published += 1;
        let (list, tokens) = (scattered(0, blocks, of), blocks * TOKENS);
        let lists = BlockLists::single(list);
        let one = Prefill::new(&engine.connector).publish(format!("r{published}"), lists, tokens);
        let (lease, params) = one.expect("right blocks");
        leases.push(lease);
        say(params.to_value(Version::default()).expect("right parameters").to_string());
    }
}

/// Loads what is published, line by line, and answers with the seconds that each load took.
fn decode(backend: &str) {
    let say = asked();
    let name = format!("decode-{}", std::process::id());
    let (connector, _pools) = connector(&name, backend, WHOLE, Split::NONE);
    say("ready".to_owned());
    for (at, line) in std::io::stdin().lock().lines().enumerate() {
        let params = params(&line.expect("text"));
        let blocks = params.remote_block_ids.iter().flatten().map(Vec::len).sum::<usize>();
        let begun = Instant::now();
        fetch(&connector, &format!("d{at}"), &params, scattered(0, blocks as u32, WHOLE));
        say(begun.elapsed().as_secs_f64().to_string());
    }
}

fn params(text: &str) -> TransferParams {
    TransferParams::from_value(&serde_json::from_str(text).expect("JSON"))
        .expect("right parameters")
}

fn fetch(connector: &Connector, request: &str, params: &TransferParams, fill: Vec<u32>) {
    let fetch =
        Decode::new(connector).fetch(request, params, 0, BlockLists::single(fill), PATIENCE);
    fetch.wait_blocking(PATIENCE).expect("by its deadline").expect("it loads");
}

/// A prefill in another process.
struct Apart(Child);

impl Apart {
    fn start(backend: &str, blocks: u32, workers: u32) -> Self {
        let variables = [
            (PREFILL, backend.to_owned()),
            (PREFILL_BLOCKS, blocks.to_string()),
            (PREFILL_WORKERS, workers.to_string()),
        ];
        Apart(Child::start_self_with(&variables).expect("this program starts"))
    }

    /// What the agents beside its connector tell: the first thing that it says.
    fn metadata(&self) -> Vec<Vec<u8>> {
        let text = self.0.hear(PATIENCE).expect("the prefill's metadata");
        let bytes = |text: &str| {
            let byte = |at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal");
            (0..text.len() / 2).map(byte).collect()
        };
        text.split(' ').map(bytes).collect()
    }

    /// The parameters of so many blocks, as text.
    fn published(&mut self, blocks: u32) -> String {
        self.0.say(&blocks.to_string()).expect("it listens");
        self.0.hear(PATIENCE).expect("parameters")
    }
}

/// The decode, with a prefill in another process.
struct Both {
    backend: String,
    /// Of each pool.
    blocks: u32,
    /// Bytes of a block of the decode in a layer.
    block: u64,
    engine: Engine,
    /// The agents beside the prefill's workers.
    peers: Vec<Peer>,
    prefill: Apart,
    fetched: u64,
}

impl Both {
    fn new(backend: &str) -> Self {
        Both::divided(backend, BLOCKS, 1)
    }

    /// The decode has one worker, the prefill so many, with a head each.
    fn divided(backend: &str, blocks: u32, workers: u32) -> Self {
        let prefill = Apart::start(backend, blocks, workers);
        let split = Split { heads: workers, workers: 1 };
        let engine = Engine::new("decode", backend, blocks, split);
        let connect = |metadata: Vec<u8>| {
            let peer = engine.agents[0].0.connect(&metadata).expect("metadata of this release");
            peer.ready(PATIENCE).wait_blocking(PATIENCE).expect("a link");
            peer
        };
        let peers = prefill.metadata().into_iter().map(connect).collect();
        let (backend, block) = (backend.to_owned(), split.block());
        let mut both = Both { backend, blocks, block, engine, peers, prefill, fetched: 0 };
        both.load(1); // the handshake is none of the figures
        both.bare(1);
        both
    }

    fn load(&mut self, blocks: u32) -> Duration {
        self.loads(1, blocks)
    }

    /// So many loads at once, from their order to the last that is there.
    fn loads(&mut self, loads: u32, blocks: u32) -> Duration {
        let params: Vec<_> = (0..loads).map(|_| params(&self.prefill.published(blocks))).collect();
        let fill =
            |at: u32| BlockLists::single(scattered(at * blocks % self.blocks, blocks, self.blocks));
        let fill: Vec<_> = (0..loads).map(fill).collect();
        let begun = Instant::now();
        let fetches = params.iter().zip(fill).map(|(params, fill)| {
            self.fetched += 1;
            Decode::new(&self.engine.connector).fetch(
                format!("d{}", self.fetched),
                params,
                0,
                fill,
                PATIENCE,
            )
        });
        let fetches: Vec<_> = fetches.collect();
        for fetch in fetches {
            fetch.wait_blocking(PATIENCE).expect("by its deadline").expect("it loads");
        }
        begun.elapsed()
    }

    /// The same blocks by bare transfers with a notification each; where a load is a write, so are those.
    fn bares<'a>(&'a self, loads: u32, blocks: u32) -> Duration {
        let lane = |(at, peer): (usize, &'a Peer)| {
            // Each worker has a part of a block.
            let count = self.blocks;
            let part = |layer: u64| {
                let base = layer * u64::from(count) * self.block + at as u64 * BLOCK;
                Grid { base, stride: self.block, length: BLOCK, count }
            };
            let whole =
                |layer: u64| Grid::packed(BLOCK, count).at(layer * u64::from(count) * BLOCK);
            let (ours, theirs) =
                (&self.engine.agents[0].1, peer.region("pool").expect("it is registered"));
            let ours =
                GridSet::of((0..LAYERS).map(|at| (ours.clone(), part(at)))).expect("right grids");
            let theirs = GridSet::of((0..LAYERS).map(|at| (theirs.clone(), whole(at))))
                .expect("right grids");
            (peer, ours, theirs)
        };
        let lanes: Vec<_> = self.peers.iter().enumerate().map(lane).collect();
        let list = |at: u32| scattered(at * blocks % self.blocks, blocks, self.blocks);
        let lists: Vec<_> = (0..loads).map(list).collect();
        let source = scattered(0, blocks, self.blocks);
        let begun = Instant::now();
        let each = lists.iter().flat_map(|list| lanes.iter().map(move |lane| (list, lane)));
        let transfers = each.map(|(list, (peer, ours, theirs))| {
            let op = if the_prefill_writes(&self.backend) { Op::Write } else { Op::Read };
            let plan = Plan::of(op, [(ours.blocks(list.clone()), theirs.blocks(source.clone()))]);
            let plan = plan.expect("right blocks");
            peer.transfer(&plan).notify(*b"read").post().expect("room in the budget")
        });
        let transfers: Vec<_> = transfers.collect();
        for transfer in transfers {
            transfer.wait_blocking(PATIENCE).expect("it moves");
        }
        begun.elapsed()
    }

    fn bare(&self, blocks: u32) -> Duration {
        self.bares(1, blocks)
    }

    /// How many times longer loads take than the same by bare transfers. Rounds are interleaved; the first warms the
    /// pools up.
    fn ratio(&mut self, rounds: u32, loads: u32, blocks: u32) -> f64 {
        let mut round =
            || self.loads(loads, blocks).as_secs_f64() / self.bares(loads, blocks).as_secs_f64();
        round();
        median((0..rounds).map(|_| round()).collect())
    }

    /// Prints what loads cost beside bare transfers: of 64 MiB, 64 of 32 MiB at once, and of one block.
    fn bars(&mut self) {
        let name = self.backend.to_lowercase();
        say(&format!("load_{name}"), self.ratio(15, 1, WHOLE));
        say(&format!("loads_{name}"), 1.0 / self.ratio(5, 64, 256));
        let one: Vec<_> =
            (0..200).map(|_| (self.load(1).as_secs_f64(), self.bare(1).as_secs_f64())).collect();
        let (loads, bares): (Vec<_>, Vec<_>) = one.into_iter().unzip();
        say(&format!("one_block_us_{name}"), (median(loads) - median(bares)) * 1e6);
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Processor time of this process for so long from now on.
fn spent_in(time: Duration) -> Duration {
    let before = cpu_time();
    std::thread::sleep(time);
    cpu_time() - before
}

fn say(cost: &str, value: f64) {
    println!("{{\"cost\":\"{cost}\",\"value\":{value}}}");
}

/// Prints the figures that have a bar.
fn bars() {
    for backend in ["SHM", "TCP"] {
        idle(backend);
        let mut both = Both::new(backend);
        both.bars();
        if backend == "TCP" {
            queued(&mut both);
        }
        drop(both);
        // 64 MiB of each of two workers, to one.
        let joined = Both::divided(backend, WHOLE, 2).ratio(15, 1, WHOLE);
        say(&format!("joined_{}", backend.to_lowercase()), 1.0 / joined);
    }
}

/// What it costs to be linked to sixteen others and to have nothing to do, for an agent and then for a connector:
/// milliseconds of processor time of this process in ten seconds.
fn idle(backend: &str) {
    let measure = |what: &str| {
        std::thread::sleep(Duration::from_secs(2)); // until what the links began has ended
        let spent = spent_in(Duration::from_secs(10));
        say(&format!("{what}_ms_{}", backend.to_lowercase()), spent.as_secs_f64() * 1e3);
    };
    let mut prefills: Vec<_> = (0..16).map(|_| Apart::start(backend, FEW, 1)).collect();
    let metadata: Vec<_> = prefills.iter().flat_map(Apart::metadata).collect();
    {
        let agent = Agent::builder("bare").backends([backend]).registry(kvx::registry()).build();
        let agent = agent.expect("it is available");
        let connect =
            |metadata: &Vec<u8>| agent.connect(metadata).expect("metadata of this release");
        let peers: Vec<_> = metadata.iter().map(connect).collect();
        for peer in &peers {
            peer.ready(PATIENCE).wait_blocking(PATIENCE).expect("a link");
        }
        measure("bare_idle");
    }
    let (connector, _pools) = connector("idle", backend, FEW, Split::NONE);
    for (at, prefill) in prefills.iter_mut().enumerate() {
        fetch(&connector, &format!("d{at}"), &params(&prefill.published(1)), vec![0]);
    }
    measure("idle");
}

/// Prints the figures over RIXL that have a bar. Beside NIXL in this Python: decodes that have just started shake hands
/// and load 64 MiB, and then as much again; how many times faster than Python that is.
fn bars_over_rixl(python: &str) {
    idle("RIXL");
    let mut prefill = Apart::start("RIXL", BLOCKS, 1);
    prefill.metadata(); // what it says first is no answer to what it is asked
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/nixl_decode.py");
    let arguments = [LAYERS, BLOCK, u64::from(WHOLE)].map(|number| number.to_string());
    let mut round = |number: usize| {
        let mut command = Command::new(python);
        command.arg(script).args(&arguments);
        let ours = Child::start_self(DECODE, "RIXL").expect("this program starts");
        let theirs = Child::start(command).expect("Python starts");
        let mut decodes = [ours, theirs];
        for decode in &decodes {
            assert_eq!(decode.hear(PATIENCE).expect("it starts"), "ready");
        }
        let mut both = || {
            let mut took = [0.0; 2];
            for at in [number % 2, (number + 1) % 2] {
                decodes[at].say(&prefill.published(WHOLE)).expect("it listens");
                took[at] =
                    decodes[at].hear(PATIENCE).expect("it loads").parse::<f64>().expect("seconds");
            }
            took[1] / took[0]
        };
        (both(), both())
    };
    round(0); // the prefill's pages are all there then
    let (first, next): (Vec<_>, Vec<_>) = (0..11).map(round).unzip();
    say("first_rixl", median(first));
    say("next_rixl", median(next));
}

/// What requests cost that wait at a decode for blocks.
fn queued(both: &mut Both) {
    const REQUESTS: usize = 10_000;
    let params = params(&both.prefill.published(1));
    let before = ALLOCATED.load(Ordering::Relaxed);
    for at in 0..REQUESTS {
        let mut params = params.clone();
        params.remote_request_id = Some(format!("cmpl-0123456789abcdef-0-{at:08x}"));
        let request = RequestId::from(format!("cmpl-fedcba9876543210-0-{at:08x}"));
        let arrival = Arrival {
            request: &request,
            prompt_tokens: TOKENS,
            params: Some(&params),
            deadline: None,
        };
        both.engine.connector.on_new_request(arrival).expect("right parameters");
    }
    // The first heartbeat goes at once: what it needs for a moment is not what a request costs.
    std::thread::sleep(Duration::from_secs(1));
    let each = ALLOCATED.load(Ordering::Relaxed).saturating_sub(before) / REQUESTS;
    say("queued_request_bytes", each as f64);
    let time = Duration::from_secs(20);
    say("heartbeats_percent", spent_in(time).as_secs_f64() / time.as_secs_f64() * 100.0);
}

fn main() {
    if let Ok(backend) = std::env::var(PREFILL) {
        return prefill(&backend);
    }
    if let Ok(backend) = std::env::var(DECODE) {
        return decode(&backend);
    }
    if let Some(python) = std::env::args().skip_while(|argument| argument != "--rixl").nth(1) {
        return bars_over_rixl(&python);
    }
    if std::env::args().any(|argument| argument == "--mooncake") {
        return Both::new("MOONCAKE").bars();
    }
    if std::env::args().any(|argument| argument == "--bars") {
        return bars();
    }
    let mut criterion = Criterion::default().configure_from_args();
    for backend in kvx::registry().names() {
        if let Err(why) = kvx::registry().require(backend, &Options::new()) {
            println!("loads/{backend}: skipped, {why}");
            continue;
        }
        let mut both = Both::new(backend);
        let mut group = criterion.benchmark_group(format!("loads/{backend}"));
        group.sampling_mode(SamplingMode::Flat).sample_size(10);
        for (name, blocks) in [("64M", WHOLE), ("one block", 1)] {
            group.throughput(Throughput::Bytes(u64::from(blocks) * LAYERS * BLOCK));
            group.bench_function(name, |bencher| {
                bencher.iter_custom(|times| (0..times).map(|_| both.load(blocks)).sum());
            });
        }
        group.finish();
    }
    criterion.final_summary();
}
