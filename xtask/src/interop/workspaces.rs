//! `cargo xtask interop NAME`: programs that join kvx with other engines. Each is a workspace of its own, so that its
//! dependencies reach nothing else.

use std::time::Duration;

use crate::metadata::Metadata;
use crate::{Result, process, root};

/// The limit of one program; the first time all its dependencies are built.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// Returns the folders of `interop/` that are such workspaces. One with a hook is built by a command of its own.
pub(super) fn names() -> Vec<String> {
    crate::subfolders("interop", |folder| folder.join("Cargo.toml").exists() && !folder.join("hook").exists())
}

/// Builds and runs these programs, or all; returns false if one failed.
pub(super) fn run(chosen: &[String]) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory.join("interop");
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
        let names = names();
        assert!(names.iter().any(|name| name == "candle") && names.iter().all(|name| name != "mistralrs"));
        for name in names {
            let manifest = root().join("interop").join(&name).join("Cargo.toml");
            let text = std::fs::read_to_string(manifest).unwrap();
            assert!(text.lines().any(|line| line == "[workspace]"), "interop/{name}");
        }
    }
}
