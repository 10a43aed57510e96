//! `cargo xtask soak`: random work of agents for as long as one likes; `cargo xtask soak connector`: of engines.

use std::time::Duration;

use crate::Result;
use crate::arguments::SoakOptions;
use crate::process;

/// The limit of a build and of the end after the work.
const BESIDE: Duration = Duration::from_secs(45 * 60);
/// The most backends that it runs over.
const BACKENDS: u32 = 4;

/// Runs over each backend in turn; returns false if anything was wrong or has grown.
pub(crate) fn run(options: &SoakOptions) -> Result<bool> {
    let time = Duration::from_secs(options.minutes * 60);
    let features = if options.connector.is_some() { "connector" } else { "" };
    let mut cargo = process::cargo(["test", "--release", "-p", "kvx-transfer", "--test", "it"]);
    // One test at a time: it watches what its process holds.
    cargo.args(["--features", features, "--", "--nocapture", "--test-threads=1"]).args(&options.only);
    cargo.env("KVX_SOAK_SECONDS", time.as_secs().to_string());
    process::shown_to_succeed(cargo, time * BACKENDS + BESIDE)
}
