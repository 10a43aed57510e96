//! Permutations of a block's dimensions.

use kvx_core::{Error, ErrorKind, Result};

/// A block of the shape `[outer, rows, columns, run]` becomes one of `[outer, columns, rows, run]`.
/// KV caches need no more: the content of one head and token stays together, and the dimensions
/// around it change places.
///
/// ```
/// use kvx_gpu::kernels::{Swap, reference};
/// // Two heads of three tokens of one two-byte element.
/// let heads_first = [1, 1, 2, 2, 3, 3, 11, 11, 12, 12, 13, 13];
/// let mut tokens_first = [0; 12];
/// reference::permute_block(&heads_first, &mut tokens_first, Swap::heads_to_tokens(2, 3, 2))?;
/// assert_eq!(tokens_first, [1, 1, 11, 11, 2, 2, 12, 12, 3, 3, 13, 13]);
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// How often the rest repeats.
    pub outer: u64,
    /// The outer of the dimensions that change places.
    pub rows: u64,
    /// The inner one.
    pub columns: u64,
    /// Bytes that stay together.
    pub run: u64,
}

impl Swap {
    /// From heads before tokens (HND) to tokens before heads (NHD); `content` is the bytes of one
    /// head's content of one token.
    pub const fn heads_to_tokens(heads: u64, tokens: u64, content: u64) -> Self {
        Swap { outer: 1, rows: heads, columns: tokens, run: content }
    }

    /// From tokens before heads (NHD) to heads before tokens (HND).
    pub const fn tokens_to_heads(heads: u64, tokens: u64, content: u64) -> Self {
        Swap { outer: 1, rows: tokens, columns: heads, run: content }
    }

    /// From `ratio` blocks with heads before tokens, one after the other, to one block of the same
    /// layout, which has `tokens` tokens. Blocks with tokens first need none of this. Errors:
    /// `Invalid` if `ratio` does not divide `tokens`.
    pub fn merge(ratio: u64, heads: u64, tokens: u64, content: u64) -> Result<Self> {
        Ok(Swap { outer: 1, rows: ratio, columns: heads, run: run(ratio, tokens, content)? })
    }

    /// From one block with heads before tokens to `ratio` blocks, one after the other. Errors as
    /// [`merge`](Swap::merge).
    pub fn split(ratio: u64, heads: u64, tokens: u64, content: u64) -> Result<Self> {
        Ok(Swap { outer: 1, rows: heads, columns: ratio, run: run(ratio, tokens, content)? })
    }

    /// From `ratio` blocks with heads before tokens, one after the other, to one block with tokens
    /// before heads, which has `tokens` tokens. Errors as [`merge`](Swap::merge).
    pub fn merge_to_tokens(ratio: u64, heads: u64, tokens: u64, content: u64) -> Result<Self> {
        run(ratio, tokens, content)?;
        Ok(Swap { outer: ratio, rows: heads, columns: tokens / ratio, run: content })
    }

    /// The permutation that undoes this one.
    #[must_use]
    pub const fn back(self) -> Self {
        Swap { rows: self.columns, columns: self.rows, ..self }
    }

    /// Bytes of a block; `None` if no number of 64 bits says it.
    pub fn length(&self) -> Option<u64> {
        self.outer.checked_mul(self.rows)?.checked_mul(self.columns)?.checked_mul(self.run)
    }
}

/// The bytes of one head in one of `ratio` parts of a block.
fn run(ratio: u64, tokens: u64, content: u64) -> Result<u64> {
    let part = if ratio > 0 && tokens.is_multiple_of(ratio) { Some(tokens / ratio) } else { None };
    part.and_then(|part| part.checked_mul(content)).ok_or_else(|| {
        Error::new(
            ErrorKind::Invalid,
            format!("a block of {tokens} tokens does not consist of {ratio} blocks"),
        )
    })
}
