//! `kvx demo --transfer`: moves scattered blocks between two processes, and shows the cost and the
//! error when one of them is killed.

use std::io::Write;
use std::time::{Duration, Instant};

use kvx::{Agent, ErrorKind, Memory, Options, Peer, Plan, Registry};

use super::blocks::DemoBlocks;
use crate::bench::pools::{PoolKind, Sizes};
use crate::bench::target::{Ask, TargetProcess};
use crate::{Result, bytes};

/// The number of rounds, in which all alternate.
const ROUNDS: usize = 5;
/// The timeout for a link to come up, and a transfer or a shutdown to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// The timeout for the owner to fill and publish its pool.
const START: Duration = Duration::from_secs(60);
/// The time after which the owner exits, even if it does not notice that its reader has ended.
const LIFE: Duration = Duration::from_secs(600);

/// Runs the demo. `Ok` means that every check has passed.
pub(super) fn run(
    written: &[String],
    size: u64,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<()> {
    let mut backends = Vec::new();
    for written in written {
        let name = registry.require(written, &Options::new())?.0.name();
        if !backends.contains(&name) {
            backends.push(name);
        }
    }
    let blocks = DemoBlocks::of(size)?;
    let (count, length) = (blocks.from.len(), bytes::show(blocks.length()));
    let start = Instant::now();
    let mut owner = TargetProcess::start(&backends, "{}", Sizes::kvx(size), LIFE, START)?;
    owner.ask(Ask::Fill { memory: PoolKind::Kvx, bytes: size })?;
    writeln!(
        out,
        "Process {} owns a pool of {}; process {} reads {count} scattered blocks of {length} of it.",
        owner.pid(),
        bytes::show(size),
        std::process::id()
    )?;
    writeln!(
        out,
        "The pool was published after {}; its metadata is {} bytes.",
        seconds(start.elapsed()),
        owner.metadata(backends[0])?.len()
    )?;

    let readers = backends
        .iter()
        .map(|backend| DemoReader::connect(backend, registry, owner.metadata(backend)?, &blocks))
        .collect::<Result<Vec<_>>>()?;
    writeln!(out)?;
    for reader in &readers {
        let first = reader.read()?;
        blocks.check(&reader.room)?;
        writeln!(out, "Route: {}.", reader.peer.route())?;
        writeln!(out, "  The first read took {}; every byte is right.", seconds(first))?;
    }

    let costs = measure(&readers, &blocks)?;
    let bare = costs[0];
    writeln!(
        out,
        "\n{} per read, median of {ROUNDS} alternating rounds:",
        bytes::show(blocks.read_bytes())
    )?;
    let names = std::iter::once("bare copy").chain(backends.iter().copied());
    for (name, cost) in names.zip(costs) {
        let rate = blocks.read_bytes() as f64 / cost.as_secs_f64() / 1e9;
        let times = cost.as_secs_f64() / bare.as_secs_f64();
        let beside = if name == "bare copy" {
            String::new()
        } else {
            format!("  {times:.2} times the bare copy")
        };
        writeln!(out, "  {name:<10} {:>10}  {rate:>6.2} GB/s{beside}", seconds(cost))?;
    }

    owner.kill()?;
    writeln!(out, "\nProcess {} was killed. The next read fails:", owner.pid())?;
    for reader in &readers {
        let (after, error) = reader.read_until_told(&blocks)?;
        writeln!(out, "  {} after {}: {error}", reader.backend, seconds(after))?;
        if error.kind() != ErrorKind::PeerLost {
            return Err(
                format!("expected {:?}, got {:?}", ErrorKind::PeerLost, error.kind()).into()
            );
        }
    }
    for reader in readers {
        reader.agent.shutdown(PATIENCE / 2).join()?;
    }
    writeln!(out, "All checks passed.")?;
    Ok(())
}

/// An agent that reads over one backend.
struct DemoReader {
    backend: &'static str,
    agent: Agent,
    peer: Peer,
    room: std::sync::Arc<Memory>,
    plan: Plan,
}

impl DemoReader {
    fn connect(
        backend: &'static str,
        registry: &Registry,
        metadata: &[u8],
        blocks: &DemoBlocks,
    ) -> Result<Self> {
        let agent = Agent::builder(format!("demo-reader-{backend}"))
            .backends([backend])
            .registry(registry.clone())
            .build()?;
        let region = agent.register("room", blocks.empty_room()?)?;
        let peer = agent.connect(metadata)?;
        peer.ready(PATIENCE).join()?;
        let plan = Plan::read(
            region.grid(blocks.room)?.blocks(blocks.to.clone()),
            peer.region(PoolKind::Kvx.name())?.grid(blocks.pool)?.blocks(blocks.from.clone()),
        )?;
        Ok(DemoReader { backend, agent, peer, room: std::sync::Arc::clone(region.memory()), plan })
    }

    /// Reads all blocks once, and returns the time that it took.
    fn read(&self) -> kvx::Result<Duration> {
        let start = Instant::now();
        self.peer.transfer(&self.plan).deadline(PATIENCE).post()?.wait_blocking(PATIENCE)?;
        Ok(start.elapsed())
    }

    /// Reads until a read reports the loss of the owner. Reads that still succeed must return the
    /// right bytes.
    fn read_until_told(&self, blocks: &DemoBlocks) -> Result<(Duration, kvx::Error)> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            blocks.wipe(&self.room)?;
            let asked = Instant::now();
            match self.read() {
                Ok(_) => blocks.check(&self.room)?,
                Err(error) => return Ok((asked.elapsed(), error)),
            }
        }
        Err(format!("{} still read from a dead process after {PATIENCE:?}", self.backend).into())
    }
}

/// Returns the median cost of a bare copy, then of each reader. Checks the bytes of the last round.
fn measure(readers: &[DemoReader], blocks: &DemoBlocks) -> Result<Vec<Duration>> {
    let (pool, room) = (blocks.filled_pool()?, blocks.empty_room()?);
    let mut costs = vec![Vec::with_capacity(ROUNDS); readers.len() + 1];
    for reader in readers {
        blocks.wipe(&reader.room)?;
    }
    for _ in 0..ROUNDS {
        let start = Instant::now();
        blocks.copy(&pool, &room);
        costs[0].push(start.elapsed());
        for (reader, costs) in readers.iter().zip(&mut costs[1..]) {
            costs.push(reader.read()?);
        }
    }
    for reader in readers {
        blocks.check(&reader.room)?;
    }
    Ok(costs.into_iter().map(median).collect())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Formats a time: `0.35 s`, `7.1 ms`, `82 us`.
fn seconds(time: Duration) -> String {
    match time.as_secs_f64() {
        long if long >= 0.1 => format!("{long:.2} s"),
        middle if middle >= 1e-3 => format!("{:.1} ms", middle * 1e3),
        short => format!("{:.0} us", short * 1e6),
    }
}
