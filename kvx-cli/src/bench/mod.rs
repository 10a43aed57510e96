//! `kvx bench`: measures the cost of moving blocks, next to a limit that moves the same blocks
//! without kvx.
//!
//! A separate target process owns the other side's memory. Every point moves one list of blocks
//! again and again, in rounds: kvx, the limit, and the companion program if there is one, in turn.
//! The bench prints the median of the rounds, and the median of the ratios of each round, and
//! compares the bytes that arrived.
//!
//! Layers, each of which imports only from those before it:
//! 1. `points`, `pools`, `rounds`, `cpu`, `deadlines`, `machine`, `models`: points, memory, timing;
//! 2. `bare`, `driver`, `sealed`, `access`, `content`: moves without kvx, and their bytes;
//! 3. `target`, `initiator`, `device_limits`, `limits`, `session`: both processes and the limits;
//! 4. `figures`, `companion`, `measure`: a point and its figures;
//! 5. `estimate`, `run`, `report`, `sweep`, `compare`: many points;
//! 6. `arguments`, `bulk`, `notifications`, `readers`, `idle`, `kernels`, `companion_mode`: the other modes.

mod access;
mod arguments;
pub(crate) mod bare;
mod bulk;
mod companion;
mod companion_mode;
mod compare;
pub(crate) mod content;
mod cpu;
mod deadlines;
mod device_limits;
mod driver;
mod estimate;
mod figures;
mod idle;
mod initiator;
mod kernels;
mod limits;
mod machine;
mod measure;
mod models;
mod notifications;
pub(crate) mod points;
pub(crate) mod pools;
mod readers;
mod report;
mod rounds;
mod run;
mod sealed;
mod session;
mod sweep;
pub(crate) mod target;

use std::io::Write;

use kvx::{Options, Registry};

pub(crate) use self::arguments::Arguments;
use self::arguments::{Bench, BenchCommand};
pub(crate) use self::companion_mode::{CompanionArguments, run as answer};
use self::figures::Output;
use self::report::Reports;
use self::rounds::Effort;
use self::run::{Run, names};
pub(crate) use self::target::{TargetArguments, serve};
use crate::{Result, bytes};

/// Runs the bench. With `for_people`, it prints a table unless JSON is requested.
pub(crate) fn run(
    arguments: &Arguments,
    registry: &Registry,
    out: &mut dyn Write,
    for_people: bool,
) -> Result<()> {
    match &arguments.command {
        Some(BenchCommand::Compare(arguments)) => return compare::run(arguments, out),
        Some(BenchCommand::Sweep(arguments)) => {
            return sweep::run(arguments, registry, out, for_people);
        }
        None => {}
    }
    arguments.check()?;
    let effort = Effort::new(arguments.rounds, arguments.seconds)?;
    let options = Options::parse(&arguments.options)?;
    let output = Output::new(out, arguments.json || !for_people);
    let mut bench = Bench { arguments, registry, output };
    if arguments.kernels {
        return kernels::run(arguments, effort, &mut bench.output);
    }
    let (backends, versions) = names(&arguments.backend, registry, &options)?;
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
            return points(&mut bench, effort, &backends, &versions);
        }
    }
    Ok(())
}

/// Measures every point.
fn points(
    bench: &mut Bench<'_>,
    effort: Effort,
    backends: &[&'static str],
    versions: &[String],
) -> Result<()> {
    let Bench { arguments, registry, output } = bench;
    let (points, left_out) = arguments.sweep(backends);
    for point in &left_out {
        let (total, most) = (bytes::show(point.shape.bytes()), bytes::show(arguments.max_total));
        eprintln!("left out: {point} moves {total} per transfer, more than --max-total {most}");
    }
    if points.is_empty() {
        return Err("no point is left to measure".into());
    }
    let reports = Reports::new(&arguments.report)?;
    let beside = arguments.beside.as_deref();
    let run = Run { backends, registry, options: &arguments.options, effort, beside };
    let mut all = Vec::new();
    let measured = run.measure(
        &points,
        "points",
        |at| points[at].to_string(),
        |_, figures| {
            output.figures(&figures)?;
            all.push(figures);
            Ok(())
        },
    );
    let explained = output.explain();
    // A run that failed has a report of the points before its failure.
    let written = reports.write(&all, points.len(), versions);
    measured.and(explained).and(written)
}
