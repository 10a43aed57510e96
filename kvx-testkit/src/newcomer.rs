//! A reader that an owner has not seen before.

use std::time::{Duration, Instant};

use kvx_core::{Agent, Grid, Memory, Plan, Result};

use crate::check::CUT_OFF;

/// Connects `reader` to the owner of this metadata, reads a block of its region `kv` of 64 KiB, and
/// shuts `reader` down. Returns how long it waited for the block.
///
/// # Errors
/// The errors of the agent.
pub fn newcomer(reader: &Agent, owner: &[u8]) -> Result<Duration> {
    let here = reader.register("kv", Memory::pool(64 << 10).build()?)?;
    let begun = Instant::now();
    let peer = reader.connect(owner)?;
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF)?;
    let grid = Grid::packed(4096, 16);
    let there = peer.region("kv")?.grid(grid)?.blocks(vec![3]);
    peer.post(&Plan::read(here.grid(grid)?.blocks(vec![5]), there)?)?.wait_blocking(CUT_OFF)?;
    let waited = begun.elapsed();
    reader.shutdown(CUT_OFF).wait_blocking(CUT_OFF)?;
    Ok(waited)
}

/// Runs newcomers one after another while `trouble` runs. Returns the result of `trouble`.
///
/// # Panics
/// If a newcomer is not served in time, or if most of them wait longer than a second. Concurrent
/// tests may delay some of them.
#[expect(clippy::expect_used, reason = "a test that cannot go on must fail")]
pub fn newcomers_amid<T: Send>(
    reader: impl Fn() -> Agent,
    owner: &[u8],
    trouble: impl FnOnce() -> T + Send,
) -> T {
    std::thread::scope(|scope| {
        let trouble = scope.spawn(trouble);
        let mut waits = Vec::new();
        while waits.is_empty() || !trouble.is_finished() {
            waits.push(newcomer(&reader(), owner).expect("the owner serves a newcomer"));
        }
        waits.sort_unstable();
        assert!(waits[waits.len() / 2] < Duration::from_secs(1), "newcomers waited {waits:?}");
        trouble.join().expect("the trouble does not panic")
    })
}
