//! The folder of a kit, for a machine without cargo and without a network; `pack.py` makes it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::kit::{Kit, SCRIPT_NAMES, SCRIPTS};
use crate::process::{Deadline, must_succeed};
use crate::{Result, root};

/// The script in the folder that runs everything.
pub(crate) const SCRIPT: &str = "run";
/// The time limit of packing.
const LIMIT: Duration = Duration::from_secs(600);

/// Makes the folder of a kit. Fails if it is too large, or a program needs a newer C library. A
/// kit for a rehearsal is packed faster, may have any size, and serves only this machine's Python.
pub(crate) fn make(kit: &Kit, folder: &Path, rehearsal: bool) -> Result<()> {
    let mut pack = Command::new("python3");
    pack.arg(root().join("xtask/src/gpu/pack.py"));
    pack.arg("--peers").arg(&kit.peers).arg("--revision").arg(&kit.revision);
    pack.args(rehearsal.then_some("--rehearsal")).arg(folder);
    pack.args(kit.files.iter().map(|(name, file)| format!("{name}={}", file.display())));
    pack.args(
        SCRIPT_NAMES
            .map(|name| format!("python/{name}={}", root().join(SCRIPTS).join(name).display())),
    );
    must_succeed(pack, Deadline::after(LIMIT))
}
