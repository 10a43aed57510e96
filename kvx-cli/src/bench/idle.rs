//! Measures the CPU time of two processes that are connected and idle.

use std::time::Duration;

use serde::Serialize;

use super::arguments::Bench;
use super::cpu;
use super::points::{Backing, BenchOp, Pattern, Shape, Wait};
use super::pools::Sizes;
use super::rounds::round;
use super::session::Session;
use crate::Result;

/// The shape of the transfers before the measurement, which set up everything that the first
/// transfer needs.
const SHAPE: Shape =
    Shape { block: 4096, count: 64, lists: 1, pattern: Pattern::Scattered, seed: 1 };
/// The time for both processes to become idle afterwards.
const SETTLE: Duration = Duration::from_millis(500);

/// The printed record.
#[derive(Serialize)]
struct IdleRecord {
    mode: &'static str,
    backend: &'static str,
    seconds: u64,
    cpu_ms: f64,
    target_cpu_ms: f64,
}

/// Measures one backend.
pub(crate) fn run(bench: &mut Bench<'_>, backend: &'static str, seconds: u64) -> Result<()> {
    let Bench { arguments, registry, output } = bench;
    eprintln!("{backend}: next to no memory, about {} s", seconds + 1);
    let sizes = Sizes::kvx(SHAPE.bytes());
    let session = Session::start(
        &[backend],
        registry,
        &arguments.options,
        (sizes, sizes),
        Duration::from_secs(seconds),
    )?;
    let initiator = session.initiator(backend)?;
    for op in [BenchOp::Read, BenchOp::Write] {
        let mut plans = initiator.plans(op, SHAPE, Backing::Kvx)?;
        initiator.round(&mut plans, Wait::Async, Duration::ZERO, 1)?;
    }
    std::thread::sleep(SETTLE);
    let both = || (cpu::of(std::process::id()), cpu::of(session.target.pid()));
    let before = both();
    std::thread::sleep(Duration::from_secs(seconds));
    let after = both();
    let ms = |after: Duration, before| round(after.saturating_sub(before).as_secs_f64() * 1e3, 3);
    let (cpu_ms, target_cpu_ms) = (ms(after.0, before.0), ms(after.1, before.1));
    session.end()?;
    let record = IdleRecord { mode: "idle", backend, seconds, cpu_ms, target_cpu_ms };
    let sentence = format!(
        "{backend} idle for {seconds} s: {cpu_ms} ms of CPU, {target_cpu_ms} ms in the target's process"
    );
    output.record(&record, &sentence)
}
