//! Determines how a backend reaches a second process of this host: connects to one and moves a
//! block each way.

use std::time::{Duration, Instant};

use kvx::{Agent, Grid, Memory, Peer, Plan, Registry};
use kvx_core::Verdict;

use crate::Result;
use crate::bench::pools::{PoolKind, Sizes};
use crate::bench::target::TargetProcess;

/// The timeout for the other process to start, a link to come up, and a transfer or a shutdown to
/// end.
const PATIENCE: Duration = Duration::from_secs(10);
/// The time after which the other process exits, even if it does not notice that this one has
/// ended.
const LIFE: Duration = Duration::from_secs(600);
/// The wait for UCX's protocols. UCX chooses them at the first get and the first put, and reports
/// them when it is idle. Old versions never do.
const CHOICE: Duration = Duration::from_secs(2);
/// The size of the block that is read and written.
const BLOCK: u64 = 256;

/// Returns the backend's description of a link to a second process of this program.
///
/// # Errors
///
/// Fails if there is no link, or if a transfer over it fails.
pub(crate) fn of(backend: &'static str, registry: &Registry) -> Result<String> {
    let agent = Agent::builder("routes").backends([backend]).registry(registry.clone()).build()?;
    let sizes = Sizes::kvx(1 << 20);
    let target = TargetProcess::start(&[backend], "{}", sizes, LIFE, PATIENCE)?;
    let route = through(&agent, target.metadata(backend)?);
    // Close the link before the process at its other end. The route does not depend on how the link
    // ends.
    agent.shutdown(PATIENCE).join().ok();
    target.end();
    route
}

fn through(agent: &Agent, metadata: &[u8]) -> Result<String> {
    let grid = Grid::packed(BLOCK, 1);
    let local = agent.register("local", Memory::pool(BLOCK as usize).build()?)?;
    let peer = agent.connect(metadata)?;
    peer.ready(PATIENCE).join()?;
    let (ours, theirs) = (local.grid(grid)?, peer.region(PoolKind::Kvx.name())?.grid(grid)?);
    for plan in [
        Plan::read(ours.blocks([0]), theirs.blocks([0]))?,
        Plan::write(ours.blocks([0]), theirs.blocks([0]))?,
    ] {
        peer.transfer(&plan).deadline(PATIENCE).post()?.wait_blocking(PATIENCE)?;
    }
    settled(&peer)
}

/// Returns the link's description once it is complete, or its state after [`CHOICE`].
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
