//! The KV cache of real models, for `kvx bench sweep`.

/// A model's KV cache, as an engine keeps it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    /// The name on the command line.
    pub(crate) name: &'static str,
    pub(crate) layers: u32,
    pub(crate) kv: Kv,
    /// The tokens of a block.
    pub(crate) block_tokens: u32,
    /// The source of the numbers.
    pub(crate) source: &'static str,
}

/// The cache of a layer for one token.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kv {
    /// Keys and values of so many heads of this size.
    Heads { count: u32, size: u32 },
    /// A latent vector of this length, for keys and values together (MLA).
    Latent { size: u32 },
}

/// The data type of every model here. No `config.json` quantizes the KV cache.
pub(crate) const DTYPE: &str = "bfloat16";
const DTYPE_BYTES: u64 = 2;

/// The tokens of a block, unless the attention needs others: vLLM's default on GPUs.
const BLOCK: u32 = 16;
/// The tokens of a block of vLLM's FlashMLA.
const MLA_BLOCK: u32 = 64;

const fn heads(
    name: &'static str,
    source: &'static str,
    layers: u32,
    count: u32,
    size: u32,
) -> Model {
    Model { name, layers, kv: Kv::Heads { count, size }, block_tokens: BLOCK, source }
}

/// The models. Sources give `num_hidden_layers`, `num_key_value_heads` and `head_dim`, or
/// `hidden_size / num_attention_heads` where there is no `head_dim`; for MLA, `kv_lora_rank` and
/// `qk_rope_head_dim`.
pub(crate) const MODELS: [Model; 8] = [
    heads("Llama-3.1-8B", "config.json of meta-llama/Llama-3.1-8B", 32, 8, 128),
    heads("Llama-3.1-70B", "config.json of meta-llama/Llama-3.1-70B", 80, 8, 128),
    heads("Qwen2.5-7B", "config.json of Qwen/Qwen2.5-7B", 28, 4, 128),
    heads("Qwen2.5-72B", "config.json of Qwen/Qwen2.5-72B", 80, 8, 128),
    heads("Qwen3-8B", "config.json of Qwen/Qwen3-8B", 36, 8, 128),
    heads("Qwen3-32B", "config.json of Qwen/Qwen3-32B", 64, 8, 128),
    heads("Qwen3-30B-A3B", "config.json of Qwen/Qwen3-30B-A3B", 48, 4, 128),
    Model {
        name: "DeepSeek-V3",
        layers: 61,
        kv: Kv::Latent { size: 512 + 64 },
        block_tokens: MLA_BLOCK,
        source: "config.json of deepseek-ai/DeepSeek-V3",
    },
];

impl Model {
    /// Returns the bytes that lie together: a block of one layer, with its keys and values packed,
    /// as vLLM 0.33 keeps them.
    pub(crate) fn piece(&self) -> u64 {
        let values = match self.kv {
            Kv::Heads { count, size } => 2 * count * size,
            Kv::Latent { size } => size,
        };
        u64::from(self.block_tokens) * u64::from(values) * DTYPE_BYTES
    }

    /// Returns the bytes of a block: a piece for each layer.
    pub(crate) fn block(&self) -> u64 {
        self.piece() * u64::from(self.layers)
    }

    /// Returns the bytes of a token.
    pub(crate) fn bytes_per_token(&self) -> u64 {
        self.block() / u64::from(self.block_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_token_are_those_that_are_published() {
        let of = |name: &str| {
            let model = MODELS.iter().find(|model| model.name == name).unwrap();
            (model.piece(), model.bytes_per_token())
        };
        // 128 KiB and 320 KiB are common knowledge; DeepSeek's report compares 70 KB.
        assert_eq!(of("Llama-3.1-8B"), (64 << 10, 128 << 10));
        assert_eq!(of("Llama-3.1-70B"), (64 << 10, 320 << 10));
        assert_eq!(of("Qwen2.5-7B"), (32 << 10, 56 << 10));
        assert_eq!(of("DeepSeek-V3"), (72 << 10, 70_272));
    }
}
