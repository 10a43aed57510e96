//! Engines without a model, in processes of their own, that prefill and decode for each other: every byte of their
//! caches says where it belongs. What arrives, what fails, and what both pools have free afterwards.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

/// Where the tests' Mooncake is.
#[path = "../../kvx-mooncake/tests/adapter/mod.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod adapter;
mod amid;
mod apart;
mod checking;
mod dialects;
mod digests;
mod engine;
mod faults;
mod fleet;
mod hosts;
mod log;
mod matrix;
mod model;
mod mooncake_python;
mod python;
mod queue;
mod secrets;
mod soak;
/// Where the tests' UCX is.
#[path = "../../kvx-ucx/tests/versions/mod.rs"]
mod ucx;
mod unread;
/// Where the tests' NIXL is.
#[path = "../../kvx-rixl/tests/wheel/mod.rs"]
mod wheel;

use std::borrow::Cow;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use kvx_testkit::{Check, Tier, skip};
use libtest_mimic::{Arguments, Trial};

/// One trial: what it is called, over which backend, and in which tier it runs.
pub(crate) struct Case {
    name: Cow<'static, str>,
    backend: &'static str,
    tier: Tier,
    run: Box<dyn Fn(&str) -> Check + Send>,
}

impl Case {
    pub(crate) fn new(
        name: impl Into<Cow<'static, str>>,
        backend: &'static str,
        tier: Tier,
        run: impl Fn(&str) -> Check + Send + 'static,
    ) -> Case {
        Case { name: name.into(), backend, tier, run: Box::new(run) }
    }
}

/// Starts this program again with `KVX_MOONCAKE_LIB` set, unless it is, or there is none.
fn start_again_with_mooncake() {
    const VARIABLE: &str = "KVX_MOONCAKE_LIB";
    let Some(adapter) = adapter::adapter().filter(|_| std::env::var_os(VARIABLE).is_none()) else { return };
    let mut again = Command::new(std::env::current_exe().expect("the running program has a path"));
    let again = again.args(std::env::args_os().skip(1)).env(VARIABLE, adapter);
    panic!("this program cannot be started again: {}", again.exec());
}

fn main() -> ExitCode {
    if let Ok(setup) = std::env::var(apart::VARIABLE) {
        apart::run(&setup);
    }
    if let Ok(spec) = std::env::var(fleet::VARIABLE) {
        engine::serve(&spec);
    }
    // Without them, MOONCAKE and RIXL are skipped.
    start_again_with_mooncake();
    wheel::chosen();
    let others = matrix::cases()
        .into_iter()
        .chain(faults::cases())
        .chain(dialects::cases())
        .chain(digests::cases())
        .chain(python::cases())
        .chain(mooncake_python::cases())
        .chain(secrets::cases())
        .chain(hosts::cases());
    // What is wanted may be the table or the soak alone.
    let alone = (faults::table::is_all(), soak::is_all());
    let others = others.filter(|_| alone == (false, false));
    let table = faults::table::cases().into_iter().filter(|_| !alone.1);
    let cases = others.chain(table).chain(soak::cases().into_iter().filter(|_| !alone.0));
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
