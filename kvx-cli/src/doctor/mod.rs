//! `kvx doctor`: examines this host, and whether blocks move through each pair of a fleet.

mod finding;
#[cfg(feature = "proxy")]
mod fleet;
#[cfg(not(feature = "proxy"))]
#[path = "no_fleet.rs"]
mod fleet;
mod host;

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use kvx::Registry;
use serde_json::json;

use self::finding::{Tally, show};
use crate::Result;

/// Exit status: 0 without a problem, whatever the warnings; 1 with one; 2 for invalid arguments.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    fleet: fleet::FleetArguments,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command, and returns the exit status.
pub(crate) fn run(
    arguments: &Arguments,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<ExitCode> {
    let fleet = arguments.fleet.examine()?;
    let skips_host = arguments.fleet.skips_host();
    let host = if skips_host { Vec::new() } else { host::examine(registry) };
    let of_fleet = fleet.iter().flat_map(fleet::FleetReport::findings);
    let tally = Tally::of(host.iter().chain(of_fleet));
    if arguments.json {
        let mut report = json!({
            "format": 1,
            "version": env!("CARGO_PKG_VERSION"),
            "problems": tally.problems,
            "warnings": tally.warnings,
            "host": host,
        });
        if let Some(fleet) = &fleet {
            report["fleet"] = fleet.to_json();
        }
        writeln!(out, "{report:#}")?;
    } else {
        if let Some(fleet) = &fleet {
            fleet.show(out)?;
        }
        if !skips_host {
            writeln!(out, "This host: {}", Tally::of(&host).in_words())?;
            show(&host, out)?;
        }
    }
    Ok(if tally.problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
