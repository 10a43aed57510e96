//! Copies between the dense tensor of one sequence and the blocks of a pool.

use std::ops::Range;

use kvx_core::{ErrorKind, Result};

use super::permute::BlockShape;

/// K or V of one layer and one sequence on one rank, in an engine without blocks. It has one row of
/// bytes (a head's dimensions of one token) for each head and token, at fixed strides.
///
/// ```
/// # mod kvx { pub mod connector { pub use kvx_vllm::mapping::DenseShape; } }
/// use kvx::connector::DenseShape;
/// // [head][token][dim], 8 heads of 128 two-byte elements, with a capacity of 4096 tokens.
/// let shape = DenseShape::heads_outermost(8, 4096, 256);
/// assert_eq!((shape.head_stride, shape.token_stride), (4096 * 256, 256));
/// // [token][head][dim], as llama.cpp keeps it.
/// assert_eq!(DenseShape::tokens_outermost(8, 4096, 256).token_stride, 8 * 256);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseShape {
    /// The number of heads on this rank.
    pub heads: usize,
    /// The capacity in tokens.
    pub tokens: usize,
    /// The bytes of a row.
    pub row: usize,
    /// The bytes from a row to that of the next head.
    pub head_stride: usize,
    /// The bytes from a row to that of the next token.
    pub token_stride: usize,
}

impl DenseShape {
    /// Creates the shape `[head][token][dim]` without gaps.
    pub const fn heads_outermost(heads: usize, tokens: usize, row: usize) -> Self {
        DenseShape {
            heads,
            tokens,
            row,
            head_stride: tokens.saturating_mul(row),
            token_stride: row,
        }
    }

    /// Creates the shape `[token][head][dim]` without gaps.
    pub const fn tokens_outermost(heads: usize, tokens: usize, row: usize) -> Self {
        DenseShape { heads, tokens, row, head_stride: row, token_stride: heads.saturating_mul(row) }
    }

    /// Returns the bytes from the first row to the end of the last, or `None` on overflow.
    pub fn extent(&self) -> Option<usize> {
        let last = |count: usize, stride: usize| count.checked_sub(1)?.checked_mul(stride);
        if self.heads == 0 || self.tokens == 0 {
            return Some(0);
        }
        last(self.heads, self.head_stride)?
            .checked_add(last(self.tokens, self.token_stride)?)?
            .checked_add(self.row)
    }
}

/// The rows of one tensor in a block. If K and V are packed into the content of a head and token, K
/// is the first half of it and V the second.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRows {
    /// The shape of the block.
    pub shape: BlockShape,
    /// True if heads come before tokens (LBHNC), false if tokens come before heads (LBNHC).
    pub heads_before_tokens: bool,
    /// The part of the content of a head and token that is this tensor's row.
    pub part: Range<usize>,
}

/// Copies the rows of some tokens of a dense tensor to the front of a block. The rest of the block
/// is unchanged.
///
/// # Errors
/// `Invalid` for tokens beyond the tensor, more tokens than the block has, heads or rows that
/// differ from the block's, and slices of other lengths. The block is unchanged then.
pub fn rows_into_block(
    tensor: &[u8],
    dense: &DenseShape,
    tokens: Range<usize>,
    block: &mut [u8],
    rows: &BlockRows,
) -> Result<()> {
    for (from, to, len) in runs(tensor.len(), dense, tokens, block.len(), rows)? {
        block[to..to + len].copy_from_slice(&tensor[from..from + len]);
    }
    Ok(())
}

/// Copies the front of a block to the rows of some tokens of a dense tensor. Other rows are
/// unchanged. Errors: as [`rows_into_block`].
pub fn rows_from_block(
    block: &[u8],
    rows: &BlockRows,
    tokens: Range<usize>,
    tensor: &mut [u8],
    dense: &DenseShape,
) -> Result<()> {
    for (to, from, len) in runs(tensor.len(), dense, tokens, block.len(), rows)? {
        tensor[to..to + len].copy_from_slice(&block[from..from + len]);
    }
    Ok(())
}

/// Returns the runs that are contiguous on both sides: offset in the tensor, offset in the block,
/// and length. All runs are within both.
fn runs(
    tensor: usize,
    dense: &DenseShape,
    tokens: Range<usize>,
    block: usize,
    rows: &BlockRows,
) -> Result<impl Iterator<Item = (usize, usize, usize)> + use<>> {
    let BlockShape { heads, tokens: block_tokens, content } = rows.shape;
    let fits = dense.extent().is_some_and(|extent| extent <= tensor)
        && tokens.start <= tokens.end
        && tokens.end <= dense.tokens
        && tokens.len() <= block_tokens
        && dense.heads == heads
        && rows.part.start <= rows.part.end
        && rows.part.end <= content
        && rows.part.len() == dense.row
        && (dense.heads <= 1 || dense.head_stride >= dense.row)
        && (dense.tokens <= 1 || dense.token_stride >= dense.row)
        && heads.checked_mul(block_tokens).and_then(|all| all.checked_mul(content)) == Some(block);
    if !fits {
        return Err(ErrorKind::Invalid.because(format!(
            "tokens {tokens:?} of a tensor of {tensor} bytes, {dense:?}, do not fit a block of \
             {block} bytes, {rows:?}"
        )));
    }
    let (head_step, token_step) = if rows.heads_before_tokens {
        (block_tokens * content, content)
    } else {
        (content, heads * content)
    };
    let (dense, first, part, row) = (*dense, tokens.start, rows.part.start, dense.row);
    // Rows that are adjacent on both sides in one dimension move as one run.
    let (per_head, per_token) = match (
        dense.token_stride == row && token_step == row,
        dense.head_stride == row && head_step == row,
    ) {
        (true, _) => (1, tokens.len()),
        (false, true) => (heads, 1),
        (false, false) => (1, 1),
    };
    let len = per_head * per_token * row;
    let starts = move |count: usize, step: usize| (0..count).step_by(step.max(1));
    let all = starts(if len == 0 { 0 } else { heads }, per_head).flat_map(move |head| {
        starts(tokens.len(), per_token).map(move |token| {
            let from = head * dense.head_stride + (first + token) * dense.token_stride;
            (from, head * head_step + token * token_step + part, len)
        })
    });
    Ok(all)
}
