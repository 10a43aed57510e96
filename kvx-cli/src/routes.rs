//! Finds out how a backend reaches a second process of this host: by a link to one and a block each
//! way.

use std::time::{Duration, Instant};

use kvx::{Agent, Grid, Memory, Peer, Plan, Registry};
use kvx_core::Verdict;

use crate::Result;
use crate::bench::pools::{PoolKind, Sizes};
use crate::bench::target::TargetProcess;

/// How long the other process may take to start, a link to come up, and a transfer or a shutdown to
/// end.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest life of the other process, should it not see that this one has ended.
const LIFE: Duration = Duration::from_secs(600);
/// UCX chooses how it gets and puts at the first of each, and is asked for it when it is idle. Old
/// versions never say.
const CHOICE: Duration = Duration::from_secs(2);
/// One block is read and written.
const BLOCK: u64 = 256;

/// Returns the backend's description of a link to a second process of this program.
///
/// # Errors
///
/// There is no link, or a transfer over it failed.
pub(crate) fn of(backend: &'static str, registry: &Registry) -> Result<String> {
    let agent = Agent::builder("routes").backends([backend]).registry(registry.clone()).build()?;
    let sizes = Sizes::kvx(1 << 20);
    let target = TargetProcess::start(&[backend], "{}", sizes, LIFE, PATIENCE)?;
    let route = through(&agent, target.metadata(backend)?);
    // The link goes before the process that it leads to. How it ends says nothing of the route.
    agent.shutdown(PATIENCE).join().ok();
    target.end();
    route
}

fn through(agent: &Agent, metadata: &[u8]) -> Result<String> {
    let grid = Grid::packed(BLOCK, 1);
    let room = agent.register("room", Memory::pool(BLOCK as usize).build()?)?;
    let peer = agent.connect(metadata)?;
    peer.ready(PATIENCE).join()?;
    let (ours, theirs) = (room.grid(grid)?, peer.region(PoolKind::Kvx.name())?.grid(grid)?);
    for plan in [
        Plan::read(ours.blocks([0]), theirs.blocks([0]))?,
        Plan::write(ours.blocks([0]), theirs.blocks([0]))?,
    ] {
        peer.transfer(&plan).deadline(PATIENCE).post()?.wait_blocking(PATIENCE)?;
    }
    settled(&peer)
}

/// The link's own words, once there is nothing to be added to them or no time is left.
fn settled(peer: &Peer) -> Result<String> {
    let until = Instant::now() + CHOICE;
    loop {
        let route = peer.route();
        let up = route.candidates.iter().find_map(|considered| match &considered.verdict {
            Verdict::Up(how) => Some((considered.backend, how)),
            _ => None,
        });
        let (backend, how) = up.ok_or_else(|| route.to_string())?;
        let complete = backend != "UCX" || how.contains("gets: ") && how.contains("puts: ");
        if complete || Instant::now() >= until {
            return Ok(how.clone());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
