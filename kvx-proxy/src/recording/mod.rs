//! Recordings: what `kvx proxy --record` writes about requests, and `kvx replay` plays.
//!
//! A recording is a text file with one JSON object per line. It begins with a [`Header`], and each
//! further line is a [`Line`] about a completion that was admitted, in the order in which they ended. A router that
//! is restarted with the same file adds a further section, with a header and hashes of its own. The
//! names of the fields of a request are those of Mooncake's public traces.

mod file;
pub(crate) mod trace;
pub(crate) mod writer;

use serde::Serialize;

use crate::fleet::cache_model::CHUNK_TOKENS;

/// The version of the format.
pub(crate) const VERSION: u32 = 1;

/// The most tokens of a prompt and of an answer. The router's estimate may be more, for a prompt
/// with thousands of parts.
pub(crate) const MOST_TOKENS: u64 = 4 << 20;

/// A sentence in each header: what readers of the file can and cannot learn from it.
pub(crate) const HOLDS: &str = "times, lengths, outcomes, and hashes of prompts under a random key \
                                that is not kept; no text, no names";

/// The first line of a section.
#[derive(Serialize)]
pub(crate) struct Header {
    /// The version of the format.
    pub(crate) kvx_recording: u32,
    /// When the section began, in seconds since the Unix epoch.
    pub(crate) started: f64,
    /// The tokens of the part of a prompt for which a hash stands.
    pub(crate) block_tokens: usize,
    /// [`HOLDS`].
    pub(crate) holds: &'static str,
}

impl Header {
    /// Returns the header of a section that begins at this time.
    fn new(started: f64) -> Self {
        Header { kvx_recording: VERSION, started, block_tokens: CHUNK_TOKENS, holds: HOLDS }
    }

    /// Returns the header's line, with its newline.
    fn line(&self) -> serde_json::Result<String> {
        Ok(format!("{}\n", serde_json::to_string(self)?))
    }
}

/// A request that has ended.
#[derive(Serialize)]
pub(crate) struct Line<'a> {
    /// When it arrived, in milliseconds since its section began.
    pub(crate) timestamp: f64,
    /// The estimated tokens of its prompt.
    pub(crate) input_length: u64,
    /// The tokens of its answer, as far as the router knows them: the events of a stream, or the
    /// usage of another answer.
    pub(crate) output_length: Option<u64>,
    /// Keyed hashes of the prompt up to the end of each whole block. Equal hashes stand for equal
    /// prompts up to there.
    pub(crate) hash_ids: &'a [u64],
    /// The most tokens that its answer could have.
    pub(crate) max_tokens: u64,
    /// True for chat completions.
    pub(crate) chat: bool,
    /// True if its answer was streamed.
    pub(crate) stream: bool,
    /// The status of its answer; 0 if the client disconnected before.
    pub(crate) status: u16,
    /// Its outcome, as in the metric `kvx_proxy_requests_total`.
    pub(crate) outcome: &'static str,
    /// Its route, as in the access log.
    pub(crate) route: Option<&'static str>,
    /// Milliseconds until the first byte of its answer.
    pub(crate) ttft_ms: Option<f64>,
    /// Milliseconds until its end.
    pub(crate) total_ms: f64,
}
