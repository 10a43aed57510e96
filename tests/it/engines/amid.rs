//! A load some of whose blocks have come: the process that they come to stands still then.

use std::time::{Duration, Instant};

use kvx::Result;
use kvx_testkit::HungPage;
use rustix::process::{Signal, getpid, kill_process};

use crate::engines::engine::refused;
use crate::engines::model::RankMemory;

/// How long a load's blocks may take to come.
const ARRIVAL: Duration = Duration::from_secs(2);
/// As much of a block as is looked at, at its ends.
const END: usize = 32;

/// Waits until some of these blocks are as expected and others are not, and stops this process. False: all came at
/// once, or none in time.
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

/// Waits until whoever writes has come to this page, and stops this process: the page comes when it goes on. False:
/// nobody came.
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

/// Comes back when the process goes on.
fn stop() -> Result<bool> {
    kill_process(getpid(), Signal::STOP).map(|()| true).map_err(refused)
}
