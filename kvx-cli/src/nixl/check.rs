//! `kvx nixl --check`: transfers between two agents of a wheel's NIXL in two processes, over KVX
//! and over its own UCX.

use std::io::Write;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Nixl, PLUGIN};
use crate::Result;

/// The script that runs in the wheel's Python: `python -c SCRIPT BACKEND`.
const SCRIPT: &str = include_str!("check.py");

/// A folder that is removed when this is dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Returns the Python of the environment that contains a wheel's library.
fn python_of(library: &Path) -> Option<PathBuf> {
    library.ancestors().map(|folder| folder.join("bin/python3")).find(|python| python.exists())
}

pub(super) fn run(found: &[Nixl], plugin: &Path, out: &mut impl Write) -> Result<()> {
    // Create a new folder for this user alone: NIXL loads the files in it.
    let name = format!(
        "kvx-nixl-check-{}-{:x}",
        std::process::id(),
        std::time::UNIX_EPOCH.elapsed()?.as_nanos()
    );
    let folder = std::env::temp_dir().join(name);
    std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let plugins = Folder(folder);
    std::os::unix::fs::symlink(plugin, plugins.0.join(PLUGIN))?;
    let mut checked = 0;
    let mut failed = Vec::new();
    for nixl in found {
        let Some(name) = &nixl.serves else { continue };
        let Some(python) = python_of(&nixl.library) else {
            writeln!(
                out,
                "{}: it is not in a Python environment, so it cannot be checked",
                nixl.library.display()
            )?;
            continue;
        };
        writeln!(out, "{name}, {}, through {}", python.display(), plugin.display())?;
        checked += 1;
        for (backend, folder) in [("KVX", Some(&plugins.0)), ("UCX", None)] {
            let mut command = Command::new(&python);
            command
                .args(["-c", SCRIPT, backend])
                .stdin(Stdio::null())
                .stderr(Stdio::piped())
                .stdout(Stdio::piped());
            command.env_remove("NIXL_PLUGIN_DIR");
            if let Some(folder) = folder {
                command.env("NIXL_PLUGIN_DIR", folder);
            }
            let output = command.output()?;
            if output.status.success() {
                out.write_all(&output.stdout)?;
                continue;
            }
            let said = String::from_utf8_lossy(&output.stderr);
            let told =
                said.lines().filter(|line| line.starts_with("KVX:")).chain(said.lines().last());
            let why = told.collect::<Vec<_>>().join("\n    ");
            writeln!(out, "  {backend}: {why}")?;
            if backend == "KVX" {
                failed.push(name.clone());
            }
        }
    }
    // The checks above used the plug-in of this program; report what an engine finds as well.
    for nixl in found.iter().filter(|nixl| nixl.serves.is_some() && !nixl.is_there) {
        writeln!(out, "{}: {}", nixl.library.display(), nixl.installation())?;
    }
    match (checked, failed.is_empty()) {
        (0, _) => {
            Err("no NIXL that KVX supports was found in a Python environment; `kvx nixl` says why"
                .into())
        }
        (_, true) => Ok(()),
        (_, false) => Err(format!("KVX did not work in {}", failed.join(", ")).into()),
    }
}
