//! `cargo xtask interop`: runs kvx together with other inference engines. The tests do not include
//! this, because it downloads and builds a lot.

mod mistralrs;
mod transformers;
mod vllm;

use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};

use crate::metadata::Metadata;
use crate::{Result, one_of, process, root};

/// The limit of building `kvx` and `kvx-nixl`.
const BUILD: Duration = Duration::from_secs(60 * 60);
/// The limit of one program of `interop/`; its first run builds all dependencies.
const RUN: Duration = Duration::from_secs(30 * 60);

/// The options of `cargo xtask interop`.
#[derive(Args, Debug, PartialEq)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Interop {
    #[command(subcommand)]
    engine: Option<Engine>,
    /// Build and run these programs of interop/; without a name all of them
    #[arg(value_name = "NAME", value_parser = one_of(workspaces()))]
    names: Vec<String>,
}

/// An engine that a dedicated command prepares.
#[derive(Debug, PartialEq, Subcommand)]
enum Engine {
    /// Run vLLM and `kvx serve` in one fleet, both ways; an hour, and 3 GB to download the first
    /// time
    Vllm(vllm::Options),
    /// Run engines on mistral.rs that prefill for each other and for `kvx serve`; builds for an
    /// hour
    Mistralrs {
        /// Only these parts; without a name all of them
        #[arg(value_name = "PART", value_parser = PossibleValuesParser::new(mistralrs::PARTS))]
        parts: Vec<String>,
    },
    /// Compare the example server's logits and tokens with Hugging Face's transformers; downloads 3
    /// GB
    Transformers {
        /// Record the answers, for tests without transformers
        #[arg(long)]
        record: bool,
    },
}

/// Runs the command; returns false if a check failed.
pub(crate) fn run(options: &Interop) -> Result<bool> {
    match &options.engine {
        None => run_workspaces(&options.names),
        Some(Engine::Vllm(options)) => vllm::run(options),
        Some(Engine::Mistralrs { parts }) => mistralrs::run(parts),
        Some(Engine::Transformers { record }) => transformers::run(*record),
    }
}

/// Builds a package of the workspace for release.
fn build(package: &str) -> Result<()> {
    let cargo = process::cargo(["build", "--release", "-p", package]);
    process::must_succeed(cargo, process::Deadline::after(BUILD))
}

/// Returns the folders of `interop/` that are separate workspaces, so that their dependencies do
/// not affect others. Dedicated commands build those with a hook.
fn workspaces() -> Vec<String> {
    crate::subfolders("interop", |folder| {
        folder.join("Cargo.toml").exists() && !folder.join("hook").exists()
    })
}

/// Builds and runs these programs, or all; returns false if one failed.
fn run_workspaces(chosen: &[String]) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory.join("interop");
    let mut held = true;
    for name in workspaces().into_iter().filter(|name| chosen.is_empty() || chosen.contains(name)) {
        println!("interop/{name}");
        let mut cargo = process::cargo(["run"]);
        cargo.current_dir(root().join("interop").join(&name)).env("CARGO_TARGET_DIR", &target);
        held &= process::shown_to_succeed(cargo, RUN)?;
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_is_a_separate_workspace() {
        let names = workspaces();
        assert!(
            names.iter().any(|name| name == "candle")
                && names.iter().all(|name| name != "mistralrs")
        );
        for name in names {
            let manifest = root().join("interop").join(&name).join("Cargo.toml");
            let text = std::fs::read_to_string(manifest).unwrap();
            assert!(text.lines().any(|line| line == "[workspace]"), "interop/{name}");
        }
    }
}
