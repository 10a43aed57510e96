//! Measures how long a connector takes to load blocks from another process, over every available
//! backend.
//!
//! The program starts itself again as the prefill. `--bars` prints the figures that `cargo xtask
//! limits` checks. `--rixl PYTHON` prints those over RIXL, compared with NIXL in that Python.
//! `--mooncake` prints those of the MooncakeConnector over MOONCAKE, where the prefill writes.

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
use kvx_testkit::{Child, cpu_time, hex, unhex};

/// The environment variable of a prefill's process that names its backend.
const PREFILL: &str = "KVX_BENCH_PREFILL";
/// The environment variables of a prefill's process with its numbers of blocks and of workers.
const PREFILL_BLOCKS: &str = "KVX_BENCH_PREFILL_BLOCKS";
const PREFILL_WORKERS: &str = "KVX_BENCH_PREFILL_WORKERS";
/// The environment variable of a decode's process, which times its own loads, that names its
/// backend.
const DECODE: &str = "KVX_BENCH_DECODE";
/// Layers, bytes per block and layer, blocks of a pool (large and small), and tokens per block.
const LAYERS: u64 = 8;
const BLOCK: u64 = 16 << 10;
const BLOCKS: u32 = 1024;
const FEW: u32 = 16;
const TOKENS: u32 = 16;
/// The number of blocks in a load of 64 MiB.
const WHOLE: u32 = 512;
/// The deadline of every wait.
const PATIENCE: Duration = Duration::from_secs(30);

/// An allocator that counts allocated bytes, to measure the memory of a queued request.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed unchanged to the system's allocator, which upholds the trait's
// contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds `dealloc`'s contract, and `System` allocated the block.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns whether this backend is measured with a MooncakeConnector, whose prefill writes, and not
/// with a NixlConnector.
fn the_prefill_writes(backend: &str) -> bool {
    backend == "MOONCAKE"
}

/// The heads of a model, and the workers that they are divided among.
#[derive(Clone, Copy)]
struct Split {
    heads: u32,
    workers: u32,
}

impl Split {
    const NONE: Split = Split { heads: 1, workers: 1 };

    /// Returns the bytes per block and layer on each worker.
    fn block(self) -> u64 {
        BLOCK * u64::from(self.heads / self.workers)
    }
}

/// Returns an engine's connector and the pools of its workers.
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
    let config = KvTransferConfig::from_json(&json, &surroundings).expect("a valid configuration");
    let mut factors = CompatibilityFactors::new(Version::default(), "a model");
    (factors.num_kv_heads, factors.num_hidden_layers) = (split.heads, LAYERS as u32);
    let builder =
        Connector::builder(&config, kvx::registry(), factors).block_size(TOKENS).any_port();
    let connector =
        builder.workers(split.workers, 1).build_blocking().expect("the side channel opens");
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

/// An engine's connector, and for each worker an agent without a connector on the same pool.
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

/// Returns `blocks` of a pool's `of` blocks, beginning with `first`, in an order without
/// neighbours.
fn scattered(first: u32, blocks: u32, of: u32) -> Vec<u32> {
    (0..blocks).map(|at| (first + at * 509 % blocks.next_power_of_two()) % of).collect()
}

/// Returns the function with which a child process answers its parent.
fn asked() -> impl Fn(String) {
    let answers = kvx_testkit::answers_apart().expect("the standard output can be duplicated");
    move |line| writeln!(&answers, "{line}").expect("the parent reads the answers")
}

/// Publishes as many blocks as each line of standard input requests, until it ends.
fn prefill(backend: &str) {
    let say = asked();
    let number = |name| -> u32 {
        std::env::var(name).expect("the parent sets the variable").parse().expect("a number")
    };
    let (of, workers) = (number(PREFILL_BLOCKS), number(PREFILL_WORKERS));
    let name = format!("prefill-{}", std::process::id());
    let engine = Engine::new(&name, backend, of, Split { heads: workers, workers });
    let metadata =
        |(agent, _): &(Agent, Region)| -> String { hex(&agent.metadata().expect("metadata")) };
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

/// Loads the blocks that each line of standard input describes, and answers with the seconds that
/// it took.
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
    fetch.wait_blocking(PATIENCE).expect("ends in time").expect("succeeds");
}

/// A prefill in a child process.
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

    /// Returns the metadata of its agents without a connector, which is the first line it prints.
    fn metadata(&self) -> Vec<Vec<u8>> {
        let text = self.0.hear(PATIENCE).expect("the prefill's metadata");
        text.split(' ').map(unhex).collect()
    }

    /// Publishes `blocks` blocks and returns their parameters, as JSON.
    fn published(&mut self, blocks: u32) -> String {
        self.0.say(&blocks.to_string()).expect("it listens");
        self.0.hear(PATIENCE).expect("parameters")
    }
}

/// A decode, and a prefill in a child process.
struct Both {
    backend: String,
    /// Blocks of each pool.
    blocks: u32,
    /// Bytes per block and layer of the decode.
    block: u64,
    engine: Engine,
    /// The prefill's agents without a connector.
    peers: Vec<Peer>,
    prefill: Apart,
    fetched: u64,
}

