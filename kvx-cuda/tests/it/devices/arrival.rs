//! Tests that data counts as arrived only once a device sees what network cards have written to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Grid, Plan};

use super::forgery::agent;
use super::{Bench, LONG, filled, until};

const FLUSH: &str = "cuFlushGPUDirectRDMAWrites";
const GRID: Grid = Grid::packed(4096, 16);
const LEN: usize = 64 << 10;
/// The time of a flush in the test.
const TIME: Duration = Duration::from_millis(300);

/// Transfers to device memory of both ends. Returns how often the device was flushed, and the
/// shortest time of the steps: a read, and a write with its notification.
fn transfer(bench: &Bench<'_>) -> (u64, Duration) {
    let [near, far] = ["near", "far"].map(|name| agent(name, Arc::clone(&bench.device) as _));
    let into = near.register("into", filled(&bench.device, &[0; LEN])).unwrap();
    let from = near.register("from", filled(&bench.device, &[3; LEN])).unwrap();
    let _source = far.register("source", filled(&bench.device, &[7; LEN])).unwrap();
    let _sink = far.register("sink", filled(&bench.device, &[0; LEN])).unwrap();
    let peer = near.connect(far.metadata().unwrap()).unwrap();
    let all = 0..GRID.count;
    let there = |name| peer.region(name).unwrap().grid(GRID).unwrap().blocks(all.clone());
    let here = |region: &kvx_core::Region| region.grid(GRID).unwrap().blocks(all.clone());
    let read = Plan::read(here(&into), there("source")).unwrap();
    let write = Plan::write(here(&from), there("sink")).unwrap();
    let before = bench.control.calls(FLUSH);
    let begun = Instant::now();
    peer.transfer(&read).deadline(LONG).post().unwrap().wait_blocking(LONG).unwrap();
    let first = begun.elapsed();
    let begun = Instant::now();
    let sent = peer.transfer(&write).notify(b"written").deadline(LONG).post().unwrap();
    until("the notification arrives", || far.try_notification().is_some());
    let second = begun.elapsed();
    sent.wait_blocking(LONG).unwrap();
    near.shutdown(LONG).wait_blocking(LONG).unwrap();
    far.shutdown(LONG).wait_blocking(LONG).unwrap();
    (bench.control.calls(FLUSH) - before, first.min(second))
}

/// For [`super::roles`]: a device that does not order writes of network cards.
pub(crate) fn flushed(bench: &Bench<'_>) {
    bench.control.command(&format!("slow {FLUSH} {}", TIME.as_micros()));
    let (flushes, time) = transfer(bench);
    assert_eq!(flushes, 2, "one for the read, one for the notification");
    assert!(time >= TIME, "a step ended in {time:?}, before its flush");
}

/// A device that orders them is not flushed.
pub(crate) fn not_flushed(bench: &Bench<'_>) {
    assert_eq!(transfer(bench).0, 0);
}
