//! Measures kvx's own cost, without moving bytes: plans, segments, metadata, tickets and posts.
//!
//! `cargo bench --bench costs` runs criterion. With `-- --bars` it prints only the figures that
//! have a limit, one JSON object per line, for `cargo xtask limits`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput};
use kvx::{Agent, Completion, Grid, GridSet, Memory, Options, Peer, PeerRegion, Plan, Region};
use kvx_core::backend::{BoundPlan, LinkState, Metadata, Ticket};
use kvx_testkit::{StillBackend, median_time};

/// An allocator that counts allocations, to prove that a path makes none.
struct Counted;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static COUNTED: Counted = Counted;

// SAFETY: every call is passed unchanged to the system's allocator, which upholds the trait's
// contract.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds `dealloc`'s contract, and `System` allocated the block.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds `realloc`'s contract, and `System` allocated the block.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Blocks per measured plan.
const BLOCKS: u32 = 100_000;
/// Bytes per block.
const LENGTH: u64 = 4096;
/// Regions in the measured metadata.
const REGIONS: u32 = 64;
/// The deadline of a transfer or a shutdown.
const PATIENCE: Duration = Duration::from_secs(10);

/// Two agents, connected over the transport that moves nothing.
struct Ends {
    agent: Agent,
    peer: Peer,
    local: GridSet<Region>,
    remote: GridSet<PeerRegion>,
    owner: Agent,
    /// The plan that was posted last, as transports receive it.
    posted: Arc<Mutex<Option<Arc<BoundPlan>>>>,
}

impl Ends {
    fn new() -> Self {
        let mut registry = kvx::registry();
        let posted = Arc::<Mutex<Option<_>>>::default();
        let last = Arc::clone(&posted);
        let note = move |plan| *last.lock().expect("no post panics") = Some(plan);
        let still = StillBackend::new("STILL", |id, events| events.link(id, LinkState::Up), note);
        registry.add(still).expect("the name is unused");
        let build = |name: &str| {
            Agent::builder(name)
                .backends(["STILL"])
                .registry(registry.clone())
                .build()
                .expect("STILL always opens")
        };
        let (agent, owner) = (build("costs"), build("costs-owner"));
        let grid = Grid::packed(LENGTH, BLOCKS);
        let register =
            |agent: &Agent| agent.register("blocks", sparse()).expect("STILL accepts any memory");
        let (local, _theirs) = (register(&agent), register(&owner));
        let peer = agent
            .connect(owner.metadata().expect("it has metadata"))
            .expect("both agents have the same release");
        let remote = peer.region("blocks").expect("it was registered").grid(grid).expect("it fits");
        Ends { local: local.grid(grid).expect("it fits"), remote, agent, peer, owner, posted }
    }

    fn plan(&self, (to, from): (&Arc<[u32]>, &Arc<[u32]>)) -> Plan {
        let (to, from) = (Arc::clone(to), Arc::clone(from));
        Plan::read(self.local.blocks(to), self.remote.blocks(from)).expect("the plan is valid")
    }

    fn bound(&self, plan: &Plan) -> Arc<BoundPlan> {
        self.post(plan);
        let last = self.posted.lock().expect("no post panics");
        Arc::clone(last.as_ref().expect("a plan was posted"))
    }

    fn post(&self, plan: &Plan) {
        self.peer
            .post(plan)
            .expect("the budget has space")
            .wait_blocking(PATIENCE)
            .expect("STILL settles at once");
    }

    fn end(self) {
        for agent in [self.agent, self.owner] {
            agent.shutdown(PATIENCE).join().expect("nothing is in flight");
        }
    }
}

/// Returns memory for all blocks without making its pages present.
fn sparse() -> Memory {
    Memory::pool(LENGTH as usize * BLOCKS as usize).pre_touch(false).build().expect("address space")
}

/// Returns the numbers below `count` in a random order, so that adjacent entries are rarely
/// neighbours.
fn scattered(count: u32, seed: u64) -> Arc<[u32]> {
    let mut state = seed;
    let mut numbers: Vec<u32> = (0..count).collect();
    for at in (1..numbers.len()).rev() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        numbers.swap(at, (state >> 33) as usize % (at + 1));
    }
    numbers.into()
}

/// Returns runs of 16 neighbours, with the runs in a random order.
fn in_runs(count: u32, seed: u64) -> Arc<[u32]> {
    scattered(count / 16, seed).iter().flat_map(|run| run * 16..run * 16 + 16).collect()
}

/// Walks all segments of a plan and returns their number.
fn walk(bound: &Arc<BoundPlan>) -> u64 {
    let mut count = 0;
    for segment in bound.segments(1 << 20) {
        black_box(segment);
        count += 1;
    }
    count
}

/// Makes a ticket, settles it and awaits its completion.
fn one_ticket() -> Poll<kvx::Result<()>> {
    let (mut done, ticket) = Completion::with_ticket();
    black_box(ticket).settle(Ok(()));
    Pin::new(&mut done).poll(&mut Context::from_waker(Waker::noop()))
}

/// Returns an agent with all available backends and [`REGIONS`] regions.
fn with_regions() -> Agent {
    let registry = kvx::registry();
    let available =
        registry.factories().iter().filter(|factory| factory.available(&Options::new()).is_ok());
    let names: Vec<_> = available.map(|factory| factory.name()).collect();
    let agent = Agent::builder("costs-metadata")
        .backends(names)
        .registry(registry.clone())
        .build()
        .expect("the backends are available");
    for layer in 0..REGIONS {
        let region =
            agent.register(&format!("layer.{layer}"), sparse()).expect("host memory registers");
        std::mem::forget(region); // keeps it registered until the agent shuts down
    }
    agent
}

