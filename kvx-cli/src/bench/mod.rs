//! `kvx bench`: measures the cost of moving blocks, next to a limit that moves the same blocks
//! without kvx.
//!
//! A separate target process owns the other side's memory. Every point moves one list of blocks
//! again and again, in rounds: kvx, the limit, and the companion program if there is one, in turn.
//! The bench prints the median of the rounds, and the median of the ratios of each round, and
//! compares the bytes that arrived.
//!
//! Layers, each of which imports only from those before it:
//! 1. `points`, `pools`, `rounds`, `cpu`, `deadlines`: points, memory and timing;
//! 2. `bare`, `driver`, `sealed`, `access`, `content`: moves without kvx, and their bytes;
//! 3. `target`, `initiator`, `device_limits`, `limits`, `session`: both processes and the limits;
//! 4. `figures`, `arguments`, `companion`, `measure`: a point and its figures;
//! 5. `bulk`, `notifications`, `readers`, `idle`, `kernels`, `companion_mode`: the other modes.

mod access;
mod arguments;
pub(crate) mod bare;
mod bulk;
mod companion;
mod companion_mode;
pub(crate) mod content;
mod cpu;
mod deadlines;
mod device_limits;
mod driver;
mod figures;
mod idle;
mod initiator;
mod kernels;
mod limits;
mod measure;
mod notifications;
pub(crate) mod points;
pub(crate) mod pools;
mod readers;
mod rounds;
mod sealed;
mod session;
pub(crate) mod target;

use std::io::Write;

use kvx::{Options, Registry};

pub(crate) use self::arguments::Arguments;
use self::arguments::Bench;
use self::companion::Companion;
pub(crate) use self::companion_mode::{CompanionArguments, run as answer};
use self::figures::Output;
use self::pools::Sizes;
use self::session::Session;
pub(crate) use self::target::{TargetArguments, serve};
use crate::progress::Progress;
use crate::{Result, bytes};

/// Runs the bench. With `for_people`, it prints a table unless JSON is requested.
pub(crate) fn run(
    arguments: &Arguments,
    registry: &Registry,
    out: &mut dyn Write,
    for_people: bool,
) -> Result<()> {
    arguments.check()?;
    let options = Options::parse(&arguments.options)?;
    let output = Output::new(out, arguments.json || !for_people);
    let mut bench = Bench { arguments, registry, output };
    if arguments.kernels {
        return kernels::run(arguments, &mut bench.output);
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
            bulk::run(&mut bench, backend, bytes)?;
        } else if let Some(bytes) = arguments.notices_beside {
            notifications::run(&mut bench, backend, bytes)?;
        } else if let Some(readers) = arguments.readers {
            readers::run(&mut bench, backend, readers)?;
        } else if let Some(seconds) = arguments.idle {
            idle::run(&mut bench, backend, seconds)?;
        } else {
            return points(&mut bench, &backends);
        }
    }
    Ok(())
}

/// Measures every point of the sweep.
fn points(bench: &mut Bench<'_>, backends: &[&'static str]) -> Result<()> {
    let Bench { arguments, registry, output } = bench;
    let (points, left_out) = arguments.sweep(backends);
    for point in &left_out {
        let (total, most) = (bytes::show(point.shape.bytes()), bytes::show(arguments.max_total));
        eprintln!("left out: {point} moves {total} per transfer, more than --max-total {most}");
    }
    if points.is_empty() {
        return Err("no point is left to measure".into());
    }
    let sizes = points::memory(&points);
    let about = arguments.duration(&points);
    let (count, about_s) = (points.len(), about.as_secs().max(1));
    let most = |of: fn(Sizes) -> u64| of(sizes.0).max(of(sizes.1));
    let memory = match (most(Sizes::on_host), most(Sizes::on_device)) {
        (host, 0) => format!("{} of memory per side", bytes::show(host)),
        (host, device) => {
            let host = if host > 0 {
                format!("{} of memory and ", bytes::show(host))
            } else {
                String::new()
            };
            format!(
                "{host}{} of GPU memory per side, and twice as much for the limits",
                bytes::show(device)
            )
        }
    };
    eprintln!("{count} points, {memory}, about {about_s} s");
    let mut session = Session::start(backends, registry, &arguments.options, sizes, about)?;
    let mut beside = arguments.beside.as_deref().map(Companion::start).transpose()?;
    let mut progress = Progress::new(points.len() * arguments.rounds, about);
    let mut wrong = 0;
    for point in &points {
        let what = point.to_string();
        progress.show(&what);
        let step = || progress.step(&what);
        let figures = measure::point(&mut session, point, beside.as_mut(), arguments, step)?;
        progress.clear();
        wrong += usize::from(!figures.verified);
        output.figures(&figures)?;
    }
    if let Some(beside) = beside {
        beside.end();
    }
    session.end()?;
    if wrong > 0 {
        return Err(format!("wrong bytes arrived at {wrong} of {} points", points.len()).into());
    }
    Ok(())
}
