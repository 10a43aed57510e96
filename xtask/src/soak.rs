//! `cargo xtask soak`: work without a plan, for as long as one likes; `cargo xtask soak connector`: that of engines.

use std::time::Duration;

use crate::Result;
use crate::arguments::SoakOptions;
use crate::process::{self, Output};

/// What a build, and the end after the work, may take.
const BESIDE: Duration = Duration::from_secs(45 * 60);
/// The most backends that it is done over.
const BACKENDS: u32 = 4;

/// Works over each backend in turn; false if anything was wrong, or has grown.
pub(crate) fn run(options: &SoakOptions) -> Result<bool> {
    let time = Duration::from_secs(options.minutes * 60);
    let test = if options.connector { "engines" } else { "soak" };
    let mut cargo = process::cargo(["test", "--release", "--package", "kvx-transfer", "--test", test]);
    if options.connector {
        cargo.args(["--features", "connector"]);
    }
    // One after the other: what a process holds is looked at while it works.
    cargo.args(["--", "--nocapture", "--test-threads=1"]).args(&options.only);
    cargo.env("KVX_SOAK_SECONDS", time.as_secs().to_string());
    let finished = process::run(cargo, time * BACKENDS + BESIDE, Output::Shown)?;
    println!("{}", finished.end);
    Ok(finished.succeeded())
}
