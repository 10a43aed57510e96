//! The arguments of `kvx demo`.

use std::path::PathBuf;

use clap::Args;

use crate::bytes;

/// The arguments of `kvx demo`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The backends to show, in this order.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "SHM,TCP")]
    pub(super) backend: Vec<String>,
    /// Prefill servers.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(super) prefillers: u8,
    /// Decode servers.
    #[arg(long, default_value_t = 1, value_name = "M", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(super) decoders: u8,
    /// Tensor-parallel ranks of a prefill and of a decode server: 1, 2, 4 or 8; one number is for
    /// both.
    #[arg(long, value_name = "P:D", value_parser = ranks, default_value = "1")]
    pub(super) tp: (u16, u16),
    /// Tokens per block at the prefill and at the decode servers; one number is for both. One of
    /// two must be a multiple of the other.
    #[arg(long, value_name = "P:D", value_parser = block_sizes, default_value = "16")]
    pub(super) block_size: (u16, u16),
    /// A model's folder, or a name in the local Hugging Face cache [default: a small model that
    /// writes English words].
    #[arg(long, value_name = "DIR")]
    pub(super) model: Option<PathBuf>,
    /// Corrupt one transferred block: the answer must differ, and the demo exits with 1.
    #[arg(long)]
    pub(super) corrupt: bool,
    /// Also kill prefill servers during transfers, under both policies of decode servers.
    #[arg(long)]
    pub(super) kill: bool,
    /// Print JSON: one object per line.
    #[arg(long)]
    pub(super) json: bool,
    /// Leave the servers running until Ctrl-C, and print an example request.
    #[arg(long)]
    pub(super) serve: bool,
    /// Move blocks between two processes, without servers.
    #[arg(long, conflicts_with_all = ["prefillers", "decoders", "tp", "block_size", "model", "corrupt", "kill", "json", "serve"])]
    pub(super) transfer: bool,
    /// With --transfer: the size of the pool, which has 4096 blocks.
    #[arg(long, value_parser = bytes::parse, default_value = "256M", requires = "transfer")]
    pub(super) size: u64,
}

/// Parses sizes of blocks.
fn block_sizes(text: &str) -> std::result::Result<(u16, u16), String> {
    match two(text) {
        Some((prefill, decode)) if decode % prefill == 0 || prefill % decode == 0 => {
            Ok((prefill, decode))
        }
        Some(_) => Err("one size has to be a multiple of the other, as in 16:64".to_owned()),
        None => Err("write a count of tokens, or two, as in 16:64".to_owned()),
    }
}

/// Parses numbers of ranks.
fn ranks(text: &str) -> std::result::Result<(u16, u16), String> {
    let fits = |ranks: u16| matches!(ranks, 1 | 2 | 4 | 8);
    let both = two(text).filter(|(prefill, decode)| fits(*prefill) && fits(*decode));
    both.ok_or_else(|| "write 1, 2, 4 or 8, or two of them, as in 1:2".to_owned())
}

/// Parses two counts with a colon between them, or one that is for both.
fn two(text: &str) -> Option<(u16, u16)> {
    let (prefill, decode) = text.split_once(':').unwrap_or((text, text));
    let count = |text: &str| text.parse().ok().filter(|count| *count > 0);
    Some((count(prefill)?, count(decode)?))
}
