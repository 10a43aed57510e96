//! `cargo xtask features`: what is compiled in stays a choice, and a small one.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::Result;
use crate::metadata::{Metadata, RustVersion};
use crate::process::{self, Output};
use crate::test::steps;

/// The crate that works under any async runtime, and therefore depends on none.
const CORE: &str = "kvx-core";

/// Async runtimes, by crate name.
const RUNTIMES: &[&str] = &["async-executor", "async-std", "compio", "glommio", "monoio", "smol", "tokio"];

/// What core is compiled with to be, on Linux, what it is on other systems: it then has neither Linux's modules nor
/// the dependencies that only those need.
const PORTABLE: &str = "--cfg kvx_portable -D warnings";

/// The facade with this feature alone stays under this number of crates, itself included.
const SMALL: (&str, usize) = ("tcp", 60);

/// What authors of routers take of the connector: at most this number of crates, itself included, and no async runtime.
const PARAMS: (&str, &str, usize) = ("kvx-connector", "params", 25);

/// Runs the checks and prints what failed; false if any did.
pub(crate) fn command() -> Result<bool> {
    let failures = check(steps::LIMIT)?;
    for failure in &failures {
        println!("failed: {failure}");
    }
    Ok(failures.is_empty())
}

/// Runs every check within `limit` and returns what failed, a sentence each.
pub(crate) fn check(limit: Duration) -> Result<Vec<String>> {
    let until = Instant::now() + limit;
    let metadata = Metadata::of_everything()?;
    let mut failures = builds_alone(&metadata, until)?;
    failures.extend(core_has_no_runtime(until)?);
    failures.extend(core_is_portable(&metadata, until)?);
    failures.extend(stays_small(&metadata, until)?);
    failures.extend(params_stay_small(until)?);
    failures.extend(rust_version_is_enough(&metadata)?);
    Ok(failures)
}

/// The facade builds without features, with each feature alone, and as it comes; without a warning.
fn builds_alone(metadata: &Metadata, until: Instant) -> Result<Vec<String>> {
    let facade = metadata.root_package()?;
    let mut choices = vec![vec!["--no-default-features"]];
    choices.extend(facade.features().map(|feature| vec!["--no-default-features", "--features", feature]));
    choices.push(Vec::new());
    let mut failures = Vec::new();
    for choice in choices {
        // Clippy does what `cargo check` does, and tells of what only this choice leaves unused.
        let mut arguments = vec!["clippy", "-p", facade.name()];
        arguments.extend(choice);
        arguments.extend(["--", "-D", "warnings"]);
        let shown = format!("cargo {}", arguments.join(" "));
        println!("{shown}");
        let finished = process::run(process::cargo(arguments), left(until), Output::Shown)?;
        if !finished.succeeded() {
            failures.push(format!("{shown}: {}", finished.end));
        }
    }
    Ok(failures)
}

fn core_has_no_runtime(until: Instant) -> Result<Option<String>> {
    let crates = tree(&["-p", CORE, "--all-features"], until)?;
    println!("{CORE}: {} crates with all features", crates.len());
    let runtimes = runtimes(&crates);
    Ok((!runtimes.is_empty()).then(|| format!("{CORE} depends on an async runtime: {}", runtimes.join(", "))))
}

/// Core compiles as it does on other systems, without a warning.
fn core_is_portable(metadata: &Metadata, until: Instant) -> Result<Option<String>> {
    let shown = format!("RUSTFLAGS=\"{PORTABLE}\" cargo check -p {CORE}");
    println!("{shown}");
    let mut check = process::cargo(["check", "-p", CORE]);
    // Other flags are another build of everything: it leaves the usual one alone. The encoded flags would win.
    let target = metadata.target_directory()?.join("xtask").join("portable");
    check.env("RUSTFLAGS", PORTABLE).env_remove("CARGO_ENCODED_RUSTFLAGS").env("CARGO_TARGET_DIR", target);
    let finished = process::run(check, left(until), Output::Shown)?;
    Ok((!finished.succeeded()).then(|| format!("{shown}: {}", finished.end)))
}

fn stays_small(metadata: &Metadata, until: Instant) -> Result<Option<String>> {
    let facade = metadata.root_package()?.name();
    let (feature, below) = SMALL;
    let crates = tree(&["-p", facade, "--no-default-features", "--features", feature], until)?;
    println!("{facade} with `{feature}` only: {} crates, and stays under {below}", crates.len());
    Ok((crates.len() >= below).then(|| {
        let list: Vec<_> = crates.iter().map(String::as_str).collect();
        format!(
            "{facade} with `{feature}` only has {} crates, not under {below}: {}",
            crates.len(),
            list.join(", ")
        )
    }))
}

