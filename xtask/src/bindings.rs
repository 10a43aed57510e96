//! `cargo xtask bindings`: generates the committed bindings to native libraries from their headers.
//!
//! The generator is a workspace of its own in `xtask/bindings`, so that only this command builds
//! bindgen.

use crate::metadata::Metadata;
use crate::process::{self, Output};
use crate::skips;
use crate::test::steps;
use crate::{Result, root};

/// Writes every file again, or only compares; returns false if a compared one differs.
pub(crate) fn run(check: bool) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory;
    let mut cargo = process::cargo(["run", "--quiet", "--release", "--locked", "--manifest-path"]);
    cargo.arg(root().join("xtask/bindings/Cargo.toml"));
    cargo.arg("--target-dir").arg(target.join("xtask/bindings")).arg("--").arg(root()).arg(target);
    cargo.args(check.then_some("--check"));
    let finished = process::run(cargo, steps::LIMIT, Output::Shown)?;
    for line in finished.output.lines() {
        if let Some((name, reason)) =
            line.strip_prefix("no headers: ").and_then(|line| line.split_once(": "))
        {
            skips::note(name, reason, "cargo xtask test --install on Debian 12")?;
        }
    }
    Ok(finished.succeeded())
}
