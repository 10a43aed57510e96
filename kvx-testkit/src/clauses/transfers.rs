//! T: transfers.

use kvx_core::{Grid, Place as _, Plan};

use super::{Breaker, Clause, Runs, clauses};
use crate::chaos::Fault;
use crate::check::{Check, ensure};
use crate::pattern::{bytes, checksum};
use crate::setup::{CUT_OFF, Setup};
use crate::clauses::transfers;

pub(super) const CLAUSES: &[Clause] = clauses!(transfers:
    T1 reads_move_exactly_the_named_blocks, Both, [Breaker::Chaos(Fault::WrongBytes)];
);

/// A region as it should be: content that is changed block by block beside the real one.
pub(crate) struct Model(pub(crate) Vec<u8>);

impl Model {
    pub(crate) fn new(len: usize, seed: u64) -> Self {
        Model(bytes(seed, 0, len))
    }

    /// What a transfer of these blocks does to the destination.
    pub(crate) fn apply(&mut self, to: Grid, to_indices: &[u32], source: &Model, from: Grid, from_indices: &[u32]) {
        for (to_index, from_index) in to_indices.iter().zip(from_indices) {
            let (to_at, from_at) = (to.offset(*to_index) as usize, from.offset(*from_index) as usize);
            let len = to.length as usize;
            self.0[to_at..to_at + len].copy_from_slice(&source.0[from_at..from_at + len]);
        }
    }

    /// Compares with a region of this process.
    pub(crate) fn check(&self, what: &str, region: &kvx_core::Region) -> Check {
        let mut content = vec![0; region.len() as usize];
        region.copy_out(0, &mut content)?;
        match content.iter().zip(&self.0).position(|(is, wanted)| is != wanted) {
            None => Ok(()),
            Some(at) => Err(crate::Failure::new(format!("{what} differs from what it should be at byte {at}"))),
        }
    }

    pub(crate) fn sum(&self) -> u64 {
        checksum(&self.0)
    }
}

/// T1: a read copies each named block and nothing else, on either side.
pub async fn reads_move_exactly_the_named_blocks(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let len = 1 << 20;
    let (mut mine, theirs) = (Model::new(len, 1), Model::new(len, 2));
    let near = pair.near_region("near", len, 1)?;
    let far = pair.far_region("kv", len, 2)?;
    let peer = pair.connect().await?;
    let grid = Grid::packed(4096, 256);
    let (local, remote) = ([3, 250, 7, 8, 9, 0], [100, 1, 255, 20, 21, 22]);
    let plan = Plan::read(near.grid(grid)?.blocks(local), peer.region("kv")?.grid(grid)?.blocks(remote))?;
    let report = peer.transfer(&plan).deadline(CUT_OFF).post()?.await?;
    ensure!(report.bytes == 6 * 4096, "6 blocks of 4 KiB were reported as {} bytes", report.bytes);
    mine.apply(grid, &local, &theirs, grid, &remote);
    mine.check("the local region", &near)?;
    ensure!(pair.far.sum(far)? == theirs.sum(), "a read changed the remote region");
    Ok(())
}
