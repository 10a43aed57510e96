//! `cargo xtask gpu`: everything that needs a machine with an NVIDIA GPU.
//!
//! A [kit](kit::Kit) has the programs and libraries for this, in cargo's folders or in a folder for
//! a machine without cargo and network. Both run the same [parts], each in a process of its own,
//! and [report] each at once. `--rehearse` makes the folder outside the repository and runs it with
//! the stand-in, to test it without a GPU.

mod kit;
mod machine;
mod pack;
mod parts;
mod report;
mod run;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::Result;
use crate::arguments::GpuOptions;
use crate::install::Environment;
use crate::process;
use kit::Kit;

/// The time limit of a rehearsal.
const LIMIT: Duration = Duration::from_secs(3 * 60);

/// Runs the requested command; returns false if a test failed or a bar was missed.
pub(crate) fn run(options: &GpuOptions) -> Result<bool> {
    match (&options.kit, &options.from) {
        _ if options.rehearse => rehearse(),
        (Some(folder), _) => pack::make(&Kit::build(true)?, folder, false).map(|()| true),
        (None, None) => run::all(Kit::build(true)?, options),
        (None, Some(folder)) => run::all(Kit::unpacked(folder)?, options),
    }
}

/// Packs the programs that the tests have built into a temporary folder, and runs all parts from
/// there with the stand-in, without this process's variables.
fn rehearse() -> Result<bool> {
    let kit = Kit::build(false)?;
    let folder = std::env::temp_dir().join(format!("kvx-gpu-{}", std::process::id()));
    let held = pack::make(&kit, &folder, true).and_then(|()| rehearse_in(&folder, &kit));
    fs::remove_dir_all(&folder).ok(); // there is none if it could not be made
    held
}

fn rehearse_in(folder: &Path, kit: &Kit) -> Result<bool> {
    let results = folder.join("results");
    // A Python with NumPy; PyTorch would find no device.
    let python = Environment(kit.peers.join("nixl/venv")).python();
    let python = if python.exists() { python } else { PathBuf::from("python3") };
    let mut command = Command::new(folder.join(pack::SCRIPT));
    command.arg("--stand-in").arg("--results").arg(&results).arg("--python").arg(python);
    command.current_dir(folder).env_clear().env("PATH", "/usr/local/bin:/usr/bin:/bin");
    let held = process::shown_to_succeed(command, LIMIT)?;
    let summary = fs::read_to_string(results.join(report::SUMMARY))?;
    for part in parts::table()? {
        if !summary.contains(&format!("\n| {} |", part.name)) {
            return Err(format!("the summary says nothing about {}", part.name).into());
        }
    }
    Ok(held)
}
