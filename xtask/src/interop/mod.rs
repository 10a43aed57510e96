//! `cargo xtask interop`: runs kvx together with other inference engines. None of it is a part of the tests, because it
//! downloads and builds a lot.

mod mistralrs;
mod transformers;
mod vllm;
mod workspaces;

use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};

use crate::Result;
use crate::arguments::one_of;
use crate::process;

/// The limit of building `kvx` and `kvx-nixl`.
const BUILD: Duration = Duration::from_secs(60 * 60);

/// The options of `cargo xtask interop`.
#[derive(Args, Debug, PartialEq)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Interop {
    #[command(subcommand)]
    engine: Option<Engine>,
    /// Build and run these programs of interop/; without a name all of them
    #[arg(value_name = "NAME", value_parser = one_of(workspaces::names()))]
    names: Vec<String>,
}

/// An engine that a command of its own prepares.
#[derive(Debug, PartialEq, Subcommand)]
enum Engine {
    /// Run vLLM and `kvx serve` in one fleet, both ways; an hour, and 3 GB to download the first time
    Vllm(vllm::Options),
    /// Run engines on mistral.rs that prefill for each other and for `kvx serve`; builds for an hour
    Mistralrs {
        /// Only these parts; without a name all of them
        #[arg(value_name = "PART", value_parser = PossibleValuesParser::new(mistralrs::PARTS))]
        parts: Vec<String>,
    },
    /// Compare the example server's logits and tokens with Hugging Face's transformers; downloads 3 GB
    Transformers {
        /// Record the answers, for tests without transformers
        #[arg(long)]
        record: bool,
    },
}

/// Runs it; returns false if something was not as it must be.
pub(crate) fn run(options: &Interop) -> Result<bool> {
    match &options.engine {
        None => workspaces::run(&options.names),
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
