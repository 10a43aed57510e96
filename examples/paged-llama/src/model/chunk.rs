//! Tokens of one step.

/// The tokens of a chunk whose logits are returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsScope {
    /// None: more of the prompt follows.
    None,
    /// The logits of the last token.
    Last,
    /// Of every token.
    All,
}

/// Neighbouring tokens of one sequence. The keys and values of all tokens before them lie in the
/// pool.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// The position of the first, counted from 0.
    pub start: usize,
    /// The sequence's blocks, from its begin, up to the last token's at least.
    pub blocks: &'a [u32],
    /// The tokens whose logits are computed.
    pub logits: LogitsScope,
}
