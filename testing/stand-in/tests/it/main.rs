//! The stand-in as drivers are used: opened at run time, called through its C interface.

mod cuda;
mod hip;
mod memory;
mod processes;
mod streams;
mod symbols;

use std::process::ExitCode;
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    processes::play_if_asked();
    kvx_testkit::harness_main([])
}

/// Calls `done` until it says so.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(8);
    while !done() {
        assert!(Instant::now() < until, "{what} does not come");
        std::thread::yield_now();
    }
}
