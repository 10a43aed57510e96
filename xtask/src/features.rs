//! `cargo xtask features`: checks that each feature builds alone, and that few dependencies are
//! compiled in.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::Result;
use crate::metadata::Metadata;
use crate::process::{self, Deadline};

/// The crate that works under any async runtime, and therefore depends on none.
const CORE: &str = "kvx-core";

/// Async runtimes, by crate name.
const RUNTIMES: [&str; 7] =
    ["async-executor", "async-std", "compio", "glommio", "monoio", "smol", "tokio"];

/// Bounds for users of one feature: the package, the feature, the most crates (the package
/// included), and whether an async runtime may be among them.
const SMALL: [(&str, &str, usize, bool); 2] =
    [("kvx-transfer", "tcp", 59, true), ("kvx-vllm", "params", 25, false)];

/// Runs the checks within `limit` and returns what failed, a sentence each. Compiles the facade
/// without features and with `tcp` alone; with `all`, with each feature alone and with the default
/// ones.
pub(crate) fn check(all: bool, limit: Duration) -> Result<Vec<String>> {
    let deadline = Deadline::after(limit);
    let metadata = Metadata::of_everything()?;
    let facade = metadata.root_package()?;
    let alone =
        facade.features.keys().filter(|name| name.as_str() == "tcp" || (all && *name != "default"));
    let alone = alone.map(|feature| format!("--no-default-features --features {feature}"));
    let others = ["--no-default-features", "--features default"].map(str::to_owned);
    let mut failures = Vec::new();
    for choice in alone.chain(others.into_iter().take(if all { 2 } else { 1 })) {
        // Clippy does what `cargo check` does and shares its dependencies with the lint step. It
        // passes `-D warnings` to the facade alone, where RUSTFLAGS would compile every dependency
        // again.
        let line = format!("clippy -p {} {choice} -- -D warnings", facade.name);
        let cargo = process::cargo(line.split(' '));
        failures.extend(process::failure_of(cargo, &format!("cargo {line}"), deadline)?);
    }
    failures.extend(check_dependencies(&metadata, deadline)?);
    failures.extend(core_is_portable(&metadata, deadline)?);
    Ok(failures)
}

/// Checks what cargo resolves: runtimes under core, numbers of crates, and the `rust-version` of
/// every package.
fn check_dependencies(metadata: &Metadata, deadline: Deadline) -> Result<Vec<String>> {
    let mut failures = wrong_rust_versions(metadata)?;
    let crates = tree(&["-p", CORE, "--all-features"], deadline)?;
    let found = runtimes(&crates);
    if !found.is_empty() {
        failures.push(format!("{CORE} depends on an async runtime: {}", found.join(", ")));
    }
    for (package, feature, most, may_have_runtime) in SMALL {
        let crates =
            tree(&["-p", package, "--no-default-features", "--features", feature], deadline)?;
        println!("{package} with `{feature}` only: {} crates, at most {most}", crates.len());
        let list = crates.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        if crates.len() > most {
            failures.push(format!(
                "{package} with `{feature}` only has more than {most} crates: {list}"
            ));
        }
        let found = runtimes(&crates);
        if !may_have_runtime && !found.is_empty() {
            failures
                .push(format!("{package} with `{feature}` only depends on {}", found.join(", ")));
        }
    }
    Ok(failures)
}

/// Compiles core as on other systems: without Linux's modules and their dependencies. A warning
/// fails it.
fn core_is_portable(metadata: &Metadata, deadline: Deadline) -> Result<Option<String>> {
    let flags = "--cfg kvx_portable -D warnings";
    let shown = format!("RUSTFLAGS=\"{flags}\" cargo check -p {CORE}");
    let mut check = process::cargo(["check", "-p", CORE]);
    // With other flags everything is built again, so it has a folder of its own. Encoded flags
    // would take precedence.
    let target = metadata.target_directory.join("xtask/portable");
    check
        .env("RUSTFLAGS", flags)
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("CARGO_TARGET_DIR", target);
    Ok(process::failure_of(check, &shown, deadline)?)
}

/// Returns the dependencies that need a newer compiler than the workspace, and the members that
/// differ from it.
fn wrong_rust_versions(metadata: &Metadata) -> Result<Vec<String>> {
    let workspace = metadata.root_package()?.rust_version.as_deref();
    let workspace = workspace.ok_or("the root package has no rust-version")?;
    let wrong =
        metadata.packages.iter().filter_map(|package| match package.rust_version.as_deref() {
            Some(needed) if !package.is_member() && numbers(needed) > numbers(workspace) => {
                Some(format!(
                    "{package} needs Rust {needed}, and the workspace's rust-version is {workspace}"
                ))
            }
            own if package.is_member() && own != Some(workspace) => {
                Some(format!("{package} has the rust-version {own:?}: inherit the workspace's"))
            }
            _ => None,
        });
    Ok(wrong.collect())
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').filter_map(|number| number.parse().ok()).collect()
}

/// Returns the normal dependencies that `cargo tree` finds with these arguments, as `name version`.
fn tree(arguments: &[&str], deadline: Deadline) -> Result<BTreeSet<String>> {
    let all = ["tree", "-e", "normal", "--prefix", "none"].iter().chain(arguments);
    Ok(tree_crates(&process::output_of(process::cargo(all.copied()), deadline.left())?))
}

/// Parses lines `name vVERSION`; marks of repeated crates, paths and procedural macros may follow.
pub(crate) fn tree_crates(output: &str) -> BTreeSet<String> {
    let lines = output.lines().map(|line| line.split_whitespace());
    lines
        .filter_map(|mut words| {
            Some(format!("{} {}", words.next()?, words.next()?.trim_start_matches('v')))
        })
        .collect()
}

fn runtimes(crates: &BTreeSet<String>) -> Vec<&str> {
    let names = crates.iter().filter_map(|entry| entry.split(' ').next());
    names.filter(|name| RUNTIMES.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_counts_once_per_version_and_a_runtime_by_its_whole_name() {
        let tree = "kvx-core v0.1.0 (/somewhere/kvx-core)\nbitflags v2.9.4\nserde_derive v1.0.228 (proc-macro)\n\
                    bitflags v2.9.4 (*)\nbitflags v1.3.2\ntokio-util v0.7.0\nsmol v2.0.0 (*)\n";
        let crates = tree_crates(tree);
        assert_eq!(crates.len(), 6, "{crates:?}");
        assert!(crates.contains("bitflags 2.9.4"));
        assert_eq!(runtimes(&crates), ["smol"]);
    }

    #[test]
    fn a_dependency_that_is_too_new_and_a_member_that_differs_are_named() {
        let metadata = Metadata::from_text(
            r#"{"workspace_root": "/w", "packages": [
                {"name": "facade", "manifest_path": "/w/Cargo.toml", "rust_version": "1.89"},
                {"name": "behind", "rust_version": "1.9"},
                {"name": "fits", "source": "registry", "rust_version": "1.88.1"},
                {"name": "silent", "source": "registry"},
                {"name": "new", "source": "registry", "rust_version": "1.90"}]}"#,
        );
        let wrong = wrong_rust_versions(&metadata).unwrap();
        assert!(
            wrong.len() == 2 && wrong[0].starts_with("behind") && wrong[1].starts_with("new"),
            "{wrong:?}"
        );
    }
}
