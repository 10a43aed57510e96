//! Measures the delay of notifications after quiet, and during large transfers between the same
//! agents.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvx::{Agent, Grid, Options, Peer, Plan};
use serde::Serialize;

use super::arguments::Bench;
use super::bulk::{BLOCK, blocks_of};
use super::deadlines::DEADLINE;
use super::initiator::block_on;
use super::points::{Wait, shuffled};
use super::pools::{PoolKind, Pools, Sizes};
use super::rounds::{quantile, round};
use crate::{Result, bytes};

/// The content of a notification.
const SAID: &[u8] = b"moved";
/// The quiet time before a notification without transfers.
const QUIET: Duration = Duration::from_millis(200);
/// The pause between two notifications during transfers: longer than a thread polls before it
/// sleeps.
const GAP: Duration = Duration::from_millis(3);
/// The fewest notifications of either kind: fewer have no meaningful median.
const LEAST: usize = 11;

/// The printed record.
#[derive(Serialize)]
struct NotificationsRecord {
    mode: &'static str,
    backend: &'static str,
    wait: Wait,
    bulk_bytes: u64,
    /// The number of large transfers that ended during the notifications.
    bulk_done: u64,
    alone: Delay,
    beside: Delay,
}

/// The delay from the call that sends a notification until a waiting thread has it.
#[derive(Serialize)]
struct Delay {
    count: usize,
    p50_us: f64,
    p90_us: f64,
    p99_us: f64,
}

impl Delay {
    fn of(each: &[f64]) -> Result<Self> {
        let us = |part| {
            let seconds = quantile(each.iter().copied(), part).ok_or("no notification arrived")?;
            Result::Ok(round(seconds * 1e6, 1))
        };
        Ok(Delay { count: each.len(), p50_us: us(0.5)?, p90_us: us(0.9)?, p99_us: us(0.99)? })
    }
}

/// Measures one backend. Both agents are in this process, so that one clock times the send and the
/// arrival.
pub(crate) fn run(bench: &mut Bench<'_>, backend: &'static str, bulk: u64) -> Result<()> {
    let Bench { arguments, registry, output } = bench;
    let blocks = blocks_of("--notices-beside", bulk)?;
    let bulk = u64::from(blocks) * BLOCK;
    let often = |gap: Duration| ((arguments.seconds / gap.as_secs_f64()) as usize).max(LEAST);
    let (alone, beside) = (often(QUIET), often(GAP));
    let about = QUIET * alone as u32 + GAP * (beside * arguments.wait.len()) as u32;
    eprintln!("{backend}: {} of memory, about {} s", bytes::show(2 * bulk), about.as_secs().max(1));

    let sizes = Sizes::kvx(bulk);
    let (ours, theirs) = (Pools::of(sizes)?, Pools::of(sizes)?);
    let agent = |pools: &Pools, label| -> Result<Agent> {
        let options = Options::parse(&arguments.options)?;
        Ok(pools
            .agent(&format!("bench-{label}-{backend}"))
            .backends([backend])
            .options(options)
            .registry(registry.clone())
            .build()?)
    };
    let (speaker, hearer) = (agent(&ours, "speaks")?, agent(&theirs, "hears")?);
    let name = PoolKind::Kvx.name();
    let local = speaker.register(name, ours.get(PoolKind::Kvx)?.clone())?;
    let _theirs = hearer.register(name, theirs.get(PoolKind::Kvx)?.clone())?;
    let peer = speaker.connect(&hearer.metadata()?)?;
    peer.ready(DEADLINE).join()?;
    let grid = Grid::packed(BLOCK, blocks);
    let plan = Plan::read(
        local.grid(grid)?.blocks(shuffled(blocks, arguments.seed)),
        peer.region(name)?.grid(grid)?.blocks(shuffled(blocks, arguments.seed + 1)),
    )?;
    peer.transfer(&plan).deadline(DEADLINE).post()?.wait_blocking(DEADLINE)?;

    let quiet = delays(&peer, &hearer, alone, QUIET)?;
    for &wait in &arguments.wait {
        let (busy, bulk_done) = beside_transfers(&peer, &hearer, &plan, wait, beside)?;
        let (alone, beside) = (Delay::of(&quiet)?, Delay::of(&busy)?);
        let record = NotificationsRecord {
            mode: "notices-beside",
            backend,
            wait,
            bulk_bytes: bulk,
            bulk_done,
            alone,
            beside,
        };
        output.record(&record, &sentence(&record))?;
    }
    drop((local, _theirs));
    for agent in [speaker, hearer] {
        agent.shutdown(DEADLINE).join()?;
    }
    Ok(())
}

/// Returns the seconds that each of `count` notifications takes, sent with pauses of `gap`.
fn delays(peer: &Peer, hearer: &Agent, count: usize, gap: Duration) -> Result<Vec<f64>> {
    let (heard, arrivals) = mpsc::channel();
    std::thread::scope(move |scope| {
        scope.spawn(move || {
            for _ in 0..count {
                let arrived = hearer.notification(DEADLINE).join().map(|_| Instant::now());
                if heard.send(arrived).is_err() {
                    break; // the sender has given up
                }
            }
        });
        let mut each = Vec::with_capacity(count);
        for _ in 0..count {
            std::thread::sleep(gap);
            let sent = Instant::now();
            let acknowledged = peer.notify(SAID, DEADLINE);
            each.push((arrivals.recv()?? - sent).as_secs_f64());
            acknowledged.wait_blocking(DEADLINE)?;
        }
        Ok(each)
    })
}

/// Measures the delays while another thread moves the plan again and again. Also returns the number
/// of its transfers.
fn beside_transfers(
    peer: &Peer,
    hearer: &Agent,
    plan: &Plan,
    wait: Wait,
    count: usize,
) -> Result<(Vec<f64>, u64)> {
    let enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| -> kvx::Result<u64> {
            let mut ended = 0;
            while !enough.load(Ordering::Relaxed) {
                let transfer = peer.transfer(plan).deadline(DEADLINE).post()?;
                match wait {
                    Wait::Block => transfer.wait_blocking(DEADLINE)?,
                    Wait::Async => block_on(transfer)?,
                };
                ended += 1;
            }
            Ok(ended)
        });
        let each = delays(peer, hearer, count, GAP);
        enough.store(true, Ordering::Relaxed);
        let ended = moving.join().map_err(|_| "the transfers panicked")??;
        Ok((each?, ended))
    })
}

fn sentence(record: &NotificationsRecord) -> String {
    let NotificationsRecord { backend, bulk_bytes, bulk_done, alone, beside, wait, .. } = record;
    format!(
        "{backend} notifications: alone p50 {} us, p99 {} us; during {bulk_done} reads of {} ({wait:?}) p50 {} us, p90 {} us, \
         p99 {} us",
        alone.p50_us,
        alone.p99_us,
        bytes::show(*bulk_bytes),
        beside.p50_us,
        beside.p90_us,
        beside.p99_us,
    )
}
