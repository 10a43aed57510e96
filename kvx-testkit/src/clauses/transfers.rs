//! T: what transfers move.

use std::sync::Arc;

use kvx_core::{Grid, GridSet, Indices, Op, Peer, Place as _, Plan, Region, Report, Span};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::OPS;
use crate::chaos::Fault;
use crate::check::{CUT_OFF, Check, Failure, ensure};
use crate::pattern::{bytes, checksum};
use crate::setup::{AgentPair, Setup};

pub(super) const CLAUSES: &[Clause] = clauses!(
    T1 reads_move_exactly_the_named_blocks, Both, [Breaker::Chaos(Fault::WrongBytes)];
    T2 writes_move_exactly_the_named_blocks, Both, [Breaker::Chaos(Fault::Drop)];
    T3 scattered_blocks_land_where_they_are_paired, Both, [Breaker::Chaos(Fault::SwapBlocks)];
    T4 adjacent_blocks_are_merged, Both, [Breaker::Core("report"), Breaker::Chaos(Fault::CutSegments)];
    T5 several_grids_share_one_index_list, Both, [Breaker::Chaos(Fault::SkipGrid)];
    T6 strided_slices_leave_their_neighbours_alone, Both, [Breaker::Chaos(Fault::Smear)];
);

/// The expected content of a region, updated block by block in parallel to the real one.
pub(crate) struct Model(Vec<u8>);

impl Model {
    pub(crate) fn new(len: usize, seed: u64) -> Self {
        Model(bytes(seed, 0, len))
    }

    /// Applies a transfer of these blocks to the destination.
    pub(crate) fn apply(
        &mut self,
        to: Grid,
        to_indices: &[u32],
        source: &Model,
        from: Grid,
        from_indices: &[u32],
    ) {
        for (to_index, from_index) in to_indices.iter().zip(from_indices) {
            let (to_at, from_at) =
                (to.offset(*to_index) as usize, from.offset(*from_index) as usize);
            let len = to.length as usize;
            self.0[to_at..to_at + len].copy_from_slice(&source.0[from_at..from_at + len]);
        }
    }

    /// Compares it with a region of this process.
    pub(crate) fn check(&self, what: &str, region: &Region) -> Check {
        let mut content = vec![0; region.len() as usize];
        region.copy_out(0, &mut content)?;
        match content.iter().zip(&self.0).position(|(is, wanted)| is != wanted) {
            None => Ok(()),
            Some(at) => {
                Err(Failure::new(format!("{what} differs from what it should be at byte {at}")))
            }
        }
    }

    pub(crate) fn sum(&self) -> u64 {
        checksum(&self.0)
    }
}

/// A region at each end, with the expected content of both.
pub(crate) struct Ends {
    pub(crate) pair: AgentPair,
    pub(crate) peer: Peer,
    pub(crate) near: Region,
    mine: Model,
    far: usize,
    theirs: Model,
}

impl Ends {
    /// Creates a connected pair with a region at each end.
    pub(crate) async fn new(
        setup: &Setup,
        near_len: usize,
        far_len: usize,
    ) -> Result<Self, Failure> {
        let mut pair = setup.pair()?;
        let near = pair.near_region("near", near_len, 1)?;
        let far = pair.far_region("kv", far_len, 2)?;
        let peer = pair.connect().await?;
        let (mine, theirs) = (Model::new(near_len, 1), Model::new(far_len, 2));
        Ok(Ends { pair, peer, near, mine, far, theirs })
    }

    /// Returns the plan for these blocks.
    pub(crate) fn plan(
        &self,
        op: Op,
        local: (Grid, &[u32]),
        remote: (Grid, &[u32]),
    ) -> Result<Plan, Failure> {
        let ours = self.near.grid(local.0)?.blocks(Arc::<[u32]>::from(local.1));
        let theirs = self.peer.region("kv")?.grid(remote.0)?.blocks(Arc::<[u32]>::from(remote.1));
        Ok(Plan::of(op, [(ours, theirs)])?)
    }

    /// Applies a transfer of these blocks to the expected content.
    fn note(&mut self, op: Op, local: (Grid, &[u32]), remote: (Grid, &[u32])) {
        let Ends { mine, theirs, .. } = self;
        match op {
            Op::Read => mine.apply(local.0, local.1, theirs, remote.0, remote.1),
            Op::Write => theirs.apply(remote.0, remote.1, mine, local.0, local.1),
        }
    }

    /// Compares every byte of both regions.
    pub(crate) fn check(&mut self) -> Check {
        self.mine.check("the local region", &self.near)?;
        ensure!(
            self.pair.far.sum(self.far)? == self.theirs.sum(),
            "the remote region differs from what it should be"
        );
        Ok(())
    }

    /// Moves these blocks and compares every byte of both regions.
    pub(crate) async fn moves(
        &mut self,
        op: Op,
        local: (Grid, &[u32]),
        remote: (Grid, &[u32]),
    ) -> Result<Report, Failure> {
        let plan = self.plan(op, local, remote)?;
        let report = self.peer.transfer(&plan).deadline(CUT_OFF).post()?.await?;
        self.note(op, local, remote);
        self.check()?;
        Ok(report)
    }
}

