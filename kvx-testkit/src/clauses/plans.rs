//! T: what plans may name, and how often they can be posted.

use std::sync::Arc;

use kvx_core::{Grid, GridSet, Indices, Op, Place as _, Plan};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::OPS;
use super::transfers::Ends;
use crate::chaos::Fault;
use crate::check::{CUT_OFF, Check, ensure, ensure_kind};
use crate::pattern::{bytes, checksum, fill};
use crate::setup::Setup;

pub(super) const CLAUSES: &[Clause] = clauses!(
    T7 zero_blocks_settle_at_once, Both, [Breaker::Core("zero")];
    T8 a_hundred_thousand_blocks_are_one_transfer, Both, [Breaker::Chaos(Fault::FailLarge)];
    T9 overlapping_destinations_are_refused, OneProcess, [Breaker::Core("overlap")];
    T10 a_plan_can_be_posted_again, Both, [Breaker::Chaos(Fault::PostOnce)];
);

/// T7: a plan of zero blocks succeeds, moves nothing, and its notification is sent.
pub async fn zero_blocks_settle_at_once(setup: &Setup) -> Check {
    let mut ends = Ends::new(setup, 1 << 16, 1 << 16).await?;
    let grid = Grid::packed(4096, 16);
    for (op, text) in OPS.into_iter().zip(["nothing read", "nothing written"]) {
        let plan = ends.plan(op, (grid, &[]), (grid, &[]))?;
        let transfer = ends.peer.transfer(&plan).deadline(CUT_OFF).post()?;
        let settled = transfer.settled();
        let report = transfer.await?;
        let moved = (report.bytes, report.blocks, report.segments);
        ensure!(moved == (0, 0, 0), "zero blocks were reported as {moved:?}");
        settled.await?;
        ends.peer.transfer(&plan).deadline(CUT_OFF).notify(text.as_bytes()).post()?.await?;
        let taken = ends.pair.far.take(CUT_OFF)??;
        ensure!(
            taken.bytes == text.as_bytes(),
            "the notification of zero blocks arrived as {:?}",
            taken.bytes
        );
    }
    let empty = Indices::from(7..7);
    let remote = ends.peer.region("kv")?.grid(grid)?.blocks(empty.clone());
    let plan = Plan::read(ends.near.grid(grid)?.blocks(empty), remote)?;
    ends.peer.transfer(&plan).deadline(CUT_OFF).post()?.await?;
    ends.check()
}

/// T8: the number of blocks in a transfer is not limited.
pub async fn a_hundred_thousand_blocks_are_one_transfer(setup: &Setup) -> Check {
    const COUNT: u32 = 100_000;
    const LENGTH: usize = 1024;
    let mut pair = setup.pair()?;
    let near = pair.near_region("near", COUNT as usize * LENGTH, 1)?;
    pair.far_region("kv", COUNT as usize * LENGTH, 2)?;
    let peer = pair.connect().await?;
    let grid = Grid::packed(LENGTH as u64, COUNT);
    // Both numbers are odd and not multiples of five, so they permute the blocks, and no two
    // neighbours stay adjacent.
    let scattered = |by: u32| -> Vec<u32> {
        (0..COUNT).map(|at| (u64::from(at) * u64::from(by) % 100_000) as u32).collect()
    };
    let (local, remote) = (scattered(7_919), scattered(4_729));
    let ours = near.grid(grid)?.blocks(local.clone());
    let plan = Plan::read(ours, peer.region("kv")?.grid(grid)?.blocks(remote.clone()))?;
    let report = peer.transfer(&plan).deadline(3 * CUT_OFF).post()?.await?;
    let (blocks, segments) = (report.blocks, report.segments);
    ensure!(
        (blocks, segments) == (100_000, 100_000),
        "100,000 scattered blocks count as {blocks} in {segments} segments"
    );
    let mut got = vec![0; COUNT as usize * LENGTH];
    near.copy_out(0, &mut got)?;
    for (our_block, their_block) in local.iter().zip(&remote) {
        let at = grid.offset(*our_block) as usize;
        ensure!(
            got[at..at + LENGTH] == bytes(2, grid.offset(*their_block), LENGTH),
            "block {our_block} is not the block {their_block} of the peer"
        );
    }
    Ok(())
}

