//! Measures small reads alone, and during a large transfer on the same link.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvx::{Grid, Plan, Transfer};
use serde::Serialize;

use super::arguments::Bench;
use super::bare;
use super::content;
use super::deadlines::DEADLINE;
use super::initiator::{Initiator, Plans, block_on};
use super::limits::{DataLanes, connect};
use super::points::{Backing, BenchOp, Pattern, Point, Shape, Wait, shuffled};
use super::pools::{PoolKind, Sizes};
use super::rounds::{quantile, round, timed};
use super::session::Session;
use crate::{Result, bytes};

/// The size of a small read.
const SMALL: u64 = 4096;
/// The block size of the large transfer.
pub(crate) const BLOCK: u64 = 1 << 20;
/// The most memory of the target: the large transfer reads it again and again.
const SOURCE: u64 = 256 << 20;
/// The number of turns of small reads, alone and during the large transfer.
const TURNS: usize = 5;

/// The printed record.
#[derive(Serialize)]
struct BulkRecord {
    mode: &'static str,
    backend: &'static str,
    bulk_bytes: u64,
    /// The number of large transfers that ended during the small reads.
    bulk_done: u64,
    small: LatencyPair,
    /// Latencies over bare connections, if the backend uses connections.
    bare: Option<LatencyPair>,
}

/// Latencies of small reads, alone and during a large transfer.
#[derive(Serialize)]
struct LatencyPair {
    alone_p50_us: f64,
    alone_p99_us: f64,
    beside_p50_us: f64,
    beside_p99_us: f64,
    /// The ratio of the 99th percentiles: during the large transfer to alone.
    times: f64,
}

impl LatencyPair {
    fn of(alone: &[f64], beside: &[f64]) -> Result<Self> {
        let us = |values: &[f64], part| {
            let seconds = quantile(values.iter().copied(), part).ok_or("no small read ended");
            seconds.map(|seconds| round(seconds * 1e6, 2))
        };
        let (alone_p99_us, beside_p99_us) = (us(alone, 0.99)?, us(beside, 0.99)?);
        let times = round(beside_p99_us / alone_p99_us, 2);
        let (alone_p50_us, beside_p50_us) = (us(alone, 0.5)?, us(beside, 0.5)?);
        Ok(LatencyPair { alone_p50_us, alone_p99_us, beside_p50_us, beside_p99_us, times })
    }
}

/// Returns the number of blocks of a large transfer of `bulk` bytes, which `flag` requested.
pub(crate) fn blocks_of(flag: &str, bulk: u64) -> Result<u32> {
    match u32::try_from(bulk / BLOCK) {
        Ok(0) => Err(format!("{flag} {bulk}: write at least {}", bytes::show(BLOCK)).into()),
        Ok(blocks) => Ok(blocks),
        Err(_) => Err(format!("{flag} {bulk}: write fewer bytes").into()),
    }
}

/// Measures one backend.
pub(crate) fn run(bench: &mut Bench<'_>, backend: &'static str, bulk: u64) -> Result<()> {
    let Bench { arguments, registry, output } = bench;
    let blocks = blocks_of("--beside-bulk", bulk)?;
    let ours = u64::from(blocks) * BLOCK + SMALL;
    let theirs = SOURCE.min(u64::from(blocks) * BLOCK);
    let about = Duration::from_secs_f64(2.0 * arguments.seconds + 3.0 * bulk as f64 / 1e9);
    let memory = bytes::show((ours + theirs) >> 20 << 20);
    eprintln!("{backend}: {memory} of memory in total, about {} s", about.as_secs().max(1));
    let sizes = (Sizes::kvx(ours), Sizes::kvx(theirs));
    let mut session = Session::start(&[backend], registry, &arguments.options, sizes, about)?;
    content::wipe(session.pools.get(PoolKind::Kvx)?, ours)?;

    let initiator = session.initiator(backend)?;
    let local = initiator.region(PoolKind::Kvx)?;
    let remote = initiator.peer.region(PoolKind::Kvx.name())?;
    let available = (theirs / BLOCK) as u32;
    let from: Vec<u32> = (0..blocks).map(|block| block % available).collect();
    let large = Plan::read(
        local.grid(Grid::packed(BLOCK, blocks))?.blocks(shuffled(blocks, arguments.seed)),
        remote.grid(Grid::packed(BLOCK, available))?.blocks(from),
    )?;
    let mut small = Plans::one(Plan::read(
        local.grid(Grid::packed(SMALL, 1).at(u64::from(blocks) * BLOCK))?.blocks([0]),
        remote.grid(Grid::packed(SMALL, 1))?.blocks([0]),
    )?);
    let budget = Duration::from_secs_f64(arguments.seconds / TURNS as f64);
    let (mut alone, mut beside, mut bulk_done) = (Vec::new(), Vec::new(), 0);
    initiator.round(&mut small, Wait::Async, budget / 10, 1)?;
    for _ in 0..TURNS {
        alone.extend(initiator.round(&mut small, Wait::Async, budget, 1)?.each);
        bulk_done += reads_beside(initiator, &mut small, &large, budget, &mut beside)?;
    }
    let bare = match backend {
        "TCP" => Some(bare_sockets(&mut session, available, budget)?),
        _ => None,
    };
    session.end()?;
    let record = BulkRecord {
        mode: "beside-bulk",
        backend,
        bulk_bytes: bulk,
        bulk_done,
        small: LatencyPair::of(&alone, &beside)?,
        bare,
    };
    output.record(&record, &sentence(&record))
}

