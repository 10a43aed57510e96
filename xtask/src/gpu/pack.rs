//! The archive with a kit, for a machine without cargo and without a network; `pack.py` makes it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::kit::Kit;
use crate::process::{Deadline, must_succeed};
use crate::{Result, root};

/// The script in the unpacked folder that runs everything.
pub(crate) const SCRIPT: &str = "run";
/// The time limit of packing.
const LIMIT: Duration = Duration::from_secs(600);

/// Makes the archive of a kit. Fails if it is too large, or a program needs a newer C library.
pub(crate) fn make(kit: &Kit) -> Result<PathBuf> {
    let folder = kit.peers.with_file_name("xtask").join("gpu");
    let mut pack = Command::new("python3");
    pack.arg(root().join("xtask/src/gpu/pack.py")).arg(&kit.peers).arg(&folder);
    pack.args(kit.files.iter().map(|(name, file)| format!("{name}={}", file.display())));
    must_succeed(pack, Deadline::after(LIMIT))?;
    Ok(folder.join("kvx-gpu.tar.gz"))
}

/// Unpacks an archive.
pub(crate) fn unpack(archive: &Path, folder: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(archive).arg("-C").arg(folder);
    must_succeed(tar, Deadline::after(LIMIT))
}
