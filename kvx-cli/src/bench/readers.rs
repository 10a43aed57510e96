//! Measures many agents that read from one target concurrently, and whether each gets its share.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use kvx::ErrorKind;
use serde::Serialize;

use super::arguments::Bench;
use super::deadlines::DEADLINE;
use super::initiator::Initiator;
use super::points::{Backing, BenchOp, Pattern, Shape};
use super::pools::{Pools, Sizes};
use super::rounds::round;
use super::target::TargetProcess;
use crate::{Result, bytes};

/// The shape that each reader reads again and again.
const SHAPE: Shape =
    Shape { block: 64 << 10, count: 64, lists: 1, pattern: Pattern::Scattered, seed: 1 };

/// The printed record.
#[derive(Serialize)]
struct ReadersRecord {
    mode: &'static str,
    backend: &'static str,
    readers: u32,
    seconds: f64,
    /// The rate of all readers together.
    gbps: f64,
    /// The shares of the slowest and the fastest reader, relative to the mean.
    least_of_mean: f64,
    most_of_mean: f64,
}

/// Measures one backend.
pub(crate) fn run(bench: &mut Bench<'_>, backend: &'static str, readers: u32) -> Result<()> {
    let Bench { arguments, registry, output } = bench;
    let about = Duration::from_secs_f64(arguments.seconds + f64::from(readers) / 20.0);
    let memory = bytes::show(SHAPE.bytes() * u64::from(readers + 1));
    eprintln!(
        "{backend}: {readers} readers, {memory} of memory in total, about {} s",
        about.as_secs().max(1)
    );
    let life = 10 * about + Duration::from_secs(600);
    let target = TargetProcess::start(
        &[backend],
        &arguments.options,
        Sizes::kvx(SHAPE.bytes()),
        life,
        DEADLINE,
    )?;
    let connect = |reader| {
        let pools = Pools::of(Sizes::kvx(SHAPE.bytes()))?;
        let label = format!("bench-{backend}-{reader}");
        Initiator::connect(&label, backend, registry, &arguments.options, &pools, &target)
    };
    let initiators = (0..readers).map(connect).collect::<Result<Vec<_>>>()?;
    let window = Duration::from_secs_f64(arguments.seconds);
    let (counts, took) = read_all(&initiators, window)?;
    for initiator in initiators {
        initiator.end()?;
    }
    target.end();

    let total: u64 = counts.iter().sum();
    let mean = total as f64 / counts.len() as f64;
    let (least, most) =
        (counts.iter().min().copied().unwrap_or(0), counts.iter().max().copied().unwrap_or(0));
    let part = |count: u64| round(count as f64 / mean, 3);
    let gbps = round(total as f64 * SHAPE.bytes() as f64 / took.as_secs_f64() / 1e9, 3);
    let (least_of_mean, most_of_mean) = (part(least), part(most));
    let seconds = took.as_secs_f64();
    let record = ReadersRecord {
        mode: "readers",
        backend,
        readers,
        seconds,
        gbps,
        least_of_mean,
        most_of_mean,
    };
    let sentence = format!(
        "{backend} with {readers} readers: {gbps} GB/s together; the slowest got {least_of_mean} of the mean, the \
         fastest {most_of_mean}"
    );
    output.record(&record, &sentence)
}

/// Runs all readers continuously from one thread. Returns the number of reads of each, and the
/// elapsed time.
fn read_all(initiators: &[Initiator], window: Duration) -> Result<(Vec<u64>, Duration)> {
    let (woken, ready) = mpsc::channel();
    let mut readers = Vec::new();
    for (at, initiator) in initiators.iter().enumerate() {
        let mut plans = initiator.plans(BenchOp::Read, SHAPE, Backing::Kvx)?;
        let plan = plans.next().clone();
        // Read once before the measurement, so that no reader pays for its first transfer.
        initiator.post(&plan)?.wait_blocking(DEADLINE)?;
        let waker = Waker::from(Arc::new(ReaderWaker { at, woken: woken.clone() }));
        readers.push((plan, waker));
    }
    let mut transfers = readers
        .iter()
        .zip(initiators)
        .map(|((plan, _), initiator)| initiator.post(plan))
        .collect::<Result<Vec<_>>>()?;
    let mut counts = vec![0; initiators.len()];
    (0..initiators.len()).try_for_each(|at| woken.send(at))?;
    let start = Instant::now();
    while start.elapsed() < window {
        let at: usize = ready.recv_timeout(DEADLINE).map_err(|_| "no read ended in time")?;
        let (plan, waker) = &readers[at];
        while let Poll::Ready(result) =
            Pin::new(&mut transfers[at]).poll(&mut Context::from_waker(waker))
        {
            result?;
            counts[at] += 1;
            transfers[at] = initiators[at].post(plan)?;
        }
    }
    let took = start.elapsed();
    for transfer in transfers {
        match transfer.wait_blocking(DEADLINE) {
            Err(error) if error.kind() != ErrorKind::Cancelled => return Err(error.into()),
            _ => {}
        }
    }
    Ok((counts, took))
}

/// A waker that names the reader to poll.
struct ReaderWaker {
    at: usize,
    woken: Sender<usize>,
}

impl Wake for ReaderWaker {
    fn wake(self: Arc<Self>) {
        // An error: the measurement is over.
        self.woken.send(self.at).ok();
    }
}
