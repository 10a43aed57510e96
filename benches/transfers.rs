//! Reads and writes between two processes, over every backend that works here.
//!
//! This program starts itself again as the process that owns the other side's pool.

use std::io::{BufRead, Write};
use std::time::Duration;

use criterion::{Criterion, SamplingMode, Throughput};
use kvx::{Agent, Grid, Memory, Op, Options, Peer, Plan, Region};
use kvx_testkit::Child;

/// Set in the owner's process: the backend that it opens.
const OWNER: &str = "KVX_BENCH_OWNER";
/// Bytes of the pool on each side, and of each transfer: more than a cache holds.
const POOL: u64 = 64 << 20;
/// How long a transfer, a link or a shutdown may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest life of an owner.
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
    let metadata: String =
        agent.metadata().expect("it has some").iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{metadata}");
    std::io::stdout().flush().expect("somebody reads it");
    std::io::stdin().lock().lines().for_each(drop);
    agent.shutdown(PATIENCE).join().ok(); // the process ends in any case
}

/// One backend's agent, connected with the owner's.
struct Reader {
    agent: Agent,
    peer: Peer,
    pool: Region,
    _owner: Child,
}

impl Reader {
    fn connect(backend: &str) -> Self {
        let owner = Child::start_self(OWNER, backend).expect("this program starts");
        let text = owner.hear(PATIENCE).expect("the owner's metadata");
        let metadata: Vec<u8> = (0..text.len() / 2)
            .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hexadecimal"))
            .collect();
        let agent = kvx::agent("bench").backends([backend]).build().expect("it is available");
        let pool = agent
            .register("pool", Memory::pool(POOL as usize).build().expect("64 MiB"))
            .expect("host memory");
        let peer = agent.connect(&metadata).expect("metadata of this release");
        peer.ready(PATIENCE).join().expect("a link");
        Reader { agent, peer, pool, _owner: owner }
    }

    fn plan(&self, op: Op, length: u64) -> Plan {
        let grid = Grid::packed(length, (POOL / length) as u32);
        // Strides that share no factor with the power of two that the count is: every block once, no two neighbours.
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
        .expect("a right plan")
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
                            let transfer = reader.peer.post(&plan).expect("the budget has room");
                            transfer.wait_blocking(PATIENCE).expect("the owner lives")
                        });
                    },
                );
            }
        }
        group.finish();
        drop(reader.pool);
        reader.agent.shutdown(PATIENCE).join().ok(); // the owner is about to end
    }
    criterion.final_summary();
}
