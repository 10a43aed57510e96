//! `cargo xtask wheel`: builds the connector for vLLM, the NIXL backend KVX and the program `kvx`,
//! which `wheel.py` packs into a Python wheel.

use std::process::Command;
use std::time::Duration;

use crate::install::{self, Environment};
use crate::metadata::Metadata;
use crate::process::{self, Deadline, must_succeed};
use crate::{Result, peers, root};

/// The limit of the whole command.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// The features of the program: all that need no C compiler, without `serve`.
const PROGRAM: &str = "shm,tcp,ucx,libfabric,mooncake,rixl,cuda,rocm,connector,proxy,release";

/// Makes the wheel; with `check`, installs and uses it in a new environment together with NIXL.
pub(crate) fn command(check: bool) -> Result<bool> {
    let deadline = Deadline::after(LIMIT);
    let target = Metadata::of_members()?.target_directory;
    install::peers(&["wheel"], &target, deadline)?;
    // Each is built alone: built together, they would contain more than they need.
    let program = ["-p", "kvx-cli", "--bin", "kvx", "--no-default-features", "--features", PROGRAM];
    for what in [&program[..], &["-p", "kvx-python"], &["-p", "kvx-nixl"]] {
        let build = ["build", "--release"].into_iter().chain(what.iter().copied());
        must_succeed(process::cargo(build), deadline)?;
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
