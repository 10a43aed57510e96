//! A reader that an owner has not seen before.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use kvx_core::{Agent, Grid, Memory, Peer, Plan, Region, Result};

use crate::check::CUT_OFF;
use crate::hex::hex;
use crate::listener::Client;
use crate::process::answers_apart;

/// Connects `reader` to the owner of this metadata, reads a block of its region `kv` of 64 KiB, and
/// shuts `reader` down. Returns how long it waited for the block.
///
/// # Errors
/// The errors of the agent.
pub fn newcomer(reader: &Agent, owner: &[u8]) -> Result<Duration> {
    let here = reader.register("kv", Memory::pool(64 << 10).build()?)?;
    let begun = Instant::now();
    let (peer, plan) = connected(reader, &here, owner)?;
    peer.post(&plan)?.wait_blocking(CUT_OFF)?;
    let waited = begun.elapsed();
    reader.shutdown(CUT_OFF).wait_blocking(CUT_OFF)?;
    Ok(waited)
}

/// Connects a reader with a region of 64 KiB, and plans to read a block.
fn connected(reader: &Agent, here: &Region, owner: &[u8]) -> Result<(Peer, Plan)> {
    let peer = reader.connect(owner)?;
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF)?;
    let grid = Grid::packed(4096, 16);
    let there = peer.region("kv")?.grid(grid)?.blocks(vec![3]);
    let plan = Plan::read(here.grid(grid)?.blocks(vec![5]), there)?;
    Ok((peer, plan))
}

/// Returns the clients of an owner's [`Listener`](crate::Listener): a reader that is connected, and
/// newcomers.
///
/// # Errors
/// The errors of the first reader.
pub fn readers<'a>(
    reader: impl Fn() -> Agent + Send + 'a,
    owner: &'a [u8],
) -> Result<Vec<Client<'a>>> {
    let first = reader();
    let here = first.register("kv", Memory::pool(64 << 10).build()?)?;
    let (peer, plan) = connected(&first, &here, owner)?;
    // They live as long as the client.
    let alive = (first, here);
    let connected = Client::new("a connected reader", move || {
        let _alive = &alive;
        Ok(peer.post(&plan)?.wait_blocking(CUT_OFF).map(drop)?)
    });
    let newcomers = Client::new("a newcomer", move || Ok(newcomer(&reader(), owner).map(drop)?));
    Ok(vec![connected, newcomers])
}

/// Owns a region for newcomers until the parent ends, and never returns, if this process was started
/// with the environment variable `role`. It prints the owner's metadata as hexadecimal digits.
///
/// # Panics
/// If the agent cannot be built.
#[expect(clippy::expect_used, reason = "a child that cannot go on must fail")]
pub fn own_if_asked(role: &str, owner: impl FnOnce() -> Agent) {
    if std::env::var_os(role).is_none() {
        return;
    }
    let mut answers = answers_apart().expect("standard output can be redirected");
    let owner = owner();
    let pool = Memory::pool(64 << 10).build().expect("memory for 64 KiB");
    let _region = owner.register("kv", pool).expect("a region");
    let metadata = owner.metadata().expect("metadata");
    writeln!(answers, "{}", hex(&metadata)).expect("the parent listens");
    std::io::stdin().read_to_end(&mut Vec::new()).expect("the parent ends this process");
    std::process::exit(0);
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
