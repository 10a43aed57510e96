//! `kvx make-model`: writes a model with random weights, for tests that do not depend on its
//! answers.

use std::io::Write;
use std::path::PathBuf;

use kvx_paged_llama::model::{Architecture, Dtype};
use kvx_random_model::{ModelSpec, make_model};

use crate::Result;

/// The arguments of `kvx make-model`: the shape of the model.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The folder to write, in Hugging Face's format, which vLLM and transformers load as well.
    folder: PathBuf,
    /// llama, qwen2 (with biases) or qwen3 (with normalized queries and keys).
    #[arg(long, default_value = "llama")]
    arch: String,
    /// Number of layers.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Hidden size: values per token between layers.
    #[arg(long, default_value_t = 256)]
    hidden: usize,
    /// Size of the feed-forward part [default: twice --hidden].
    #[arg(long)]
    intermediate: Option<usize>,
    /// Query heads.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Key and value heads [default: --heads].
    #[arg(long)]
    kv_heads: Option<usize>,
    /// Values per head [default: --hidden divided by --heads].
    #[arg(long)]
    head_dim: Option<usize>,
    /// Vocabulary size; tokens beyond the tokenizer's 259 have no text.
    #[arg(long, default_value_t = 259)]
    vocab: usize,
    /// Longest sequence, in tokens.
    #[arg(long, default_value_t = 8192)]
    max_positions: usize,
    /// float32 or bfloat16.
    #[arg(long, default_value = "float32")]
    dtype: String,
    /// Use the embedding as the output layer too.
    #[arg(long)]
    tied: bool,
    /// Seed of the weights; the same seed and shape give the same weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Standard deviation of all matrices [default: depends on the width of each].
    #[arg(long)]
    init: Option<f32>,
    /// Number of files for the weights.
    #[arg(long, default_value_t = 1)]
    shards: usize,
    /// A config.json to copy, except for the numbers of layers and tokens.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["arch", "hidden", "heads", "dtype", "tied"])]
    like: Option<PathBuf>,
}

/// Writes the model, and prints its size.
pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<()> {
    let Arguments {
        folder, layers, hidden, heads, vocab, max_positions, tied, seed, shards, ..
    } = arguments;
    let architecture = Architecture::ALL.iter().find(|(_, _, name)| *name == arguments.arch);
    let dtype = [Dtype::F32, Dtype::Bf16].into_iter().find(|dtype| dtype.name() == arguments.dtype);
    let like = arguments.like.as_ref().map(|path| {
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        serde_json::from_str(&text)
            .map_err(|error| format!("{} is not JSON: {error}", path.display()))
    });
    let made = ModelSpec {
        architecture: architecture.ok_or("--arch must be llama, qwen2 or qwen3")?.0,
        layers: *layers,
        hidden: *hidden,
        intermediate: arguments.intermediate.unwrap_or(2 * hidden),
        heads: *heads,
        kv_heads: arguments.kv_heads.unwrap_or(*heads),
        head_dim: arguments.head_dim.unwrap_or(hidden / (*heads).max(1)),
        vocab: *vocab,
        max_positions: *max_positions,
        dtype: dtype.ok_or("--dtype must be float32 or bfloat16")?,
        tied: *tied,
        seed: *seed,
        init: arguments.init,
        shards: *shards,
        like: like.transpose()?,
    };
    let bytes = make_model(folder, &made)?;
    writeln!(
        out,
        "{}: {bytes} bytes of random weights. Its answers are meaningless.",
        folder.display()
    )?;
    Ok(())
}
