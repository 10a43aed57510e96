//! Reordering of the bytes of a block: between layouts, and from small blocks into a large one.

use std::ops::Range;

use kvx_core::{ErrorKind, Result};

use super::geometry::RegionGroup;
use super::layout::LayoutMatch;

/// The most dimensions of a permutation.
const MAX_DIMENSIONS: usize = 8;

/// Permutes the dimensions of an array with elements of `element` bytes. Dimension `i` of the
/// output is dimension `order[i]` of the input; `shape` is the input's shape, outermost first.
///
/// # Errors
/// `Invalid` if `order` is not a permutation of the dimensions, there are more than 8, or the
/// length of a slice differs from the shape.
///
/// ```
/// use kvx_vllm::mapping::permute_axes;
/// // Two heads of three tokens of one two-byte element.
/// let heads_first = [1, 1, 2, 2, 3, 3, 11, 11, 12, 12, 13, 13];
/// let mut tokens_first = [0; 12];
/// permute_axes(&heads_first, &[2, 3], &[1, 0], 2, &mut tokens_first)?;
/// assert_eq!(tokens_first, [1, 1, 11, 11, 2, 2, 12, 12, 3, 3, 13, 13]);
/// # Ok::<(), kvx_core::Error>(())
/// ```
pub fn permute_axes(
    input: &[u8],
    shape: &[usize],
    order: &[usize],
    element: usize,
    output: &mut [u8],
) -> Result<()> {
    let bytes = shape.iter().try_fold(element, |bytes, len| bytes.checked_mul(*len));
    let mut seen = [false; MAX_DIMENSIONS];
    let permutes = shape.len() <= MAX_DIMENSIONS
        && order.len() == shape.len()
        && order.iter().all(|at| *at < shape.len() && !std::mem::replace(&mut seen[*at], true));
    if !permutes || bytes != Some(input.len()) || input.len() != output.len() {
        return Err(ErrorKind::Invalid.because(format!(
            "cannot permute {} bytes of shape {shape:?} and element size {element} in the order \
             {order:?} into {} bytes",
            input.len(),
            output.len()
        )));
    }
    if input.is_empty() {
        return Ok(());
    }
    // Innermost dimensions that keep their position are moved as one run of bytes.
    let mut outer = order.len();
    let mut run = element;
    while outer > 0 && order[outer - 1] == outer - 1 {
        outer -= 1;
        run *= shape[outer];
    }
    let mut strides = [0; MAX_DIMENSIONS];
    let mut stride = run;
    for at in (0..outer).rev() {
        strides[at] = stride;
        stride *= shape[at];
    }
    let mut position = [0; MAX_DIMENSIONS];
    let mut from = 0;
    for to in output.chunks_exact_mut(run) {
        to.copy_from_slice(&input[from..from + run]);
        for at in (0..outer).rev() {
            let dimension = order[at];
            position[at] += 1;
            from += strides[dimension];
            if position[at] < shape[dimension] {
                break;
            }
            from -= strides[dimension] * shape[dimension];
            position[at] = 0;
        }
    }
    Ok(())
}

/// The dimensions of a block of one layer on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    /// The number of heads on this rank.
    pub heads: usize,
    /// The number of tokens.
    pub tokens: usize,
    /// The bytes of one head's content for one token.
    pub content: usize,
}

impl BlockShape {
    /// Returns the shape of a block of `len` bytes. Errors: `Invalid` if heads and tokens do not
    /// divide it.
    pub fn of_block(len: usize, heads: usize, tokens: usize) -> Result<Self> {
        match heads.checked_mul(tokens) {
            Some(rows) if rows > 0 && len.is_multiple_of(rows) => {
                Ok(BlockShape { heads, tokens, content: len / rows })
            }
            _ => Err(ErrorKind::Invalid.because(format!(
                "a block of {len} bytes is not {heads} heads of {tokens} tokens"
            ))),
        }
    }
}

