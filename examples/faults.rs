//! What goes wrong between servers, and what the program does about it: a peer that stops, dies, or comes back as
//! another.
//!
//! Errors are one type, and `kind()` is what to branch on. Whatever happened, local memory is not touched after a
//! transfer has settled, and [`Transfer::settled`](kvx::Transfer::settled) says when that is.

use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvx::{Error, ErrorKind, Grid, Memory, Peer, Plan, Region};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const SOON: Duration = Duration::from_secs(10);
const BLOCKS: Grid = Grid::packed(64 << 10, 64);
const POOL: usize = 64 * (64 << 10);

/// What a decode server does about a fetch that failed.
#[derive(Debug, PartialEq)]
enum Then {
    /// The peer may only be slow: try again, then compute the prompt here.
    RetryOnce,
    /// The peer is gone, or another came in its place: ask for its new metadata, and compute this prompt here.
    Reconnect,
    /// Too much is in flight: later.
    Later,
    /// A mistake of the program or the configuration: nothing that repeats helps. Tell a person.
    Report,
}

/// For reads without a notification. With one, look at [`Error::report`] first: the data may be there, and the peer
/// told.
fn then(error: &Error) -> Then {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::Cancelled => Then::RetryOnce,
        ErrorKind::PeerLost
        | ErrorKind::PeerRestarted
        | ErrorKind::Revoked
        | ErrorKind::Unregistered => Then::Reconnect,
        ErrorKind::Busy | ErrorKind::Exhausted => Then::Later,
        _ => Then::Report,
    }
}

/// A prefill server in a process of its own.
struct Prefill {
    process: Child,
    metadata: Vec<u8>,
}

impl Prefill {
    fn start() -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut process =
            command.arg("prefill").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut said = process.stdout.take().ok_or("the child has no standard output")?;
        let mut length = [0; 8];
        said.read_exact(&mut length)?;
        let mut metadata = vec![0; usize::try_from(u64::from_le_bytes(length))?.min(1 << 20)];
        said.read_exact(&mut metadata)?;
        Ok(Prefill { process, metadata })
    }

    /// Stops it as it stands, like a machine that hangs; or lets it go on.
    fn signal(&self, signal: &str) -> Result {
        let status =
            Command::new("kill").args([signal, &self.process.id().to_string()]).status()?;
        if status.success() { Ok(()) } else { Err(format!("kill {signal}: {status}").into()) }
    }

    /// Stops it, and waits until it stands still: the signal is only sent when `kill` returns.
    fn stop(&self) -> Result {
        self.signal("-STOP")?;
        let until = std::time::Instant::now() + SOON;
        while std::time::Instant::now() < until {
            let threads = std::fs::read_dir(format!("/proc/{}/task", self.process.id()))?;
            let stats = threads.map(|thread| std::fs::read_to_string(thread?.path().join("stat")));
            let stats = stats.collect::<std::io::Result<Vec<_>>>()?;
            if stats
                .iter()
                .all(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
            {
                return Ok(());
            }
            std::thread::yield_now();
        }
        Err("the process does not stop".into())
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        self.process.kill().ok(); // an error: it has ended already
        self.process.wait().ok();
    }
}

/// The other process: it serves until its standard input ends.
fn serve() -> Result {
    let agent = kvx::agent("prefill-0").backends(["TCP"]).build()?;
    let _pool = agent.register("kv", Memory::pool(POOL).build()?)?;
    let metadata = agent.metadata()?;
    let mut answers = std::io::stdout().lock();
    answers.write_all(&(metadata.len() as u64).to_le_bytes())?;
    answers.write_all(&metadata)?;
    answers.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Reads a block and says what came of it. When this returns, nobody touches the cache any more, or the transfer is
/// kept by kvx.
fn fetch(peer: &Peer, cache: &Region, deadline: Duration) -> std::result::Result<u64, Error> {
    let plan =
        Plan::read(cache.grid(BLOCKS)?.blocks([0]), peer.region("kv")?.grid(BLOCKS)?.blocks([5]))?;
    let transfer = peer.transfer(&plan).deadline(deadline).post()?;
    let settled = transfer.settled();
    match transfer.wait_blocking(deadline + SOON) {
        Ok(report) => Ok(report.bytes),
        Err(error) => {
            // The block may be given to another request only when this says so. Not known in time: leave it out.
            if settled.wait_blocking(Duration::from_secs(1)).is_err() {
                println!("block 0 is not used until kvx knows more");
            }
            Err(error)
        }
    }
}

fn main() -> Result {
    if std::env::args().nth(1).as_deref() == Some("prefill") {
        return serve();
    }
    let decode = kvx::agent("decode-0")
        .backends(["TCP"])
        .peer_timeout(Duration::from_secs(5)) // silence with work in flight means that a peer is lost
        .build()?;
    let cache = decode.register("cache", Memory::pool(POOL).build()?)?;
    let prefill = Prefill::start()?;
    let peer = decode.connect(&prefill.metadata)?;
    assert_eq!(fetch(&peer, &cache, SOON)?, 64 << 10);

    // It hangs: the deadline ends the wait, not the peer's health.
    prefill.stop()?;
    let error =
        fetch(&peer, &cache, Duration::from_millis(300)).expect_err("nobody serves the block");
    println!("stopped: {error}");
    assert_eq!((error.kind(), then(&error)), (ErrorKind::TimedOut, Then::RetryOnce));
    prefill.signal("-CONT")?;
    assert_eq!(fetch(&peer, &cache, SOON)?, 64 << 10, "it goes on");

    // It dies: whoever waits is told promptly, and the handle stays lost.
    drop(prefill);
    let error = fetch(&peer, &cache, SOON).expect_err("its process is gone");
    println!("killed: {error}");
    assert_eq!((error.kind(), then(&error)), (ErrorKind::PeerLost, Then::Reconnect));

    // It is started again: its new metadata leads to it, what was known before does not.
    let prefill = Prefill::start()?;
    let peer = decode.connect(&prefill.metadata)?;
    assert_eq!(fetch(&peer, &cache, SOON)?, 64 << 10);

    // A mistake is no fault: it is refused before anything moves.
    let error = peer.region("kw").err().ok_or("there is no such region")?;
    println!("wrong: {error}");
    assert_eq!(then(&error), Then::Reconnect, "it may be registered later: newer metadata says so");
    decode.shutdown(SOON).join()?;
    Ok(())
}
