//! Measures reads and writes between two processes, over every available backend.
//!
//! The program starts itself again as the process that owns the remote pool.

use std::io::{BufRead, Write};
use std::time::Duration;

use criterion::{Criterion, SamplingMode, Throughput};
use kvx::{Agent, Grid, Memory, Op, Options, Peer, Plan, Region};
use kvx_testkit::{Child, hex, unhex};

/// The environment variable of the owner's process that names its backend.
const OWNER: &str = "KVX_BENCH_OWNER";
/// Bytes of each pool and of each transfer: more than a CPU cache holds.
const POOL: u64 = 64 << 20;
/// The deadline of a transfer, a link or a shutdown.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time after which the owner exits in any case.
const LIFE: Duration = Duration::from_secs(1800);

/// Publishes a pool until standard input ends.
fn own(backend: &str) {
    std::thread::spawn(|| {
        std::thread::sleep(LIFE);
        std::process::exit(1);
    });
    let agent = kvx::agent("bench-owner").backends([backend]).build().expect("it is available");
    let pool = Memory::pool(POOL as usize).build().expect("64 MiB");
    let _pool = agent.register("pool", pool).expect("host memory");
    println!("{}", hex(&agent.metadata().expect("metadata")));
    std::io::stdout().flush().expect("the parent reads standard output");
    std::io::stdin().lock().lines().for_each(drop);
    agent.shutdown(PATIENCE).join().ok(); // the process exits in any case
}

/// An agent with one backend, connected to the owner.
struct Reader {
    agent: Agent,
    peer: Peer,
    pool: Region,
    _owner: Child,
}

impl Reader {
    fn connect(backend: &str) -> Self {
        let owner = Child::start_self(OWNER, backend).expect("this program starts");
        let metadata = unhex(&owner.hear(PATIENCE).expect("the owner's metadata"));
        let agent = kvx::agent("bench").backends([backend]).build().expect("it is available");
        let pool = agent
            .register("pool", Memory::pool(POOL as usize).build().expect("64 MiB"))
            .expect("host memory");
        let peer = agent.connect(&metadata).expect("the metadata is valid");
        peer.ready(PATIENCE).join().expect("a link");
        Reader { agent, peer, pool, _owner: owner }
    }

    fn plan(&self, op: Op, length: u64) -> Plan {
        let grid = Grid::packed(length, (POOL / length) as u32);
        // An odd stride visits each block once, because the count is a power of two, and never two
        // neighbours in a row.
        let order = |stride: u32| {
            (0..grid.count).map(|at| at.wrapping_mul(stride) % grid.count).collect::<Vec<_>>()
        };
        let ours = self.pool.grid(grid).expect("it fits").blocks(order(5));
        let theirs = self
            .peer
            .region("pool")
            .expect("the owner's")
            .grid(grid)
            .expect("it fits")
            .blocks(order(11));
        match op {
            Op::Read => Plan::read(ours, theirs),
            Op::Write => Plan::write(ours, theirs),
        }
        .expect("the plan is valid")
    }
}

fn main() {
    if let Ok(backend) = std::env::var(OWNER) {
        return own(&backend);
    }
    let mut criterion =
        Criterion::default().sample_size(20).measurement_time(Duration::from_secs(2));
    criterion = criterion.warm_up_time(Duration::from_millis(300)).configure_from_args();
    let registry = kvx::registry();
    for name in registry.names() {
        if let Err(why) = registry.require(name, &Options::new()) {
            println!("{name}: not measured: {why}");
            continue;
        }
        let reader = Reader::connect(name);
        let mut group = criterion.benchmark_group(name);
        group.throughput(Throughput::Bytes(POOL)).sampling_mode(SamplingMode::Flat);
        for op in [Op::Read, Op::Write] {
            for kib in [4, 64, 1024] {
                let plan = reader.plan(op, kib << 10);
                group.bench_function(
                    format!("{op} {kib} KiB x{}", (POOL >> 10) / kib),
                    |bencher| {
                        bencher.iter(|| {
                            let transfer = reader.peer.post(&plan).expect("the budget has space");
                            transfer.wait_blocking(PATIENCE).expect("the owner lives")
                        });
                    },
                );
            }
        }
        group.finish();
        drop(reader.pool);
        // An error does not matter: the owner is about to exit.
        reader.agent.shutdown(PATIENCE).join().ok();
    }
    criterion.final_summary();
}
