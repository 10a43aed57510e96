//! `cargo xtask wheel`: builds the connector for vLLM, the NIXL backend KVX and the program `kvx`,
//! which `wheel.py` packs into a Python wheel.

use std::process::Command;
use std::time::Duration;

use crate::install::{self, Environment};
use crate::metadata::Metadata;
use crate::process::{self, Deadline};
use crate::release::{self, ARTEFACTS};
use crate::{Result, peers, root};

/// The limit of the whole command.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// Makes the wheel; with `check`, installs and uses it in a new environment together with NIXL.
pub(crate) fn command(check: bool) -> Result<bool> {
    let deadline = Deadline::after(LIMIT);
    let target = Metadata::of_members()?.target_directory;
    install::peers(&["wheel"], &target, deadline)?;
    for artefact in &ARTEFACTS {
        artefact.build(root(), &target, deadline)?;
    }
    let folder = target.join("xtask/wheel");
    let adapter = folder.join("adapter");
    std::fs::create_dir_all(&adapter)?;
    for old in release::files(&folder, "whl")? {
        std::fs::remove_file(old)?;
    }
    peers::portable_adapter(&adapter, deadline)?;
    let mut python = Command::new(Environment::of(&target, "wheel").python());
    python
        .arg(root().join("xtask/src/wheel.py"))
        .arg(root())
        .arg(&target)
        .args(check.then_some("--check"));
    let packed = process::shown_to_succeed(python, deadline.left())?;
    release::write_checksums(&folder, release::files(&folder, "whl")?)?;
    Ok(packed)
}
