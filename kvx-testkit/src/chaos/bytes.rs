//! Faults in the destination of a read. They hold the destination's memory, so that it exists
//! whenever they write.

use std::sync::Arc;

use kvx_core::backend::{BoundPlan, INLINE_BYTES};
use kvx_core::{Memory, Op, Result};

use super::fault::Fault;

/// Bytes of a memory, at an offset.
struct SegmentPart {
    memory: Arc<Memory>,
    offset: usize,
    bytes: Vec<u8>,
}

/// The damage that a fault does to the destination once the data has arrived.
pub(super) struct Damage {
    restore: Vec<SegmentPart>,
    then: Option<fn(&Arc<BoundPlan>) -> Result<()>>,
}

impl Damage {
    /// Records, before the post, what `fault` needs to know about the destination of `plan`.
    pub(super) fn before(fault: Option<Fault>, plan: &Arc<BoundPlan>) -> Option<Self> {
        if plan.op() != Op::Read {
            return None;
        }
        let (restore, then): (_, Option<fn(&Arc<BoundPlan>) -> Result<()>>) = match fault? {
            Fault::WrongBytes => (Vec::new(), Some(flip)),
            Fault::SwapBlocks => (Vec::new(), Some(swap)),
            Fault::Smear => (Vec::new(), Some(smear)),
            Fault::SkipGrid => (last_grid(plan).ok()?, None),
            Fault::CutSegments => (merged_tails(plan).ok()?, None),
            _ => return None,
        };
        Some(Damage { restore, then })
    }

    /// Applies the damage.
    pub(super) fn done(self, plan: &Arc<BoundPlan>) -> Result<()> {
        for piece in &self.restore {
            piece.memory.copy_in(piece.offset, &piece.bytes)?;
        }
        self.then.map_or(Ok(()), |then| then(plan))
    }
}

/// A write that repeats the current content of the destination's first block.
pub(super) struct Rewrite(SegmentPart);

impl Rewrite {
    pub(super) fn of(plan: &Arc<BoundPlan>) -> Option<Self> {
        let segment = plan.segments(INLINE_BYTES).next().filter(|_| plan.op() == Op::Read)?;
        let memory = &plan.local(segment.local_region).memory;
        copy(memory, segment.local_offset, segment.len).ok().map(Rewrite)
    }

    pub(super) fn write(self) -> Result<()> {
        self.0.memory.copy_in(self.0.offset, &self.0.bytes)
    }
}

fn copy(memory: &Arc<Memory>, offset: u64, len: u64) -> Result<SegmentPart> {
    let mut bytes = vec![0; len as usize];
    memory.copy_out(offset as usize, &mut bytes)?;
    Ok(SegmentPart { memory: Arc::clone(memory), offset: offset as usize, bytes })
}

/// Changes the first byte.
fn flip(plan: &Arc<BoundPlan>) -> Result<()> {
    let Some(segment) = plan.segments(u64::MAX).next() else { return Ok(()) };
    let mut piece = copy(&plan.local(segment.local_region).memory, segment.local_offset, 1)?;
    piece.bytes[0] ^= 1;
    piece.memory.copy_in(piece.offset, &piece.bytes)
}

/// Exchanges the first two blocks of the first pair that has two.
fn swap(plan: &Arc<BoundPlan>) -> Result<()> {
    let Some(pair) = plan.pairs().iter().find(|pair| pair.local_indices.len() > 1) else {
        return Ok(());
    };
    let placed = pair.local[0];
    let memory = &plan.local(placed.region).memory;
    let at = |position| placed.grid.offset(pair.local_indices.at(position));
    let (first, second) =
        (copy(memory, at(0), placed.grid.length)?, copy(memory, at(1), placed.grid.length)?);
    memory.copy_in(first.offset, &second.bytes)?;
    memory.copy_in(second.offset, &first.bytes)
}

/// Changes the byte after each block, in grids with space between their blocks.
fn smear(plan: &Arc<BoundPlan>) -> Result<()> {
    for pair in plan.pairs() {
        for placed in pair.local.iter().filter(|placed| placed.grid.stride > placed.grid.length) {
            let memory = &plan.local(placed.region).memory;
            let ends = (0..pair.local_indices.len()).map(|position| {
                placed.grid.offset(pair.local_indices.at(position)) + placed.grid.length
            });
            for end in ends.filter(|end| (*end as usize) < memory.len()) {
                let mut piece = copy(memory, end, 1)?;
                piece.bytes[0] ^= 1;
                memory.copy_in(piece.offset, &piece.bytes)?;
            }
        }
    }
    Ok(())
}

/// Returns the destination of the last grid of each pair that has several.
fn last_grid(plan: &Arc<BoundPlan>) -> Result<Vec<SegmentPart>> {
    let mut pieces = Vec::new();
    for pair in plan.pairs().iter().filter(|pair| pair.local.len() > 1) {
        let placed = pair.local[pair.local.len() - 1];
        let memory = &plan.local(placed.region).memory;
        for position in 0..pair.local_indices.len() {
            pieces.push(copy(
                memory,
                placed.grid.offset(pair.local_indices.at(position)),
                placed.grid.length,
            )?);
        }
    }
    Ok(pieces)
}

/// Returns the bytes after the first block of each merged segment.
fn merged_tails(plan: &Arc<BoundPlan>) -> Result<Vec<SegmentPart>> {
    let Some(block) = plan.pairs().first().map(|pair| pair.local[0].grid.length) else {
        return Ok(Vec::new());
    };
    plan.segments(u64::MAX)
        .filter(|segment| segment.len > block)
        .map(|segment| {
            let memory = &plan.local(segment.local_region).memory;
            copy(memory, segment.local_offset + block, segment.len - block)
        })
        .collect()
}
