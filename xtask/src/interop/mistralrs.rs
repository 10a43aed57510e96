//! `cargo xtask interop mistralrs`: runs engines on mistral.rs, connected by kvx. `mistralrs.py`
//! puts the hook of `interop/mistralrs/hook` into a copy of the crate that cargo downloads, and the
//! server is built with that copy.

use std::process::Command;
use std::time::Duration;

use crate::metadata::Metadata;
use crate::process::{self, Deadline, must_succeed};
use crate::{Result, root};

/// The release of mistralrs-core that the hook was written for.
const VERSION: &str = "0.8.1";
/// The limit of the builds; the first one builds some 600 crates.
const BUILD: Duration = Duration::from_secs(90 * 60);
const RUN: Duration = Duration::from_secs(30 * 60);

/// The parts that check.py runs alone: models, backends, and `kvx serve` in the same fleet.
pub(super) const PARTS: [&str; 5] = ["llama", "qwen2", "SHM", "TCP", "kvx"];

/// Builds the server and runs these parts, or all; returns false if a check failed.
pub(super) fn run(only: &[String]) -> Result<bool> {
    let (deadline, target) = (Deadline::after(BUILD), Metadata::of_members()?.target_directory);
    let (here, built) = (root().join("interop/mistralrs"), target.join("interop"));
    let mut prepare = Command::new("python3");
    prepare.arg(root().join("xtask/src/interop/mistralrs.py")).arg(&here).arg(VERSION);
    prepare.arg(built.join("download"));
    must_succeed(prepare, deadline)?;
    let mut cargo = process::cargo(["build", "--locked"]);
    cargo.current_dir(&here).env("CARGO_TARGET_DIR", &built);
    must_succeed(cargo, deadline)?;
    super::build("kvx-cli")?;
    let mut check = Command::new("python3");
    check.arg(here.join("check.py")).arg(built.join("debug/kvx-interop-mistralrs"));
    check.arg(target.join("release/kvx")).arg(built.join("mistralrs")).args(only);
    check.env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    check.env("PYTHONPATH", root().join("xtask/src/interop/vllm"));
    process::shown_to_succeed(check, RUN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(file: &str) -> String {
        std::fs::read_to_string(root().join("interop/mistralrs").join(file)).unwrap()
    }

    #[test]
    fn the_hook_has_at_most_60_lines_and_the_server_300() {
        let insertions: serde_json::Value =
            serde_json::from_str(&text("hook/insertions.json")).unwrap();
        let inserted =
            insertions.as_array().unwrap().iter().flat_map(|it| it["lines"].as_array().unwrap());
        let hook = text("hook/outside_kv.rs").lines().count() + inserted.count();
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
        let code = |file| text(file).lines().filter(is_code).count();
        let server = code("src/main.rs") + code("src/kv.rs");
        assert!(hook <= 60 && server <= 300, "{hook} lines of hook, {server} of the server's code");
    }

    #[test]
    fn the_manifest_and_the_lock_file_name_the_release_of_the_hook() {
        assert!(
            text("Cargo.toml").contains(&format!("mistralrs-core = {{ version = \"={VERSION}\""))
        );
        assert!(
            text("Cargo.lock")
                .contains(&format!("name = \"mistralrs-core\"\nversion = \"{VERSION}\""))
        );
    }
}
