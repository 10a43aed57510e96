//! Permutations of a block's dimensions.

use kvx_core::{ErrorKind, Result};

/// Changes a block of the shape `[outer, rows, columns, run]` to `[outer, columns, rows, run]`. KV
/// caches need no more: the content of one head and token stays together, and the dimensions around
/// it are swapped.
///
/// Two heads of three tokens of one two-byte element, `[1, 1, 2, 2, 3, 3, 11, 11, 12, 12, 13, 13]`,
/// become `[1, 1, 11, 11, 2, 2, 12, 12, 3, 3, 13, 13]` by `Swap::heads_to_tokens(2, 3, 2)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// The number of repetitions of the rest.
    pub outer: u64,
    /// The outer one of the swapped dimensions.
    pub rows: u64,
    /// The inner one of the swapped dimensions.
    pub columns: u64,
    /// The number of bytes that stay together.
    pub run: u64,
}

impl Swap {
    /// Converts heads before tokens (HND) to tokens before heads (NHD); `content` is the number of
    /// bytes of one head of one token.
    pub const fn heads_to_tokens(heads: u64, tokens: u64, content: u64) -> Self {
        Swap { outer: 1, rows: heads, columns: tokens, run: content }
    }

    /// Converts tokens before heads (NHD) to heads before tokens (HND).
    pub const fn tokens_to_heads(heads: u64, tokens: u64, content: u64) -> Self {
        Swap { outer: 1, rows: tokens, columns: heads, run: content }
    }

    /// Merges `ratio` consecutive blocks with heads before tokens into one block of the same layout
    /// with `tokens` tokens. Blocks with tokens first need no conversion. Errors: `Invalid` if
    /// `ratio` does not divide `tokens`.
    pub fn merge(ratio: u64, heads: u64, tokens: u64, content: u64) -> Result<Self> {
        Ok(Swap { outer: 1, rows: ratio, columns: heads, run: run(ratio, tokens, content)? })
    }

    /// Splits one block with heads before tokens into `ratio` consecutive blocks. Errors as for
    /// [`merge`](Swap::merge).
    pub fn split(ratio: u64, heads: u64, tokens: u64, content: u64) -> Result<Self> {
        Ok(Swap { outer: 1, rows: heads, columns: ratio, run: run(ratio, tokens, content)? })
    }

    /// Merges `ratio` consecutive HND blocks into one NHD block of `tokens` tokens. Errors as for
    /// [`merge`](Swap::merge).
    pub fn merge_to_tokens(ratio: u64, heads: u64, tokens: u64, content: u64) -> Result<Self> {
        run(ratio, tokens, content)?;
        Ok(Swap { outer: ratio, rows: heads, columns: tokens / ratio, run: content })
    }

    /// Returns the permutation that undoes this one.
    #[must_use]
    pub const fn back(self) -> Self {
        Swap { rows: self.columns, columns: self.rows, ..self }
    }

    /// Returns the number of bytes of a block; `None` if it does not fit into 64 bits.
    pub fn length(&self) -> Option<u64> {
        self.outer.checked_mul(self.rows)?.checked_mul(self.columns)?.checked_mul(self.run)
    }
}

/// Returns the number of bytes of one head in one of `ratio` parts of a block.
fn run(ratio: u64, tokens: u64, content: u64) -> Result<u64> {
    let part = if ratio > 0 && tokens.is_multiple_of(ratio) { Some(tokens / ratio) } else { None };
    part.and_then(|part| part.checked_mul(content)).ok_or_else(|| {
        ErrorKind::Invalid.because(format!(
            "a block of {tokens} tokens cannot be divided into {ratio} equal blocks"
        ))
    })
}
