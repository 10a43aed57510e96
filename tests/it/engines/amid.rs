//! Stops a process in the middle of a load, when some of its blocks have arrived.

use std::time::{Duration, Instant};

use kvx::Result;
use kvx_testkit::HungPage;
use rustix::process::{Signal, getpid, kill_process};

use crate::engines::engine::refused;
use crate::engines::model::RankMemory;

/// The time limit for the arrival of a load's blocks.
const ARRIVAL: Duration = Duration::from_secs(2);
/// Bytes at each end of a block that are compared.
const END: usize = 32;

/// Waits until some of these blocks are as expected and others are not, and then stops this
/// process. Returns false if all blocks arrived at once, or none in time.
pub(crate) fn stop_between(rank: &RankMemory, expected: &[(usize, Vec<u8>)]) -> Result<bool> {
    let until = Instant::now() + ARRIVAL;
    while Instant::now() < until {
        let is_as_expected = |at: usize, wanted: &[u8]| {
            let mut is = [0; END];
            rank.memory.copy_out(at, &mut is).map(|()| is == *wanted)
        };
        let (mut begun, mut over) = (false, true);
        for (at, wanted) in expected {
            let end = wanted.len() - END;
            begun |= is_as_expected(*at, &wanted[..END])?;
            over &= is_as_expected(at + end, &wanted[end..])?;
        }
        if begun || over {
            return if over { Ok(false) } else { stop() };
        }
    }
    Ok(false)
}

/// Waits until the writer accesses this page, and then stops this process. The page is supplied
/// when the process continues. Returns false if the writer does not access it in time.
pub(crate) fn stop_at(page: HungPage) -> Result<bool> {
    let until = Instant::now() + ARRIVAL;
    while !page.is_touched() {
        if Instant::now() >= until {
            return Ok(false);
        }
    }
    let stopped = stop();
    drop(page);
    stopped
}

/// Stops this process; returns when it continues.
fn stop() -> Result<bool> {
    kill_process(getpid(), Signal::STOP).map(|()| true).map_err(refused)
}
