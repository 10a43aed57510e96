//! The target: the process that owns the other side's memory, and its requests.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use kvx::{Options, Registry};
use serde::{Deserialize, Serialize};

use super::access::{fetch, map, share};
use super::content::{self, ShapeBlocks};
use super::deadlines::{ANSWER_DEADLINE, DEADLINE};
use super::points::{BenchOp, Shape};
use super::pools::{PoolKind, PoolLocation, Pools, Sizes};
use crate::Result;
use crate::child::Child;

/// The arguments of `kvx bench-target`.
#[derive(Args)]
pub(crate) struct TargetArguments {
    #[arg(long, value_delimiter = ',')]
    backend: Vec<String>,
    #[arg(long)]
    options: String,
    #[command(flatten)]
    sizes: Sizes,
    /// The number of seconds after which the target exits in any case.
    #[arg(long)]
    life: u64,
}

/// The first line of the target, which describes its agents and its memory.
#[derive(Serialize, Deserialize)]
struct TargetIntroduction {
    /// The metadata of each backend's agent.
    metadata: BTreeMap<String, Vec<u8>>,
    /// The address for bare connections.
    address: SocketAddr,
    kvx: Option<PoolLocation>,
    foreign: Option<PoolLocation>,
}

/// A request to the target, which answers with a number of seconds or an error.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Fill the first bytes as a source.
    Fill { memory: PoolKind, bytes: u64 },
    /// Zero the first bytes as a destination.
    Wipe { memory: PoolKind, bytes: u64 },
    /// Compare the first lists of the destination with the expected content.
    Check { memory: PoolKind, shape: Shape, lists: u32 },
    /// Accept bare connections, and serve the blocks over them until they close.
    Lanes { op: BenchOp, memory: PoolKind, shape: Shape, lanes: usize, sealed: bool },
    /// Pull `times` lists from that location, beginning with transfer `first`.
    Pull { memory: PoolKind, shape: Shape, from: PoolLocation, first: u64, times: u64 },
}