fn criterion(mut criterion: Criterion) {
    let ends = Ends::new();
    let (to, from) = (scattered(BLOCKS, 1), scattered(BLOCKS, 2));
    let (to_runs, from_runs) = (in_runs(BLOCKS, 1), in_runs(BLOCKS, 2));

    let mut group = criterion.benchmark_group("plan of 100,000 blocks");
    group.throughput(Throughput::Elements(BLOCKS.into()));
    group.bench_function("scattered", |bencher| bencher.iter(|| ends.plan((&to, &from))));
    group.bench_function("in runs of 16", |bencher| {
        bencher.iter(|| ends.plan((&to_runs, &from_runs)))
    });
    group.finish();

    let mut group = criterion.benchmark_group("segments of 100,000 blocks");
    group.throughput(Throughput::Elements(BLOCKS.into()));
    for (name, lists) in
        [("scattered", (&to, &from)), ("in runs of 16, merged", (&to_runs, &from_runs))]
    {
        let plan = ends.plan(lists);
        let bound = ends.bound(&plan);
        group.bench_function(name, |bencher| bencher.iter(|| walk(&bound)));
    }
    group.finish();

    let mut group = criterion.benchmark_group("post");
    let empty: Arc<[u32]> = [].into();
    for (name, lists) in [
        ("no blocks", (&empty, &empty)),
        ("one block, routed and settled", (&to.slice(1), &from.slice(1))),
    ] {
        let plan = ends.plan(lists);
        group.bench_function(name, |bencher| bencher.iter(|| ends.post(&plan)));
    }
    let first = (to.slice(1000), from.slice(1000));
    group.bench_function("1000 blocks, planned, routed, bound and settled", |bencher| {
        bencher.iter(|| ends.post(&ends.plan((&first.0, &first.1))));
    });
    group.finish();

    let mut group = criterion.benchmark_group("ticket");
    group.bench_function("a completion's, made, settled and awaited", |bencher| {
        bencher.iter(one_ticket)
    });
    group.bench_function("a closure's, made and settled", |bencher| {
        bencher.iter_batched(
            || (),
            |()| Ticket::new(|result| drop(black_box(result))).settle(Ok(())),
            BatchSize::SmallInput,
        );
    });
    group.finish();
    ends.end();

    let agent = with_regions();
    let bytes = agent.metadata().expect("it has metadata");
    let mut group = criterion.benchmark_group("metadata of 64 regions");
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    group.bench_function("encode", |bencher| bencher.iter(|| agent.metadata()));
    group.bench_function("decode", |bencher| bencher.iter(|| Metadata::decode(&bytes)));
    group.finish();
    agent.shutdown(PATIENCE).join().expect("no peer is connected");
    criterion.final_summary();
}

trait Slice {
    fn slice(&self, count: usize) -> Arc<[u32]>;
}

impl Slice for Arc<[u32]> {
    fn slice(&self, count: usize) -> Arc<[u32]> {
        self[..count].into()
    }
}

/// Returns the median time of a call, in nanoseconds.
fn nanoseconds(times: usize, call: impl FnMut()) -> f64 {
    median_time(times, call).as_secs_f64() * 1e9
}

/// Prints the figures that have a limit.
fn bars() {
    let say = |cost: &str, value: f64| println!("{{\"cost\":\"{cost}\",\"value\":{value}}}");
    let ends = Ends::new();
    let (to, from) = (scattered(BLOCKS, 1), scattered(BLOCKS, 2));
    let (to_runs, from_runs) = (in_runs(BLOCKS, 1), in_runs(BLOCKS, 2));
    say("plan_us", nanoseconds(101, || drop(black_box(ends.plan((&to, &from))))) / 1e3);

    let (plan, runs) = (ends.plan((&to, &from)), ends.plan((&to_runs, &from_runs)));
    let (bound, bound_runs) = (ends.bound(&plan), ends.bound(&runs));
    let per_block =
        |bound: &Arc<BoundPlan>| nanoseconds(101, || assert!(walk(bound) > 0)) / f64::from(BLOCKS);
    say("expansion_ns", per_block(&bound));
    say("merging_ns", per_block(&bound_runs));
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    let segments = walk(&bound) + walk(&bound_runs);
    say("expansion_allocations", (ALLOCATIONS.load(Ordering::Relaxed) - before) as f64);
    assert!(
        segments > u64::from(BLOCKS) && segments < 2 * u64::from(BLOCKS),
        "segments of neighbours must merge, and only those"
    );

    // One call is shorter than the clock's resolution, so a thousand are timed together.
    const MANY: usize = 1000;
    let ticket = nanoseconds(201, || {
        for _ in 0..MANY {
            assert!(one_ticket().is_ready());
        }
    });
    say("ticket_ns", ticket / MANY as f64);
    ends.end();

    let agent = with_regions();
    say("metadata_bytes", agent.metadata().expect("it has metadata").len() as f64);
    agent.shutdown(PATIENCE).join().expect("no peer is connected");
}

fn main() {
    if std::env::args().any(|argument| argument == "--bars") {
        return bars();
    }
    criterion(Criterion::default().configure_from_args());
}
