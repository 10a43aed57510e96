//! `cargo xtask semver`: whether a public interface has changed more than its version says, since a release.

use std::time::Duration;

use crate::Result;
use crate::metadata::Metadata;
use crate::process::{self, Output};

/// For one crate, both of whose versions are documented first.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Compares each published library with itself at `revision`; false if one breaks what its version promises.
pub(crate) fn run(revision: &str) -> Result<bool> {
    let version = process::run(process::cargo(["semver-checks", "--version"]), LIMIT, Output::Quiet)?;
    if !version.succeeded() {
        return Err("there is no cargo-semver-checks: cargo install --locked cargo-semver-checks".into());
    }
    let workspace = Metadata::of_members()?;
    let mut held = true;
    for package in workspace.packages().filter(|package| package.is_published() && package.has_library()) {
        println!("{package}, since {revision}");
        let line = ["semver-checks", "--package", package.name(), "--baseline-rev", revision];
        let finished = process::run(process::cargo(line), LIMIT, Output::Shown)?;
        if !finished.succeeded() {
            println!("failed: {package}: {}", finished.end);
            held = false;
        }
    }
    Ok(held)
}