/// Runs the target until standard input ends.
pub(crate) fn serve(
    arguments: &TargetArguments,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<()> {
    let life = Duration::from_secs(arguments.life);
    std::thread::spawn(move || {
        std::thread::sleep(life);
        eprintln!("kvx: the target of a bench exits after its maximum life of {life:?}");
        std::process::exit(1);
    });
    let pools = Pools::of(arguments.sizes)?;
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let mut agents = Vec::new();
    let mut metadata = BTreeMap::new();
    for backend in &arguments.backend {
        let options = Options::parse(&arguments.options)?;
        let builder =
            pools.agent(&format!("bench-target-{backend}")).backends([backend]).options(options);
        let agent = builder.registry(registry.clone()).build()?;
        let regions = pools.all().map(|(pool, memory)| agent.register(pool.name(), memory.clone()));
        let regions = regions.collect::<kvx::Result<Vec<_>>>()?;
        metadata.insert(backend.clone(), agent.metadata()?);
        agents.push((agent, regions));
    }
    let (kvx, foreign) =
        (pools.location(PoolKind::Kvx).ok(), pools.location(PoolKind::Foreign).ok());
    let greeting = TargetIntroduction { metadata, address: listener.local_addr()?, kvx, foreign };
    writeln!(out, "{}", serde_json::to_string(&greeting)?)?;
    out.flush()?;
    let mut served = TargetServer { pools, listener, mapped: None };
    for line in std::io::stdin().lock().lines() {
        let answer =
            served.answer(serde_json::from_str(&line?)?).map_err(|error| error.to_string());
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    for (agent, _regions) in agents {
        agent.shutdown(DEADLINE).join()?;
    }
    Ok(())
}

struct TargetServer {
    pools: Pools,
    listener: TcpListener,
    /// The address of the initiator's pool, once it has been pulled from.
    mapped: Option<u64>,
}

impl TargetServer {
    fn answer(&mut self, ask: Ask) -> Result<f64> {
        match ask {
            Ask::Fill { memory, bytes } => content::fill(self.pools.get(memory)?, bytes)?,
            Ask::Wipe { memory, bytes } => content::wipe(self.pools.get(memory)?, bytes)?,
            Ask::Check { memory, shape, lists } => {
                content::check(self.pools.get(memory)?, shape, lists)?
            }
            Ask::Lanes { op, memory, shape, lanes, sealed } => {
                self.lanes(op, memory, shape, (lanes, sealed))?
            }
            Ask::Pull { memory, shape, from, first, times } => {
                return self.pull(memory, shape, from, first..first + times);
            }
        }
        Ok(0.0)
    }

    fn lanes(
        &self,
        op: BenchOp,
        memory: PoolKind,
        shape: Shape,
        (lanes, sealed): (usize, bool),
    ) -> Result<()> {
        let base = self.pools.get(memory)?.address();
        let blocks = match op {
            BenchOp::Read => shape.from(),
            BenchOp::Write => shape.to(),
        };
        for lane in 0..lanes {
            // The initiator has connected already.
            let (socket, _) = self.listener.accept()?;
            let mut lane = share(socket, (base, sealed), shape, &blocks, (lane, lanes))?;
            // It ends with the connection, or with this process; the memory lives as long as this
            // process.
            std::thread::spawn(move || lane.serve(op == BenchOp::Read));
        }
        Ok(())
    }

    fn pull(
        &mut self,
        memory: PoolKind,
        shape: Shape,
        from: PoolLocation,
        transfers: Range<u64>,
    ) -> Result<f64> {
        let memory = self.pools.get(memory)?;
        let blocks = ShapeBlocks::of(shape);
        let mapped = map(from, &mut self.mapped)?;
        let start = Instant::now();
        for transfer in transfers {
            // SAFETY: both sides' memory has all blocks of the shape, and this process holds no
            // references into its own.
            unsafe { fetch(mapped, from, memory.address(), blocks.list(transfer)) }?;
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// The initiator's handle to the target's process.
pub(crate) struct TargetProcess {
    child: Child,
    greeting: TargetIntroduction,
}

impl TargetProcess {
    /// Starts a target, and waits until it is ready. It exits after `life` in any case.
    pub(crate) fn start(
        backends: &[&str],
        options: &str,
        sizes: Sizes,
        life: Duration,
        deadline: Duration,
    ) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["bench-target", "--backend", &backends.join(","), "--options", options]);
        command.args(sizes.arguments());
        command.args(["--life", &life.as_secs().to_string()]);
        let mut child = Child::start("the target", command)?;
        let greeting = serde_json::from_str(&child.receive_line(deadline)?)?;
        Ok(TargetProcess { child, greeting })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Kills the target by its process id.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill()
    }

    /// Returns the address for bare connections.
    pub(crate) fn address(&self) -> SocketAddr {
        self.greeting.address
    }

    /// Returns the metadata of the target's agent for this backend.
    pub(crate) fn metadata(&self, backend: &str) -> Result<&[u8]> {
        let metadata = self.greeting.metadata.get(backend);
        Ok(metadata.ok_or_else(|| format!("the target has no agent for {backend}"))?)
    }

    /// Returns the location of the target's host memory.
    pub(crate) fn location(&self, pool: PoolKind) -> Result<PoolLocation> {
        let place = match pool {
            PoolKind::Kvx => self.greeting.kvx,
            PoolKind::Foreign => self.greeting.foreign,
            PoolKind::Device => None,
        };
        place.ok_or_else(|| "the target has no memory of that kind on the host".into())
    }

    /// Sends a request, and waits for the answer.
    pub(crate) fn ask(&mut self, ask: Ask) -> Result<f64> {
        self.child.send_line(&serde_json::to_string(&ask)?)?;
        let answer: std::result::Result<f64, String> =
            serde_json::from_str(&self.child.receive_line(ANSWER_DEADLINE)?)?;
        Ok(answer.map_err(|why| format!("the target: {why}"))?)
    }

    /// Closes the target's input, and waits for it to exit.
    pub(crate) fn end(self) {
        self.child.end();
    }
}