/// T1: a read copies each named block and nothing else, on either side.
pub async fn reads_move_exactly_the_named_blocks(setup: &Setup) -> Check {
    moves_exactly(setup, Op::Read).await
}

/// T2: a write copies each named block and nothing else, on either side.
pub async fn writes_move_exactly_the_named_blocks(setup: &Setup) -> Check {
    moves_exactly(setup, Op::Write).await
}

async fn moves_exactly(setup: &Setup, op: Op) -> Check {
    let mut ends = Ends::new(setup, 1 << 20, 1 << 20).await?;
    let grid = Grid::packed(4096, 256);
    let report =
        ends.moves(op, (grid, &[3, 250, 7, 8, 9, 0]), (grid, &[100, 1, 255, 20, 21, 22])).await?;
    ensure!(report.bytes == 6 * 4096, "6 blocks of 4 KiB were reported as {} bytes", report.bytes);
    // Odd lengths, odd offsets, first and last byte of both regions.
    let (local, remote) =
        (Grid { base: 1, stride: 13, length: 13, count: 80_000 }, Grid::packed(13, 80_659));
    ends.moves(op, (local, &[0, 79_999, 5]), (remote, &[80_658, 0, 77])).await?;
    let whole = Grid::packed(1 << 20, 1);
    ends.moves(op, (whole, &[0]), (whole, &[0])).await?;
    Ok(())
}

/// T3: entry `i` of one index list pairs with entry `i` of the other; a source may be named twice.
pub async fn scattered_blocks_land_where_they_are_paired(setup: &Setup) -> Check {
    let mut ends = Ends::new(setup, 2 << 20, 2 << 20).await?;
    let grid = Grid::packed(4096, 512);
    for op in OPS {
        // Multiplying by an odd number permutes the blocks.
        let scattered: Vec<u32> = (0..300).map(|at| at * 77 % 512).collect();
        let repeated: Vec<u32> = (0..300).map(|at| (at * 5 + 3) % 41).collect();
        let (local, remote) = match op {
            Op::Read => (&scattered, &repeated),
            Op::Write => (&repeated, &scattered),
        };
        ends.moves(op, (grid, local), (grid, remote)).await?;
        let down: Vec<u32> = (0..512).rev().collect();
        let turned: Vec<u32> = (0..512).map(|at| at * 255 % 512).collect();
        ends.moves(op, (grid, &down), (grid, &turned)).await?;
    }
    Ok(())
}

/// T4: blocks that are adjacent on both sides are one segment, of any length; the bytes are the
/// same.
pub async fn adjacent_blocks_are_merged(setup: &Setup) -> Check {
    let mut ends = Ends::new(setup, 8 << 20, 8 << 20).await?;
    let grid = Grid::packed(4096, 2048);
    for op in OPS {
        // Three adjacent blocks; two adjacent here only; two adjacent there only; a single one.
        let (local, remote) = ([10, 11, 12, 40, 41, 50, 60, 7], [20, 21, 22, 70, 90, 91, 92, 8]);
        let report = ends.moves(op, (grid, &local), (grid, &remote)).await?;
        ensure!(report.segments == 6, "{op}: 6 segments are {}", report.segments);
        // One segment of 6 MiB.
        let (local, remote): (Vec<u32>, Vec<u32>) = ((0..1536).collect(), (512..2048).collect());
        let report = ends.moves(op, (grid, &local), (grid, &remote)).await?;
        ensure!(
            report.segments == 1,
            "{op}: 1536 adjacent blocks are {} segments",
            report.segments
        );
        ensure!(report.blocks == 1536, "{op}: 1536 merged blocks count as {}", report.blocks);
    }
    // A range is a list of adjacent blocks.
    let peer = ends.peer.region("kv")?;
    let plan = Plan::read(
        ends.near.grid(grid)?.blocks(5..100),
        peer.grid(grid)?.blocks(Indices::from(6..101)),
    )?;
    ensure!(
        plan.size().segments == 1,
        "a range of neighbours is {} segments",
        plan.size().segments
    );
    Ok(())
}

