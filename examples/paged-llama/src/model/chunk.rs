//! The tokens of one step.

/// The tokens of a chunk whose logits are returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsScope {
    /// No logits: more of the prompt follows.
    None,
    /// The logits of the last token.
    Last,
    /// The logits of every token.
    All,
}

/// Consecutive tokens of one sequence. The keys and values of all tokens before them are in the
/// pool.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// The position of the first token, counted from 0.
    pub start: usize,
    /// The sequence's blocks, from its beginning to the last token's block or further.
    pub blocks: &'a [u32],
    /// The tokens whose logits are computed.
    pub logits: LogitsScope,
}
