//! `cargo xtask interop NAME`: programs that join kvx to engines of others. Each is a workspace of its own, so that
//! what it brings reaches nothing else.

use std::time::Duration;

use crate::metadata::Metadata;
use crate::process::{self, Output};
use crate::{Result, root};

/// For one program; the first time it is built with all that it brings.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// The workspaces that there are, by their folders' names; the one with a hook is built in its own way.
pub(super) fn names() -> Vec<String> {
    let folders = std::fs::read_dir(root().join("interop")).into_iter().flatten().flatten();
    let has = |folder: &std::fs::DirEntry, name: &str| folder.path().join(name).exists();
    let with_manifest = folders.filter(|folder| has(folder, "Cargo.toml") && !has(folder, "hook"));
    let mut names: Vec<_> =
        with_manifest.filter_map(|folder| folder.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Builds and runs those of these names, all if there are none; false if one failed.
pub(super) fn run(chosen: &[String]) -> Result<bool> {
    let built = Metadata::of_members()?.target_directory()?.join("interop");
    let mut held = true;
    for name in names().into_iter().filter(|name| chosen.is_empty() || chosen.contains(name)) {
        println!("interop/{name}");
        let mut cargo = process::cargo(["run"]);
        cargo.current_dir(root().join("interop").join(&name)).env("CARGO_TARGET_DIR", &built);
        let finished = process::run(cargo, LIMIT, Output::Shown)?;
        if !finished.succeeded() {
            println!("failed: interop/{name}: {}", finished.end);
            held = false;
        }
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_a_workspace_of_its_own() {
        assert!(names().contains(&"candle".to_owned()), "{:?}", names());
        for name in names() {
            let manifest = root().join("interop").join(&name).join("Cargo.toml");
            let text = std::fs::read_to_string(manifest).unwrap();
            assert!(text.lines().any(|line| line == "[workspace]"), "interop/{name}");
        }
    }
}