/// T5: a grid set moves the named blocks of each grid; several pairs are one transfer.
pub async fn several_grids_share_one_index_list(setup: &Setup) -> Check {
    const LEN: usize = 1 << 20;
    let mut pair = setup.pair()?;
    let (near, other) = (pair.near_region("near", LEN, 1)?, pair.near_region("other", LEN, 3)?);
    let (far, further) = (pair.far_region("kv", LEN, 2)?, pair.far_region("more", LEN, 4)?);
    let peer = pair.connect().await?;
    let (kv, more) = (peer.region("kv")?, peer.region("more")?);
    let mut models =
        [Model::new(LEN, 1), Model::new(LEN, 3), Model::new(LEN, 2), Model::new(LEN, 4)];
    // Four layers, two in each region; they are in another order at the far end.
    let layer = Grid::packed(2048, 100);
    let ours = [layer, layer.at(300_000), layer.at(1000), layer.at(500_000)];
    let theirs = [layer.at(700_000), layer.at(8192), layer.at(400_000), layer.at(1)];
    let tail = Grid { base: 900_000, stride: 700, length: 500, count: 50 };
    for op in OPS {
        let local =
            GridSet::of([&near, &near, &other, &other].map(Region::clone).into_iter().zip(ours))?;
        let remote = GridSet::join([
            kv.grid(theirs[0])?,
            kv.grid(theirs[1])?,
            more.grid(theirs[2])?,
            more.grid(theirs[3])?,
        ])?;
        let (our_blocks, their_blocks) = ([4, 5, 6, 90, 1, 33], [7, 8, 2, 99, 50, 51]);
        let (more_of_ours, more_of_theirs) = ([0, 49, 7], [10, 11, 12]);
        let plan = Plan::of(
            op,
            [
                (local.blocks(our_blocks), remote.blocks(their_blocks)),
                (near.grid(tail)?.blocks(more_of_ours), more.grid(tail)?.blocks(more_of_theirs)),
            ],
        )?;
        let report = peer.transfer(&plan).deadline(CUT_OFF).post()?.await?;
        let (blocks, bytes) = (4 * 6 + 3, 4 * 6 * 2048 + 3 * 500);
        ensure!(
            (report.blocks, report.bytes) == (blocks, bytes),
            "{op}: {blocks} blocks of {bytes} bytes were reported as {} of {}",
            report.blocks,
            report.bytes
        );
        let [mine, mine_too, theirs_first, theirs_second] = &mut models;
        let moved = |ours: &mut Model,
                     grid: Grid,
                     indices: &[u32],
                     theirs: &mut Model,
                     at: Grid,
                     their_blocks: &[u32]| {
            match op {
                Op::Read => ours.apply(grid, indices, theirs, at, their_blocks),
                Op::Write => theirs.apply(at, their_blocks, ours, grid, indices),
            }
        };
        moved(mine, ours[0], &our_blocks, theirs_first, theirs[0], &their_blocks);
        moved(mine, ours[1], &our_blocks, theirs_first, theirs[1], &their_blocks);
        moved(mine_too, ours[2], &our_blocks, theirs_second, theirs[2], &their_blocks);
        moved(mine_too, ours[3], &our_blocks, theirs_second, theirs[3], &their_blocks);
        moved(mine, tail, &more_of_ours, theirs_second, tail, &more_of_theirs);
        models[0].check("the first local region", &near)?;
        models[1].check("the second local region", &other)?;
        ensure!(pair.far.sum(far)? == models[2].sum(), "{op}: the first remote region differs");
        ensure!(
            pair.far.sum(further)? == models[3].sum(),
            "{op}: the second remote region differs"
        );
        // Adjacent spans of unequal lengths, and spans that are not blocks of a common grid.
        let pieces = [
            (7, 31, 100),
            (107, 131, 50),
            (5000, 2000, 4096),
            (20_000, 9000, 1),
            (90_000, 70_001, 33_333),
        ];
        let spans: Vec<Span> =
            pieces.iter().map(|&(local, remote, len)| Span { local, remote, len }).collect();
        let plan = Plan::of_spans(op, [(near.clone(), kv.clone(), spans)])?;
        peer.transfer(&plan).deadline(CUT_OFF).post()?.await?;
        let [mine, _, theirs_first, _] = &mut models;
        for (local, remote, length) in pieces {
            let grid = |base| Grid { base, stride: length, length, count: 1 };
            match op {
                Op::Read => mine.apply(grid(local), &[0], theirs_first, grid(remote), &[0]),
                Op::Write => theirs_first.apply(grid(remote), &[0], mine, grid(local), &[0]),
            }
        }
        models[0].check("the local region of spans", &near)?;
        ensure!(pair.far.sum(far)? == models[2].sum(), "{op}: the remote region of spans differs");
    }
    Ok(())
}

/// T6: the bytes between the slices of a grid stay unchanged, on both sides.
pub async fn strided_slices_leave_their_neighbours_alone(setup: &Setup) -> Check {
    let mut ends = Ends::new(setup, 1 << 20, 2 << 20).await?;
    let local = Grid { base: 512, stride: 4096, length: 1024, count: 255 };
    let remote = Grid { base: 100, stride: 8192, length: 1024, count: 255 };
    let (our_blocks, their_blocks): (Vec<u32>, Vec<u32>) = ((0..255).collect(), (0..255).collect());
    for op in OPS {
        ends.moves(op, (local, &our_blocks), (remote, &their_blocks)).await?;
        ends.moves(op, (local, &[9, 3, 4]), (remote, &[200, 201, 7])).await?;
        // A strided side and a packed one.
        let packed = Grid::packed(1024, 2048).at(4096 - 1024);
        let packed = Grid { count: 1000, ..packed };
        ends.moves(op, (local, &our_blocks[..200]), (packed, &their_blocks[..200])).await?;
    }
    Ok(())
}
