//! `kvx bench`: what moving blocks costs, beside a limit that moves the same blocks without kvx.
//!
//! A target process of its own owns the other side's memory. Every point moves one list of blocks again and again, in
//! rounds: kvx, the limit, and the program beside if there is one, in turn. What is printed is the median of the
//! rounds, and the median of the ratios of each round; what arrived is compared byte by byte.

mod answers;
mod bare;
mod beside;
mod bulk;
mod content;
mod cpu;
mod device_limits;
mod driver;
mod figures;
mod idle;
mod initiator;
mod kernels;
mod limit;
mod measure;
mod notices;
mod points;
mod pools;
mod progress;
mod readers;
mod rounds;
mod sealed;
mod session;
mod target;

use std::io::Write;
use std::time::Duration;

use clap::Args;
use kvx::{Options, Registry};

pub(crate) use self::answers::{BesideArguments, run as answer};
use self::beside::Beside;
use self::figures::Output;
use self::points::{Backing, BenchOp, Pattern, Point, Wait};
use self::pools::Sizes;
use self::progress::Bar;
use self::session::Session;
pub(crate) use self::target::{TargetArguments, serve};
use crate::{Result, bytes};

/// How long a link may take to come up, a transfer or a shutdown to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long a round, or an answer of the target, may take.
const ANSWER_PATIENCE: Duration = Duration::from_secs(120);

/// What stands behind `bench` on the command line.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The backends to measure.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "SHM,TCP")]
    backend: Vec<String>,
    /// Read from the target, or write to it.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "read,write")]
    op: Vec<BenchOp>,
    /// Sizes of a block.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = bytes::parse, default_value = "4K,64K,1M")]
    block: Vec<u64>,
    /// Numbers of blocks in a transfer.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,64,1024,8192")]
    count: Vec<u32>,
    /// Whether the blocks of a transfer are shuffled on both sides or follow each other.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "scattered")]
    pattern: Vec<Pattern>,
    /// Pools of kvx's own, memory that a program brings along, or memory of the first GPU: on both sides, or with a
    /// pool of kvx's own at the target (device-host) or here (host-device).
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "kvx")]
    memory: Vec<Backing>,
    /// Wait on this thread, which lends a hand, or like `.await`.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "block")]
    wait: Vec<Wait>,
    /// Rounds of a point; the ratio of fewer than 11 has their number beside it.
    #[arg(long, value_name = "N", default_value_t = figures::ENOUGH_ROUNDS)]
    rounds: usize,
    /// About how long a point takes, all rounds of all parties together.
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// Print JSON lines, also on a terminal.
    #[arg(long)]
    json: bool,
    /// Points that move more bytes in one transfer are left out.
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, default_value = "1G")]
    max_total: u64,
    /// Memory a side, where a transfer does not need more: one transfer after the other moves other blocks of it, so
    /// that what is measured does not come out of a cache.
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, default_value = "256M")]
    pool: u64,
    /// A program that moves the same blocks in rounds of its own; BESIDE.md says how it is asked.
    #[arg(long, value_name = "PROGRAM")]
    beside: Option<String>,
    /// Options of both agents: the JSON object kv_connector_extra_config.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    options: String,
    /// Where the shuffles start.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Instead of points: small reads alone, and beside a transfer of so many bytes on the same link.
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, conflicts_with_all = ["beside", "readers", "idle"])]
    beside_bulk: Option<u64>,
    /// Instead of points: notifications after quiet, and beside transfers of so many bytes between the same two agents.
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, conflicts_with_all = ["beside", "beside_bulk", "readers", "idle", "op", "pattern", "memory"])]
    notices_beside: Option<u64>,
    /// Instead of points: so many agents read from the target at once.
    #[arg(long, value_name = "N", conflicts_with_all = ["beside", "idle"])]
    readers: Option<u32>,
    /// Instead of points: CPU time of both processes while they are connected and idle for so many seconds.
    #[arg(long, value_name = "S", conflicts_with = "beside")]
    idle: Option<u64>,
    /// Instead of points: blocks collected and spread by the kernels of the first GPU, beside one copy of as many
    /// bytes.
    #[arg(long, conflicts_with_all = ["beside", "beside_bulk", "notices_beside", "readers", "idle", "backend", "op", "pattern", "memory", "wait"])]
    kernels: bool,
}

