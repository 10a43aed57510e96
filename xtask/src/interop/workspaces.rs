//! `cargo xtask interop NAME`: programs that join kvx with other engines. Each is a workspace of its own, so that its
//! dependencies reach nothing else.

use std::time::Duration;

use crate::metadata::Metadata;
use crate::{Result, process, root};

/// The limit of one program; the first time all its dependencies are built.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// Returns the folders of `interop/` that are such workspaces. One with a hook is built by a command of its own.
fn names() -> Vec<String> {
    let folders = std::fs::read_dir(root().join("interop")).into_iter().flatten().flatten();
    let has = |folder: &std::fs::DirEntry, name: &str| folder.path().join(name).exists();
    let folders = folders.filter(|folder| has(folder, "Cargo.toml") && !has(folder, "hook"));
    let mut names: Vec<_> = folders.filter_map(|folder| folder.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Parses the name of a workspace.
pub(super) fn known(name: &str) -> std::result::Result<String, String> {
    let names = names();
    names.iter().find(|known| *known == name).cloned().ok_or(format!("programs: {}", names.join(", ")))
}

/// Builds and runs these programs, or all; returns false if one failed.
pub(super) fn run(chosen: &[String]) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory()?.join("interop");
    let mut held = true;
    for name in names().into_iter().filter(|name| chosen.is_empty() || chosen.contains(name)) {
        println!("interop/{name}");
        let mut cargo = process::cargo(["run"]);
        cargo.current_dir(root().join("interop").join(&name)).env("CARGO_TARGET_DIR", &target);
        held &= process::shown_to_succeed(cargo, LIMIT)?;
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_a_workspace_of_its_own() {
        assert!(known("candle").is_ok() && known("mistralrs").is_err());
        for name in names() {
            let text =
                std::fs::read_to_string(root().join("interop").join(&name).join("Cargo.toml")).unwrap();
            assert!(text.lines().any(|line| line == "[workspace]"), "interop/{name}");
        }
    }
}