fn sub_block_tokens(shape: BlockShape, ratio: usize) -> Result<usize> {
    if ratio > 0 && shape.tokens.is_multiple_of(ratio) {
        return Ok(shape.tokens / ratio);
    }
    Err(ErrorKind::Invalid
        .because(format!("{} tokens cannot be divided into {ratio} blocks", shape.tokens)))
}

/// The work of a consumer on filled blocks: it reorders them, and clears parts that were not
/// filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finishing {
    pub(super) ratio: u32,
    pub(super) layout: LayoutMatch,
    pub(super) heads_before_tokens: bool,
    pub(super) parts: usize,
    /// The shape of each region.
    pub(super) shapes: Vec<BlockShape>,
    pub(super) groups: Vec<RegionGroup>,
}

impl Finishing {
    /// Returns whether whole blocks need reordering. If not, only partly filled blocks need
    /// [`finish`](Self::finish).
    pub fn reorders(&self) -> bool {
        self.layout == LayoutMatch::Permute || (self.ratio > 1 && self.heads_before_tokens)
    }

    /// Returns whether finishing can change a block. If not, finishing is unnecessary.
    pub fn changes_blocks(&self) -> bool {
        self.reorders() || self.ratio > 1
    }

    /// Returns the regions that hold the blocks of a group's [`Covered`](super::Covered).
    pub fn regions_of(&self, group: usize) -> impl Iterator<Item = u32> + '_ {
        let one = self.groups.iter().all(|other| *other == self.groups[0]);
        let covers = move |(_, of): &(usize, &RegionGroup)| one || of.covers(group as u32);
        self.groups.iter().enumerate().filter(covers).map(|(region, _)| region as u32)
    }

    /// Finishes one kernel block of a region in place. `filled` is the range of sub-blocks that
    /// were received; the others become zero. `scratch` is used and grown as needed.
    ///
    /// # Errors
    /// `Invalid` for an unknown region, a length that differs from its block's, or a range beyond
    /// the block. The block is unchanged then.
    pub fn finish(
        &self,
        region: u32,
        block: &mut [u8],
        filled: Range<u32>,
        scratch: &mut Vec<u8>,
    ) -> Result<()> {
        let shape = self.shapes.get(region as usize).copied();
        let part_len = shape.map(|shape| shape.heads * shape.tokens * shape.content);
        let (Some(shape), Some(part_len)) = (shape, part_len) else {
            return Err(ErrorKind::Invalid.because(format!(
                "region {region} does not exist: there are {}",
                self.shapes.len()
            )));
        };
        if block.len() != part_len * self.parts
            || filled.end > self.ratio
            || filled.start > filled.end
        {
            return Err(ErrorKind::Invalid.because(format!(
                "a block of {} bytes with sub-blocks {filled:?} filled, but blocks have {} bytes \
                 in {} sub-blocks",
                block.len(),
                part_len * self.parts,
                self.ratio
            )));
        }
        let ratio = self.ratio as usize;
        let tokens = sub_block_tokens(shape, ratio)?;
        let sub_len = part_len / ratio;
        let heads = shape.heads > 1;
        for part in block.chunks_exact_mut(part_len) {
            part[..filled.start as usize * sub_len].fill(0);
            part[filled.end as usize * sub_len..].fill(0);
            if filled.is_empty() || !heads || !self.reorders() {
                continue;
            }
            let order: &[usize] = match self.layout {
                LayoutMatch::Permute => &[0, 2, 1],
                LayoutMatch::Same => &[1, 0, 2],
            };
            scratch.clear();
            scratch.extend_from_slice(part);
            permute_axes(scratch, &[ratio, shape.heads, tokens], order, shape.content, part)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_divide_evenly_among_sub_blocks_or_not_at_all() {
        let shape = BlockShape { heads: 2, tokens: 4, content: 8 };
        assert_eq!(sub_block_tokens(shape, 2).unwrap(), 2);
        for ratio in [0, 3] {
            assert_eq!(sub_block_tokens(shape, ratio).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}
