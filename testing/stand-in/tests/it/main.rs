//! Tests the stand-in in the way that programs use drivers: opened at run time, and called through
//! its C interface.

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

/// Calls `done` until it returns true.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(8);
    while !done() {
        assert!(Instant::now() < until, "{what} must happen in time");
        std::thread::yield_now();
    }
}
