//! The integration tests of kvx-rixl.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod conformance;
mod devices;
mod hostile;
mod interop;
mod libraries;
mod python;
mod wheel;

use std::process::ExitCode;

use kvx_core::Registry;
use kvx_testkit::{harness_main, serve_if_asked, trial};
use libtest_mimic::{Failed, Trial};

type Outcome = Result<(), Failed>;

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_rixl::Rixl).expect("one name");
    registry
}

/// Returns the test of this title, which runs with NIXL in its own process.
fn with_nixl(title: String, test: impl FnOnce() -> Outcome + Send + 'static) -> Trial {
    trial(title.clone(), move || {
        let mut outcome = Ok(());
        wheel::alone(&title, || outcome = test());
        outcome
    })
}

fn main() -> ExitCode {
    serve_if_asked(registry);
    hostile::serve_if_asked();
    interop::serve_if_asked();
    libraries::report_if_asked();
    if let Some(code) = conformance::run_suites_if_asked() {
        return code;
    }
    let mut trials = Vec::from(devices::trials());
    trials.extend(hostile::trials());
    trials.extend(interop::trials());
    trials.extend(libraries::trials());
    if wheel::is_alone() {
        return harness_main(trials); // a child runs one test
    }
    trials.extend(conformance::missing_releases());
    let code = harness_main(trials);
    if conformance::run_each_release() { code } else { ExitCode::FAILURE }
}
