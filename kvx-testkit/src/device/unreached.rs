//! Checks that a backend refuses device memory that it does not reach, and that another backend
//! carries it instead.

use std::sync::Arc;

use kvx_core::{Agent, ErrorKind, Grid, Memory, MemoryKind, Op, Options, Plan, Region, Registry};

use super::test_device::TestDevice;
use crate::check::{CUT_OFF, Check, Failure, ensure};
use crate::pattern;
use crate::unique::unique;

const BLOCK: u64 = 4096;
const BLOCKS: u32 = 64;
const LEN: usize = (BLOCKS as usize) * (BLOCK as usize);

/// Checks what a backend says about kinds of device memory that it does not reach. Alone, the
/// backend refuses them at `register`, with the reason. Together with `other`, which does reach
/// them, `other` moves that memory, and the backend the rest.
///
/// # Errors
/// The first difference; also if the backend reaches every kind.
pub fn goes_elsewhere(registry: &Registry, backend: &str, other: &str, options: &str) -> Check {
    let options = Options::parse(options)?;
    let reached = registry.require(backend, &options)?.1.capabilities.local;
    let kinds =
        [MemoryKind::Cuda, MemoryKind::Rocm].into_iter().filter(|kind| !reached.contains(*kind));
    let mut looked = false;
    for kind in kinds {
        looked = true;
        let device = TestDevice::new(kind);
        let agent = |backends: &[&str]| {
            let builder = Agent::builder(unique("elsewhere")).options(options.clone());
            builder
                .backends(backends.iter().copied())
                .device(Arc::clone(&device) as _)
                .registry(registry.clone())
                .build()
        };
        refused_alone(&agent(&[backend])?, &device, backend)?;
        let (near, far) = (agent(&[backend, other])?, agent(&[backend, other])?);
        let _peer = near.connect(&far.metadata()?)?; // links stay up
        for (local, remote) in [(true, true), (true, false), (false, true), (false, false)] {
            for op in [Op::Read, Op::Write] {
                let memory = |on_device| {
                    if on_device { device.allocate(LEN) } else { Memory::owned(vec![0; LEN]) }
                };
                let which = |why: Failure| {
                    Failure::new(format!(
                        "{op}, {kind} memory here: {local}, there: {remote}: {why}"
                    ))
                };
                let carrier =
                    moved(op, (&near, memory(local)), (&far, memory(remote))).map_err(which)?;
                let wanted = if local || remote { other } else { backend };
                ensure!(
                    carrier == wanted,
                    "{op}, {kind} memory here: {local}, there: {remote}: {carrier}, not {wanted}"
                );
            }
        }
        near.shutdown(CUT_OFF).wait_blocking(CUT_OFF)?;
        far.shutdown(CUT_OFF).wait_blocking(CUT_OFF)?;
        let faults = device.counters().faults;
        ensure!(faults == 0, "{faults} copies named memory that does not exist");
    }
    if looked { Ok(()) } else { Err(Failure::new(format!("{backend} claims to reach every kind"))) }
}

fn refused_alone(agent: &Agent, device: &Arc<TestDevice>, backend: &str) -> Check {
    let refused = agent.register("kv", device.allocate(LEN)).err();
    let why = refused
        .ok_or_else(|| Failure::new(format!("{backend} accepts memory that it does not reach")))?;
    let kind = device.allocate(1).kind().to_string();
    let told = why.kind() == ErrorKind::Unsupported
        && [backend, &kind].iter().all(|word| why.sentence().contains(word));
    ensure!(told, "{backend} and {kind} memory: the reason is {why:?}");
    ensure!(device.allocations() == 0, "memory that was refused is still allocated");
    agent.register("kv", Memory::owned(vec![0; LEN]))?; // the name is free again
    agent.shutdown(CUT_OFF).wait_blocking(CUT_OFF)?;
    Ok(())
}

/// Moves all blocks in reverse order. Returns the backend that carried them.
fn moved(op: Op, near: (&Agent, Memory), far: (&Agent, Memory)) -> Result<&'static str, Failure> {
    let (ours, theirs) = (near.0.register("kv", near.1)?, far.0.register("kv", far.1)?);
    pattern::fill(ours.memory(), 1)?;
    pattern::fill(theirs.memory(), 2)?;
    let peer = near.0.connect(&far.0.metadata()?)?;
    let (grid, backwards) = (Grid::packed(BLOCK, BLOCKS), (0..BLOCKS).rev().collect::<Vec<_>>());
    let sides =
        (ours.grid(grid)?.blocks(backwards), peer.region("kv")?.grid(grid)?.blocks(0..BLOCKS));
    let report =
        peer.transfer(&Plan::of(op, [sides])?).deadline(CUT_OFF).post()?.wait_blocking(CUT_OFF)?;
    let (seed, target) = if op == Op::Read { (2, &ours) } else { (1, &theirs) };
    let bytes = all(target)?;
    for (at, block) in bytes.chunks(BLOCK as usize).enumerate() {
        let from = (BLOCKS as usize - 1 - at) as u64 * BLOCK;
        ensure!(
            block == pattern::bytes(seed, from, BLOCK as usize),
            "block {at} is wrong, which {} carried",
            report.backend
        );
    }
    for region in [ours, theirs] {
        region.revoke(CUT_OFF).wait_blocking(CUT_OFF)?;
    }
    Ok(report.backend)
}

fn all(region: &Region) -> Result<Vec<u8>, Failure> {
    let mut bytes = vec![0; LEN];
    region.copy_out(0, &mut bytes)?;
    Ok(bytes)
}
