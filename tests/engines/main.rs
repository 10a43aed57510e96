//! Engines without a model, in processes of their own, that prefill and decode for each other: every byte of their
//! caches says where it belongs. What arrives, what fails, and what both pools have free afterwards.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

mod dialects;
mod digests;
mod engine;
mod faults;
mod fleet;
mod hosts;
mod log;
mod matrix;
mod model;
mod python;
mod queue;
/// Where the tests' UCX is.
#[path = "../../kvx-ucx/tests/versions/mod.rs"]
mod ucx;
/// Where the tests' NIXL is.
#[path = "../../kvx-rixl/tests/wheel/mod.rs"]
mod wheel;

use std::process::ExitCode;

use kvx_testkit::{Check, Tier, skip};
use libtest_mimic::{Arguments, Trial};

/// One trial: what it is called, over which backend, and in which tier it runs.
pub(crate) struct Case {
    name: &'static str,
    backend: &'static str,
    tier: Tier,
    run: Box<dyn Fn(&str) -> Check + Send>,
}

impl Case {
    pub(crate) fn new(
        name: &'static str,
        backend: &'static str,
        tier: Tier,
        run: impl Fn(&str) -> Check + Send + 'static,
    ) -> Case {
        Case { name, backend, tier, run: Box::new(run) }
    }
}

fn main() -> ExitCode {
    if let Ok(spec) = std::env::var(fleet::VARIABLE) {
        engine::serve(&spec);
    }
    wheel::chosen(); // without a wheel, RIXL is skipped
    let cases = matrix::cases()
        .into_iter()
        .chain(faults::cases())
        .chain(dialects::cases())
        .chain(digests::cases())
        .chain(python::cases())
        .chain(hosts::cases());
    let trials = cases.filter(|case| case.tier.runs()).map(|Case { name, backend, run, .. }| {
        let title = format!("{backend}::{name}");
        Trial::test(title.clone(), move || {
            if let Err(why) = kvx::registry().require(backend, &kvx::Options::default()) {
                skip(&title, &why.to_string(), "see the reason");
                return Ok(());
            }
            run(backend).map_err(|failure| failure.to_string().into())
        })
    });
    let mut arguments = Arguments::from_args();
    // Outcomes have deadlines, and each trial is two processes and more.
    arguments.test_threads.get_or_insert(2);
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
