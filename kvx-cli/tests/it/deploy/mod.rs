//! The files of `deploy/`, without a cluster: kubectl renders the manifests, and the types of
//! Kubernetes' API find fields that do not exist. No test can show that a cluster accepts them.

mod kinds;
mod manifests;
mod units;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvx_testkit::output;

/// The limit of a program that only reads files.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns a folder of `deploy/`.
fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name)
}

/// Returns whether a program can be started.
fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Returns the sorted paths in a folder.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Returns the flags that a command of `kvx` has.
fn flags_of(command: &str) -> Vec<String> {
    let mut kvx = Command::new(env!("CARGO_BIN_EXE_kvx"));
    let help = output(kvx.args([command, "--help"]), LIMIT);
    assert!(help.status.success(), "kvx {command} --help: {}", help.status);
    let text = String::from_utf8(help.stdout).unwrap();
    let flags = text.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    let words = flags.flat_map(|line| line.split([' ', ',', '=']));
    words.filter(|word| word.starts_with("--")).map(str::to_owned).collect()
}

/// Returns the flags among arguments, without their values.
fn flags_among<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let flags = arguments.into_iter().filter(|word| word.starts_with("--"));
    flags.map(|word| word.split('=').next().unwrap_or(word)).collect()
}
