//! `kvx make-model`: a model of random weights, for what needs a model and not its words.

use std::io::Write;
use std::path::PathBuf;

use kvx_paged_llama::model::{Architecture, Dtype};
use kvx_random_model::{ModelSpec, make_model};

use crate::Result;

/// The shape of the model.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Where to write it: a folder as Hugging Face has them, which vLLM and transformers load as
    /// well.
    folder: PathBuf,
    /// llama, qwen2 (biases) or qwen3 (normed queries and keys).
    #[arg(long, default_value = "llama")]
    arch: String,
    /// Layers.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Numbers that stand for a token between layers.
    #[arg(long, default_value_t = 256)]
    hidden: usize,
    /// Numbers within the feed-forward part [default: twice --hidden].
    #[arg(long)]
    intermediate: Option<usize>,
    /// Heads of queries.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Heads of keys and values [default: as many].
    #[arg(long)]
    kv_heads: Option<usize>,
    /// Numbers of a head [default: --hidden by --heads].
    #[arg(long)]
    head_dim: Option<usize>,
    /// Tokens; those beyond the tokenizer's 259 mean no text.
    #[arg(long, default_value_t = 259)]
    vocab: usize,
    /// The longest sequence.
    #[arg(long, default_value_t = 8192)]
    max_positions: usize,
    /// float32 or bfloat16.
    #[arg(long, default_value = "float32")]
    dtype: String,
    /// The embedding is the last layer as well.
    #[arg(long)]
    tied: bool,
    /// The same seed and shape give the same weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The standard deviation of all matrices [default: what suits the width of each].
    #[arg(long)]
    init: Option<f32>,
    /// Files that the weights are spread over.
    #[arg(long, default_value_t = 1)]
    shards: usize,
    /// A config.json whose every word is kept but the number of layers and of tokens.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["arch", "hidden", "heads", "dtype", "tied"])]
    like: Option<PathBuf>,
}

/// Writes the model and says what it is.
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
        architecture: architecture.ok_or("--arch is llama, qwen2 or qwen3")?.0,
        layers: *layers,
        hidden: *hidden,
        intermediate: arguments.intermediate.unwrap_or(2 * hidden),
        heads: *heads,
        kv_heads: arguments.kv_heads.unwrap_or(*heads),
        head_dim: arguments.head_dim.unwrap_or(hidden / (*heads).max(1)),
        vocab: *vocab,
        max_positions: *max_positions,
        dtype: dtype.ok_or("--dtype is float32 or bfloat16")?,
        tied: *tied,
        seed: *seed,
        init: arguments.init,
        shards: *shards,
        like: like.transpose()?,
    };
    let bytes = make_model(folder, &made)?;
    writeln!(
        out,
        "{}: {bytes} bytes of random weights. What it answers means nothing.",
        folder.display()
    )?;
    Ok(())
}
