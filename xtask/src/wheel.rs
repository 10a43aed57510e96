//! `cargo xtask wheel`: builds the NIXL backend KVX and the program `kvx`, which `wheel.py` packs
//! into a Python wheel.

use std::process::Command;
use std::time::Duration;

use crate::install::{self, Environment};
use crate::metadata::Metadata;
use crate::process::{self, Deadline, must_succeed};
use crate::{Result, peers, root};

/// The limit of the whole command.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// Makes the wheel; with `check`, installs and uses it in a new environment together with NIXL.
pub(crate) fn command(check: bool) -> Result<bool> {
    let deadline = Deadline::after(LIMIT);
    let target = Metadata::of_members()?.target_directory;
    install::peers(&["wheel"], &target, deadline)?;
    // The program is built like `cargo run --release` does, so that it may exist already. The
    // library is built last and alone: built with the program, it would contain more than it needs.
    for what in [["--bin", "kvx"], ["-p", "kvx-nixl"]] {
        must_succeed(process::cargo(["build", "--release"].into_iter().chain(what)), deadline)?;
    }
    let adapter = target.join("xtask/wheel/adapter");
    std::fs::create_dir_all(&adapter)?;
    peers::portable_adapter(&adapter, deadline)?;
    let mut python = Command::new(Environment::of(&target, "wheel").python());
    python
        .arg(root().join("xtask/src/wheel.py"))
        .arg(root())
        .arg(&target)
        .args(check.then_some("--check"));
    process::shown_to_succeed(python, deadline.left())
}