fn params_stay_small(until: Instant) -> Result<Option<String>> {
    let (package, feature, most) = PARAMS;
    let crates = tree(&["-p", package, "--no-default-features", "--features", feature], until)?;
    println!("{package} with `{feature}` only: {} crates, at most {most}", crates.len());
    let runtimes = runtimes(&crates);
    Ok((crates.len() > most || !runtimes.is_empty()).then(|| {
        let list: Vec<_> = crates.iter().map(String::as_str).collect();
        format!(
            "{package} with `{feature}` only is to have at most {most} crates and no runtime: {}",
            list.join(", ")
        )
    }))
}

/// No dependency asks for a newer compiler than the workspace does, and every member says which it asks for.
fn rust_version_is_enough(metadata: &Metadata) -> Result<Vec<String>> {
    let workspace = metadata.root_package()?.rust_version().ok_or("the root package has no rust-version")?;
    let newest =
        metadata.packages().filter(|package| !package.is_member()).filter_map(|p| p.rust_version()).max();
    if let Some(newest) = newest {
        let askers = metadata.packages().filter(|p| !p.is_member() && p.rust_version() == Some(newest));
        let askers: Vec<_> = askers.map(|package| package.to_string()).collect();
        println!("rust-version {workspace}; the dependencies ask for {newest} ({})", askers.join(", "));
    }
    Ok(wrong_rust_versions(metadata, workspace))
}

fn wrong_rust_versions(metadata: &Metadata, workspace: RustVersion) -> Vec<String> {
    let wrong = metadata.packages().filter_map(|package| match package.rust_version() {
        Some(asked) if !package.is_member() && asked > workspace => {
            Some(format!("{package} asks for Rust {asked}, the workspace's rust-version is {workspace}"))
        }
        Some(own) if package.is_member() && own != workspace => {
            Some(format!("{package} has rust-version {own}, the root package {workspace}"))
        }
        None if package.is_member() => {
            Some(format!("{package} has no rust-version: inherit the workspace's"))
        }
        _ => None,
    });
    wrong.collect()
}

/// The crates that `cargo tree` finds by these arguments among normal dependencies, as `name version`.
fn tree(arguments: &[&str], until: Instant) -> Result<BTreeSet<String>> {
    let all = ["tree", "-e", "normal", "--prefix", "none"].iter().chain(arguments);
    let finished = process::run(process::cargo(all.copied()), left(until), Output::Kept)?;
    if !finished.succeeded() {
        return Err(format!("cargo tree {}: {}", arguments.join(" "), finished.end).into());
    }
    Ok(tree_crates(&finished.output))
}

/// Each crate once: a line also marks repeated crates, paths and procedural macros.
fn tree_crates(output: &str) -> BTreeSet<String> {
    let mut crates = BTreeSet::new();
    for line in output.lines() {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            crates.insert(format!("{name} {}", version.trim_start_matches('v')));
        }
    }
    crates
}

fn runtimes(crates: &BTreeSet<String>) -> Vec<&str> {
    let names = crates.iter().filter_map(|entry| entry.split(' ').next());
    names.filter(|name| RUNTIMES.contains(name)).collect()
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "\
kvx-core v0.1.0 (/somewhere/kvx-core)
rustix v1.1.2
bitflags v2.9.4
serde_derive v1.0.228 (proc-macro)
bitflags v2.9.4 (*)
bitflags v1.3.2
tokio-util v0.7.0
";

    #[test]
    fn a_crate_counts_once_per_version() {
        let crates = tree_crates(TREE);
        assert_eq!(crates.len(), 6, "{crates:?}");
        assert!(crates.contains("bitflags 2.9.4") && crates.contains("serde_derive 1.0.228"));
    }

    #[test]
    fn a_runtime_is_found_by_its_whole_name() {
        assert!(runtimes(&tree_crates(TREE)).is_empty());
        let with = format!("{TREE}tokio v1.54.0\nsmol v2.0.0 (*)\n");
        assert_eq!(runtimes(&tree_crates(&with)), ["smol", "tokio"]);
    }

    #[test]
    fn a_dependency_that_is_too_new_and_a_member_that_differs_are_named() {
        let metadata = Metadata::from_text(
            r#"{"workspace_root": "/w", "packages": [
                {"name": "facade", "version": "0.1.0", "source": null, "manifest_path": "/w/Cargo.toml",
                 "rust_version": "1.88"},
                {"name": "mute", "version": "0.1.0", "source": null, "rust_version": null},
                {"name": "behind", "version": "0.1.0", "source": null, "rust_version": "1.85"},
                {"name": "fits", "version": "1.0.0", "source": "registry", "rust_version": "1.88.0"},
                {"name": "silent", "version": "1.0.0", "source": "registry", "rust_version": null},
                {"name": "new", "version": "2.0.0", "source": "registry", "rust_version": "1.90"}]}"#,
        );
        let wrong = rust_version_is_enough(&metadata).unwrap();
        assert_eq!(wrong.len(), 3, "{wrong:?}");
        assert!(wrong[0].starts_with("mute 0.1.0") && wrong[1].starts_with("behind 0.1.0"));
        assert!(wrong[2].contains("new 2.0.0 asks for Rust 1.90"));
    }
}
