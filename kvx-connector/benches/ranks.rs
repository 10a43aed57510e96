//! The cost of a step in the scheduler's process, by the number of ranks in processes of their own.
//! `--bars` prints the figure that `cargo xtask limits` asks for: what each rank adds.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot run says why")]

/// The pools.
#[allow(dead_code, reason = "only what ranks need")]
#[path = "../tests/it/runtime/rig.rs"]
mod rig;

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group};
use kvx_connector::{Connector, Rank};
use kvx_testkit::Child;
use kvx_vllm::engine::{Allocation, Arrival, RequestId, WorkerRank};
use kvx_vllm::params::TransferParams;

use crate::rig::{BLOCK, BLOCKS, LIMIT};

/// The variable that tells a process of this program its rank, and where it joins.
const VARIABLE: &str = "KVX_BENCH_RANK";
/// The number of loads in a step.
const LOADS: u32 = 8;

/// Builds parameters of a load that fails at its handshake, because nothing listens at the port. So
/// only the step is measured.
fn params() -> TransferParams {
    let blocks: Vec<u32> = (0..BLOCKS).collect();
    TransferParams::from_value(&serde_json::json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "nobody",
        "remote_request_id": "r", "remote_block_ids": [blocks], "remote_host": "127.0.0.1", "remote_port": 1,
        "tp_size": 16, "remote_num_tokens": BLOCKS * BLOCK,
    }))
    .unwrap()
}

/// Makes one step that orders loads of 64 blocks. Ends when its orders are on their way to the last
/// rank.
fn step(
    connector: &Connector,
    ranks: &[Rank],
    params: &TransferParams,
    number: &mut u64,
) -> Duration {
    let blocks: Vec<u32> = (0..BLOCKS).collect();
    for _ in 0..LOADS {
        *number += 1;
        let request: RequestId = format!("request-{number}").into();
        let tokens = BLOCKS * BLOCK;
        let arrival = Arrival {
            request: &request,
            prompt_tokens: tokens,
            params: Some(params),
            deadline: None,
        };
        connector.on_new_request(arrival).unwrap();
        let fill = rig::lists(&blocks);
        let allocation = Allocation { fill, computed: 0, external: tokens };
        connector.update_state_after_alloc(&request, allocation).unwrap();
    }
    let began = Instant::now();
    connector.step();
    ranks.iter().for_each(Rank::start_load_kv);
    let took = began.elapsed();
    let mut open = LOADS as usize;
    while open > 0 {
        assert!(connector.outcomes_ready_blocking(LIMIT), "a load has no outcome");
        open -= connector.outcomes().len();
    }
    took
}

/// An engine whose ranks have joined.
struct Joined {
    connector: Connector,
    ranks: Vec<Rank>,
    params: TransferParams,
    number: u64,
    _processes: Vec<Child>,
}

impl Joined {
    fn new(tp: u32) -> Self {
        let connector = rig::builder("engine", "{}").workers(tp, 1).build_blocking().unwrap();
        let path =
            std::env::temp_dir().join(format!("kvx-bench-ranks-{}-{tp}", std::process::id()));
        let whole = connector.group(&path, LIMIT);
        let start = |rank: u32| Child::start_self(VARIABLE, &format!("{} {rank}", path.display()));
        let processes = (0..tp).map(start).collect::<Result<_, _>>().unwrap();
        whole.wait_blocking(LIMIT).unwrap();
        let ranks = (0..tp).map(|tp| connector.rank(WorkerRank { pp: 0, tp }).unwrap()).collect();
        Joined { connector, ranks, params: params(), number: 0, _processes: processes }
    }

    fn step(&mut self) -> Duration {
        step(&self.connector, &self.ranks, &self.params, &mut self.number)
    }

    fn end(self) {
        self.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    }
}

fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("a step of 8 loads of 64 blocks");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    for tp in [1, 4, 16] {
        let mut joined = Joined::new(tp);
        group.bench_function(format!("{tp} joined ranks"), |bencher| {
            bencher.iter_custom(|times| (0..times).map(|_| joined.step()).sum::<Duration>());
        });
        joined.end();
    }
    group.finish();
}

/// Prints the microseconds that each additional rank adds to a step, from one to sixteen ranks, in
/// interleaved rounds.
fn bars() {
    let mut engines = [Joined::new(1), Joined::new(16)];
    let mut round = || engines.each_mut().map(|engine| engine.step().as_secs_f64());
    round();
    let mut added: Vec<_> =
        (0..101).map(|_| round()).map(|[one, all]| (all - one) / 15.0 * 1e6).collect();
    added.sort_unstable_by(f64::total_cmp);
    println!("{{\"cost\":\"rank_us\",\"value\":{}}}", added[added.len() / 2]);
    engines.into_iter().for_each(Joined::end);
}

/// Runs a rank, which joins and lives until its engine ends.
fn serve(spec: &str) {
    let [path, rank] = spec.split(' ').collect::<Vec<_>>()[..] else { panic!("{spec}") };
    let rank = WorkerRank { pp: 0, tp: rank.parse().unwrap() };
    let joined = Rank::join(path, rank, rig::registry(), LIMIT).unwrap();
    let pool = rig::pool(rig::HEADS);
    joined.register(rig::caches(&pool, rig::HEADS), [Arc::clone(&pool)]).unwrap();
    joined.ended_blocking(Duration::from_secs(600));
}

criterion_group!(benches, steps);

fn main() {
    if let Ok(spec) = std::env::var(VARIABLE) {
        return serve(&spec);
    }
    if std::env::args().any(|argument| argument == "--bars") {
        return bars();
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
