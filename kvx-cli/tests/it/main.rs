//! The integration tests of the program.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

#[cfg(all(feature = "serve", feature = "proxy"))]
mod attacks;
mod bench;
#[cfg(feature = "proxy")]
mod deploy;
#[cfg(all(feature = "serve", feature = "proxy"))]
mod doctor;
mod documents;
mod peers;
#[cfg(feature = "connector")]
mod probe;
mod program;
#[cfg(feature = "proxy")]
mod proxy;
// The module starts the router in front of its servers, and the demo.
#[cfg(all(feature = "serve", feature = "proxy"))]
mod serve;

use std::process::ExitCode;

use kvx_testkit::harness_main_with;

/// Returns the name of the test on this thread: the harness names threads after tests.
fn this_test() -> String {
    std::thread::current().name().unwrap_or_default().to_owned()
}

fn main() -> ExitCode {
    kvx_instance::run_if_asked();
    let mut trials = documents::trials();
    #[cfg(feature = "proxy")]
    trials.extend(proxy::all_trials());
    #[cfg(all(feature = "serve", feature = "proxy"))]
    trials.extend(serve::guides::trials());
    #[cfg(all(feature = "serve", feature = "proxy"))]
    trials.extend(serve::registered::trials());
    // Run four at a time: most tests mostly wait.
    harness_main_with(trials, 4)
}