/// T9: creating a plan in which two destinations share a byte fails.
pub async fn overlapping_destinations_are_refused(setup: &Setup) -> Check {
    let ends = Ends::new(setup, 1 << 16, 1 << 16).await?;
    let (near, remote) = (&ends.near, ends.peer.region("kv")?);
    let again = ends.pair.near.register("again", Arc::clone(near.memory()))?;
    let grid = Grid::packed(4096, 8);
    let last_byte = Grid::packed(4096, 8).at(7 * 4096 + 4095);
    for op in OPS {
        // One index twice, at the destination; at the source it is allowed.
        let (local, theirs) = match op {
            Op::Read => ([1, 2, 1], [3, 4, 5]),
            Op::Write => ([1, 2, 3], [3, 4, 3]),
        };
        let made =
            Plan::of(op, [(near.grid(grid)?.blocks(local), remote.grid(grid)?.blocks(theirs))]);
        ensure_kind!(made, Overlap);
        Plan::of(op, [(near.grid(grid)?.blocks(theirs), remote.grid(grid)?.blocks(local))])?;
        // Two grids of one region that share one byte, in one set and in two pairs.
        let set = || GridSet::join([near.grid(grid)?, near.grid(last_byte)?]);
        let their_set = || GridSet::join([remote.grid(grid)?, remote.grid(last_byte)?]);
        ensure_kind!(Plan::of(op, [(set()?.blocks([0, 7]), their_set()?.blocks([0, 7]))]), Overlap);
        Plan::of(op, [(set()?.blocks([1, 2]), their_set()?.blocks([1, 2]))])?;
        let first = || {
            Ok::<_, kvx_core::Error>((near.grid(grid)?.blocks([7]), remote.grid(grid)?.blocks([7])))
        };
        let second = || {
            Ok::<_, kvx_core::Error>((
                near.grid(last_byte)?.blocks([0]),
                remote.grid(last_byte)?.blocks([0]),
            ))
        };
        ensure_kind!(Plan::of(op, [first()?, second()?]), Overlap);
    }
    // Two names for the same memory.
    let both = [
        (near.grid(grid)?.blocks([0]), remote.grid(grid)?.blocks([0])),
        (again.grid(grid)?.blocks([0]), remote.grid(grid)?.blocks([1])),
    ];
    ensure_kind!(Plan::of(Op::Read, both), Overlap);
    Ok(())
}

/// T10: a plan can be posted again, even while it is in flight, and moves what the source then
/// contains.
pub async fn a_plan_can_be_posted_again(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let len = 1 << 20;
    let near = pair.near_region("near", len, 1)?;
    let far = pair.far_region("kv", len, 2)?;
    let peer = pair.connect().await?;
    let grid = Grid::packed(4096, 256);
    let all = || (near.grid(grid), peer.region("kv").and_then(|region| region.grid(grid)));
    let (ours, theirs) = all();
    let read = Plan::read(ours?.blocks(0..256), theirs?.blocks(0..256))?;
    for seed in 10..14 {
        pair.far.fill(far, seed)?;
        let transfers = (0..4).map(|_| peer.transfer(&read).deadline(CUT_OFF).post());
        for transfer in transfers.collect::<kvx_core::Result<Vec<_>>>()? {
            transfer.await?;
        }
        let mut content = vec![0; near.len() as usize];
        near.copy_out(0, &mut content)?;
        ensure!(
            content == bytes(seed, 0, len),
            "posted again, a read did not return the current content"
        );
    }
    let (ours, theirs) = all();
    let write = Plan::write(ours?.blocks(0..256), theirs?.blocks(0..256))?;
    for seed in 20..23 {
        fill(near.memory(), seed)?;
        peer.transfer(&write).deadline(CUT_OFF).post()?.await?;
        let brought = pair.far.sum(far)? == checksum(&bytes(seed, 0, len));
        ensure!(brought, "posted again, a write did not move the current content");
    }
    Ok(())
}