impl Both {
    fn new(backend: &str) -> Self {
        Both::divided(backend, BLOCKS, 1)
    }

    /// Starts a decode with one worker, and a prefill with `workers` workers that have one head
    /// each.
    fn divided(backend: &str, blocks: u32, workers: u32) -> Self {
        let prefill = Apart::start(backend, blocks, workers);
        let split = Split { heads: workers, workers: 1 };
        let engine = Engine::new("decode", backend, blocks, split);
        let connect = |metadata: Vec<u8>| {
            let peer = engine.agents[0].0.connect(&metadata).expect("the metadata is valid");
            peer.ready(PATIENCE).wait_blocking(PATIENCE).expect("a link");
            peer
        };
        let peers = prefill.metadata().into_iter().map(connect).collect();
        let (backend, block) = (backend.to_owned(), split.block());
        let mut both = Both { backend, blocks, block, engine, peers, prefill, fetched: 0 };
        both.load(1); // excludes the handshake from the figures
        both.bare(1);
        both
    }

    fn load(&mut self, blocks: u32) -> Duration {
        self.loads(1, blocks)
    }

    /// Runs `loads` loads concurrently, and returns the time from the first request to the last
    /// completion.
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
            fetch.wait_blocking(PATIENCE).expect("ends in time").expect("succeeds");
        }
        begun.elapsed()
    }

    /// Moves the same blocks with bare transfers that carry one notification each. They write where
    /// a load writes.
    fn bares<'a>(&'a self, loads: u32, blocks: u32) -> Duration {
        let lane = |(at, peer): (usize, &'a Peer)| {
            // Each worker of the prefill has one part of a block.
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
            peer.transfer(&plan).notify(*b"read").post().expect("the budget has space")
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

    /// Returns how many times longer loads take than bare transfers of the same blocks. Rounds are
    /// interleaved; the first one only warms up the pools.
    fn ratio(&mut self, rounds: u32, loads: u32, blocks: u32) -> f64 {
        let mut round =
            || self.loads(loads, blocks).as_secs_f64() / self.bares(loads, blocks).as_secs_f64();
        round();
        median((0..rounds).map(|_| round()).collect())
    }

    /// Prints the cost of loads relative to bare transfers: one of 64 MiB, 64 concurrent ones of 32
    /// MiB, and one of a single block.
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

/// Sleeps for `time`, and returns the CPU time that this process used meanwhile.
fn spent_in(time: Duration) -> Duration {
    let before = cpu_time();
    std::thread::sleep(time);
    cpu_time() - before
}

fn say(cost: &str, value: f64) {
    println!("{{\"cost\":\"{cost}\",\"value\":{value}}}");
}

/// Prints the figures that have a limit.
fn bars() {
    for backend in ["SHM", "TCP"] {
        idle(backend);
        let mut both = Both::new(backend);
        both.bars();
        if backend == "TCP" {
            queued(&mut both);
        }
        drop(both);
        // 64 MiB from each of two workers, into one.
        let joined = Both::divided(backend, WHOLE, 2).ratio(15, 1, WHOLE);
        say(&format!("joined_{}", backend.to_lowercase()), 1.0 / joined);
    }
}

/// Prints the cost of being idle with sixteen linked peers, for an agent and then for a connector:
/// milliseconds of this process's CPU time in ten seconds.
fn idle(backend: &str) {
    let measure = |what: &str| {
        // Until the work of setting up the links has ended.
        std::thread::sleep(Duration::from_secs(2));
        let spent = spent_in(Duration::from_secs(10));
        say(&format!("{what}_ms_{}", backend.to_lowercase()), spent.as_secs_f64() * 1e3);
    };
    let mut prefills: Vec<_> = (0..16).map(|_| Apart::start(backend, FEW, 1)).collect();
    let metadata: Vec<_> = prefills.iter().flat_map(Apart::metadata).collect();
    {
        let agent = Agent::builder("bare").backends([backend]).registry(kvx::registry()).build();
        let agent = agent.expect("it is available");
        let connect = |metadata: &Vec<u8>| agent.connect(metadata).expect("the metadata is valid");
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

/// Prints the figures over RIXL that have a limit.
///
/// Each round starts a decode of kvx and one of NIXL in `python`. Each shakes hands and loads 64
/// MiB, then loads 64 MiB again. The figures say how many times faster than Python kvx is.
fn bars_over_rixl(python: &str) {
    idle("RIXL");
    let mut prefill = Apart::start("RIXL", BLOCKS, 1);
    prefill.metadata(); // skips the line with its metadata
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
    round(0); // makes the prefill's pages present
    let (first, next): (Vec<_>, Vec<_>) = (0..11).map(round).unzip();
    say("first_rixl", median(first));
    say("next_rixl", median(next));
}

/// Prints the memory and the CPU time of requests that wait at a decode for blocks.
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
    // The first heartbeat is sent at once; its temporary memory does not belong to the requests.
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
