//! Shows how servers fail and what a program does about it: a peer that hangs, dies, or restarts.
//!
//! kvx has one error type; branch on its `kind()`. After any failure, no transfer touches local
//! memory once it has settled, and [`Transfer::settled`](kvx::Transfer::settled) says when that is.

use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvx::{Error, ErrorKind, Grid, Memory, Peer, Plan, Region};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const SOON: Duration = Duration::from_secs(10);
const BLOCKS: Grid = Grid::packed(64 << 10, 64);
const POOL: usize = 64 * (64 << 10);

/// The reaction of a decode server to a failed fetch.
#[derive(Debug, PartialEq)]
enum Then {
    /// The peer may only be slow. Retry once, then compute the prompt locally.
    RetryOnce,
    /// The peer is gone or was replaced. Request its new metadata, and compute this prompt locally.
    Reconnect,
    /// Too much is in flight. Retry later.
    Later,
    /// The program or the configuration is wrong. Retrying does not help; report it to an operator.
    Report,
}

/// Chooses the reaction for a read without a notification.
///
/// If the transfer carries one, check [`Error::report`] first: the data may have arrived, and the
/// peer may have the notification.
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

/// A prefill server in a child process.
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

    /// Sends a signal: `-STOP` freezes the process, as if its machine hung; `-CONT` resumes it.
    fn signal(&self, signal: &str) -> Result {
        let status =
            Command::new("kill").args([signal, &self.process.id().to_string()]).status()?;
        if status.success() { Ok(()) } else { Err(format!("kill {signal}: {status}").into()) }
    }

    /// Freezes the process, and waits until all its threads have stopped: `kill` does not wait for
    /// that.
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
        Err("the process has not stopped within 10 s of SIGSTOP".into())
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        self.process.kill().ok(); // fails if it has already exited
        self.process.wait().ok();
    }
}

/// Runs the prefill server until its standard input ends.
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

/// Reads a block. When this returns, the transfer either has settled and no longer touches the
/// cache, or kvx still tracks it.
fn fetch(peer: &Peer, cache: &Region, deadline: Duration) -> std::result::Result<u64, Error> {
    let plan =
        Plan::read(cache.grid(BLOCKS)?.blocks([0]), peer.region("kv")?.grid(BLOCKS)?.blocks([5]))?;
    let transfer = peer.transfer(&plan).deadline(deadline).post()?;
    let settled = transfer.settled();
    match transfer.wait_blocking(deadline + SOON) {
        Ok(report) => Ok(report.bytes),
        Err(error) => {
            // Another request may use the block only after `settled` completes. If it does not in
            // time, leave the block unused.
            if settled.wait_blocking(Duration::from_secs(1)).is_err() {
                println!("block 0 stays unused until its transfer settles");
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
        // Without an answer for this long, a peer with work in flight is lost.
        .peer_timeout(Duration::from_secs(5))
        .build()?;
    let cache = decode.register("cache", Memory::pool(POOL).build()?)?;
    let prefill = Prefill::start()?;
    let peer = decode.connect(&prefill.metadata)?;
    assert_eq!(fetch(&peer, &cache, SOON)?, 64 << 10);

    // The peer hangs: the deadline ends the transfer, but the peer is not lost.
    prefill.stop()?;
    let error = fetch(&peer, &cache, Duration::from_millis(300))
        .expect_err("a stopped process serves no block");
    println!("stopped: {error}");
    assert_eq!((error.kind(), then(&error)), (ErrorKind::TimedOut, Then::RetryOnce));
    prefill.signal("-CONT")?;
    assert_eq!(fetch(&peer, &cache, SOON)?, 64 << 10, "the peer serves again");

    // The peer dies: all waits fail promptly, and its handle stays unusable.
    drop(prefill);
    let error = fetch(&peer, &cache, SOON).expect_err("its process is gone");
    println!("killed: {error}");
    assert_eq!((error.kind(), then(&error)), (ErrorKind::PeerLost, Then::Reconnect));

    // The peer restarts: connect with its new metadata. The old handle does not lead to it.
    let prefill = Prefill::start()?;
    let peer = decode.connect(&prefill.metadata)?;
    assert_eq!(fetch(&peer, &cache, SOON)?, 64 << 10);

    // A mistake in the program: kvx rejects it before any byte moves.
    let error = peer.region("kw").err().ok_or("there is no such region")?;
    println!("wrong: {error}");
    assert_eq!(then(&error), Then::Reconnect, "the region may exist in newer metadata");
    decode.shutdown(SOON).join()?;
    Ok(())
}