/// Runs the bench. `for_people`: they read its output, unless they have asked for JSON.
pub(crate) fn run(
    arguments: &Arguments,
    registry: &Registry,
    out: &mut dyn Write,
    for_people: bool,
) -> Result<()> {
    check(arguments)?;
    let options = Options::parse(&arguments.options)?;
    let mut output = Output::new(out, arguments.json || !for_people);
    if arguments.kernels {
        return kernels::run(arguments, &mut output);
    }
    let mut backends = Vec::new();
    for written in &arguments.backend {
        let name = registry.require(written, &options)?.0.name();
        if !backends.contains(&name) {
            backends.push(name);
        }
    }
    for backend in &backends {
        if let Some(bytes) = arguments.beside_bulk {
            bulk::run(arguments, backend, registry, bytes, &mut output)?;
        } else if let Some(bytes) = arguments.notices_beside {
            notices::run(arguments, backend, registry, bytes, &mut output)?;
        } else if let Some(readers) = arguments.readers {
            readers::run(arguments, backend, registry, readers, &mut output)?;
        } else if let Some(seconds) = arguments.idle {
            idle::run(arguments, backend, registry, seconds, &mut output)?;
        } else {
            return points(arguments, &backends, registry, &mut output);
        }
    }
    Ok(())
}

fn check(arguments: &Arguments) -> Result<()> {
    if let Some(block) =
        arguments.block.iter().find(|block| **block == 0 || **block > 1 << 30 || **block % 8 != 0)
    {
        return Err(format!("--block {block}: write a multiple of 8 of at most 1 GiB").into());
    }
    if arguments.count.contains(&0) || arguments.rounds == 0 || arguments.readers == Some(0) {
        return Err("--count, --rounds and --readers are at least 1".into());
    }
    if !(arguments.seconds > 0.0 && arguments.seconds <= 86_400.0) {
        return Err(format!("--seconds {}: write a time of up to a day", arguments.seconds).into());
    }
    Ok(())
}

/// Measures every point of the sweep.
fn points(
    arguments: &Arguments,
    backends: &[&'static str],
    registry: &Registry,
    output: &mut Output<'_>,
) -> Result<()> {
    let (points, left_out) = points::sweep(arguments, backends);
    for point in &left_out {
        let (total, most) = (bytes::show(point.shape.bytes()), bytes::show(arguments.max_total));
        eprintln!("left out: {point} moves {total} a transfer, more than --max-total {most}");
    }
    if points.is_empty() {
        return Err("no point is left to be measured".into());
    }
    let sizes = points::memory(&points);
    let about = duration(arguments, &points);
    let (count, about_s) = (points.len(), about.as_secs().max(1));
    let most = |of: fn(Sizes) -> u64| of(sizes.0).max(of(sizes.1));
    let memory = match (most(Sizes::on_host), most(Sizes::on_device)) {
        (host, 0) => format!("{} of memory a side", bytes::show(host)),
        (host, device) => {
            let host = if host > 0 {
                format!("{} of memory and ", bytes::show(host))
            } else {
                String::new()
            };
            format!("{host}{} of the GPU's a side, and twice as much beside", bytes::show(device))
        }
    };
    eprintln!("{count} points, {memory}, about {about_s} s");
    let mut session = Session::start(backends, registry, &arguments.options, sizes, about)?;
    let mut beside = arguments.beside.as_deref().map(Beside::start).transpose()?;
    let mut bar = Bar::of(points.len() * arguments.rounds);
    let mut wrong = 0;
    for point in &points {
        let step = || bar.step(&point.to_string());
        let figures = measure::point(&mut session, point, beside.as_mut(), arguments, step)?;
        bar.clear();
        wrong += usize::from(!figures.verified);
        output.figures(&figures)?;
    }
    if let Some(beside) = beside {
        beside.end();
    }
    session.end()?;
    if wrong > 0 {
        return Err(format!("at {wrong} of {} points the wrong bytes arrived", points.len()).into());
    }
    Ok(())
}

/// About how long the points take, on a machine that moves 2e9 bytes a second.
fn duration(arguments: &Arguments, points: &[Point]) -> Duration {
    let parties = if arguments.beside.is_some() { 3.0 } else { 2.0 };
    let once = |point: &Point| point.shape.bytes() as f64 / 2e9;
    let seconds = points.iter().map(|point| {
        // Filling and wiping pass over the memory four times; what is compared is less.
        let around = 4.0 * point.shape.memory() as f64 / 2e9;
        arguments.seconds.max(parties * arguments.rounds as f64 * once(point))
            + around
            + 6.0 * once(point)
    });
    Duration::from_secs_f64(seconds.sum())
}