/// Small reads while large transfers are in flight. Gives how many large ones have ended.
fn reads_beside(
    initiator: &Initiator,
    small: &mut Plans,
    large: &Plan,
    budget: Duration,
    each: &mut Vec<f64>,
) -> Result<u64> {
    let mut ended = 0;
    let mut running = initiator.post(large)?;
    let start = Instant::now();
    while start.elapsed() < budget {
        let before = Instant::now();
        block_on(initiator.post(small.next())?)?;
        each.push(before.elapsed().as_secs_f64());
        if let Some(result) = finished(&mut running) {
            result?;
            ended += 1;
            running = initiator.post(large)?;
        }
    }
    let settled = running.settled();
    drop(running);
    settled.wait_blocking(DEADLINE)?;
    Ok(ended)
}

/// Returns the result of a transfer that has ended.
fn finished(transfer: &mut Transfer) -> Option<kvx::Result<kvx::Report>> {
    match Pin::new(transfer).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

/// Measures the same without kvx: a request and its answer on one connection, concurrently with a
/// stream on others.
fn bare_sockets(session: &mut Session, blocks: u32, budget: Duration) -> Result<LatencyPair> {
    let base = session.pools.get(PoolKind::Kvx)?.address();
    let point = |block, count| {
        let shape = Shape { block, count, lists: 1, pattern: Pattern::Scattered, seed: 1 };
        Point { backend: "TCP", op: BenchOp::Read, shape, memory: Backing::Kvx, wait: Wait::Block }
    };
    let one = DataLanes { count: 1, ..session.data };
    let mut stream = connect(&point(BLOCK, blocks), base, &mut session.target, session.data)?;
    let mut request =
        connect(&point(SMALL, 1), base + u64::from(blocks) * BLOCK, &mut session.target, one)?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        alone.extend(timed(budget, 1, |_, _| bare::ask(&mut request, false, 1))?.each);
        let enough = AtomicBool::new(false);
        let mut streaming = || -> std::io::Result<()> {
            while !enough.load(Ordering::Relaxed) {
                bare::ask(&mut stream, false, 1)?;
            }
            Ok(())
        };
        let turn = std::thread::scope(|scope| {
            let streaming = scope.spawn(&mut streaming);
            let turn = timed(budget, 1, |_, _| bare::ask(&mut request, false, 1));
            enough.store(true, Ordering::Relaxed);
            streaming.join().map_err(|_| "the bare stream panicked")??;
            turn
        })?;
        beside.extend(turn.each);
    }
    LatencyPair::of(&alone, &beside)
}

fn sentence(record: &BulkRecord) -> String {
    let part = |pair: &LatencyPair| {
        let LatencyPair { alone_p50_us, alone_p99_us, beside_p50_us, beside_p99_us, times } = pair;
        format!(
            "alone p50 {alone_p50_us} us, p99 {alone_p99_us} us; during it p50 {beside_p50_us} us, p99 {beside_p99_us} us: \
             {times} times"
        )
    };
    let bare = record
        .bare
        .as_ref()
        .map_or_else(String::new, |bare| format!("; bare connections: {}", part(bare)));
    let (backend, bulk) = (record.backend, bytes::show(record.bulk_bytes));
    format!(
        "{backend} reads of 4 KiB alone and during a transfer of {bulk}: {}{bare}",
        part(&record.small)
    )
}
