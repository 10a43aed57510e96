//! Tests that a stopped process stays accessible over shared memory for more transfers than any of
//! its queues can hold.

use crate::processes::{self, PATIENCE};
use kvx_core::{Grid, Memory, Op, Plan};
use kvx_testkit::{Check, Setup, byte_at, test};

const BLOCK: u64 = 64;
const BLOCKS: u32 = 3000;
const BYTES: usize = BLOCK as usize * BLOCKS as usize;

#[test]
fn a_stopped_process_is_read_and_written() -> Check {
    processes::check(
        "a_stopped_process_is_read_and_written",
        "shm",
        read_and_write_while_it_is_stopped,
    )
}

async fn read_and_write_while_it_is_stopped(setup: Setup) -> Check {
    let mut pair = setup.pair()?;
    let near = pair.near.register("near", Memory::owned(vec![0; BYTES]))?;
    let far = pair.far_region("far", BYTES, 7)?;
    let peer = pair.connect().await?;
    let grid = Grid::packed(BLOCK, BLOCKS);
    let plan = |op| {
        let all = (0..BLOCKS).rev();
        let remote = peer.region("far")?.grid(grid)?.blocks(all.clone().collect::<Vec<_>>());
        Plan::of(op, [(near.grid(grid)?.blocks(all.collect::<Vec<_>>()), remote)])
    };
    let (read, write) = (plan(Op::Read)?, plan(Op::Write)?);
    // Fetch the keys while the process runs.
    peer.transfer(&read).deadline(PATIENCE).post()?.await?;
    near.copy_in(0, &vec![0; BYTES])?;

    pair.far.process()?.stop()?;
    peer.transfer(&read).deadline(PATIENCE).post()?.await?;
    let mut came = vec![0; BYTES];
    near.copy_out(0, &mut came)?;
    assert!(
        came.iter().enumerate().all(|(at, byte)| *byte == byte_at(7, at as u64)),
        "what was read"
    );
    came.reverse();
    near.copy_in(0, &came)?;
    peer.transfer(&write).deadline(PATIENCE).post()?.await?;
    pair.far.process()?.go_on()?;
    assert!(pair.far.copy_out(far, 0, BYTES)? == came, "what was written");

    // After it continues, it empties its queue: messages pass.
    peer.notify(b"here", PATIENCE).await?;
    Ok(())
}
