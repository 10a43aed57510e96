#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use kvx_paged_llama::model::{Architecture, Config, Dtype, ModelError, Result, bf16};
use serde_json::{Value, json};

/// The tokenizer's last three tokens; the first 256 are the bytes.
const END_OF_TEXT: usize = 256;
const BEGIN_OF_TURN: usize = 257;
const END_OF_TURN: usize = 258;
const SPECIAL: [(usize, &str); 3] =
    [(END_OF_TEXT, "<|endoftext|>"), (BEGIN_OF_TURN, "<|im_start|>"), (END_OF_TURN, "<|im_end|>")];

const CHAT_TEMPLATE: &str = "{% for message in messages %}\
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// The shape of a model to write.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "the names are config.json's, shortened")]
pub struct ModelSpec {
    pub architecture: Architecture,
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// The size of the vocabulary. Tokens beyond the tokenizer's 259 may be generated, and decode
    /// to no text.
    pub vocab: usize,
    pub max_positions: usize,
    pub dtype: Dtype,
    pub tied: bool,
    /// The seed of the weights: the same seed and shape give the same weights.
    pub seed: u64,
    /// The standard deviation of all matrices. By default it depends on their width.
    pub init: Option<f32>,
    /// The number of files that the weights are divided among.
    pub shards: usize,
    /// A `config.json` to copy, except for the number of layers and the vocabulary.
    pub like: Option<Value>,
}

impl Default for ModelSpec {
    fn default() -> ModelSpec {
        ModelSpec {
            architecture: Architecture::Llama,
            layers: 4,
            hidden: 256,
            intermediate: 512,
            heads: 8,
            kv_heads: 8,
            head_dim: 32,
            vocab: 259,
            max_positions: 8192,
            dtype: Dtype::F32,
            tied: false,
            seed: 1,
            init: None,
            shards: 1,
            like: None,
        }
    }
}

impl ModelSpec {
    /// Returns the model's `config.json`.
    pub fn config(&self) -> Value {
        if let Some(like) = &self.like {
            let mut config = like.clone();
            config["num_hidden_layers"] = self.layers.into();
            config["vocab_size"] = self.vocab.into();
            config["bos_token_id"] = Value::Null;
            config["eos_token_id"] = END_OF_TURN.into();
            return config;
        }
        let known =
            Architecture::ALL.iter().find(|(architecture, ..)| *architecture == self.architecture);
        let (name, kind) = known.map_or(("", ""), |(_, name, kind)| (*name, *kind));
        let mut config = json!({
            "architectures": [name],
            "model_type": kind,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": null,
            "tie_word_embeddings": self.tied,
            "torch_dtype": self.dtype.name(),
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": true,
            "bos_token_id": null,
            "eos_token_id": END_OF_TURN,
            "pad_token_id": END_OF_TEXT,
        });
        if self.architecture != Architecture::Qwen2 {
            config["attention_bias"] = false.into();
        }
        if self.architecture != Architecture::Llama {
            config["use_sliding_window"] = false.into();
        }
        config
    }
}

/// Writes the model into `folder`, which it creates if necessary, and `config.json` last. Returns
/// the size of the weights in bytes.
///
/// # Errors
/// Fails if the shape is invalid, the folder already holds a model, or the disk is full.
pub fn make_model(folder: &Path, made: &ModelSpec) -> Result<u64> {
    let json = made.config();
    let config = Config::parse(&json, Value::Null)?;
    let shape_error = |what: &str| Err(ModelError::new(format!("cannot make this model: {what}")));
    if config.vocab < 259 {
        return shape_error("the vocabulary must have at least the tokenizer's 259 tokens");
    }
    if config.architecture == Architecture::Qwen2 && config.hidden != config.heads * config.head_dim
    {
        return shape_error("Qwen2 requires hidden = heads * head_dim");
    }
    if !(1..=999).contains(&made.shards) {
        return shape_error("the number of weight files must be 1 to 999");
    }
    let failed = |error: std::io::Error| {
        ModelError::new(format!("{}: {error}: choose a writable folder", folder.display()))
    };
    if folder.join("config.json").exists() {
        return Err(ModelError::new(format!(
            "{} holds a model already: choose another folder",
            folder.display()
        )));
    }
    std::fs::create_dir_all(folder).map_err(failed)?;
    let bytes = write_weights(folder, &config, made).map_err(failed)?;
    let text = |value: &Value| format!("{value:#}\n");
    let files = [
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", tokenizer_config(config.max_positions)),
        (
            "generation_config.json",
            json!({"eos_token_id": [END_OF_TURN, END_OF_TEXT], "pad_token_id": END_OF_TEXT}),
        ),
        ("config.json", json),
    ];
    for (name, value) in files {
        std::fs::write(folder.join(name), text(&value)).map_err(failed)?;
    }
    Ok(bytes)
}

/// A tensor to write: normally distributed numbers with this mean and standard deviation.
struct Plan {
    name: String,
    shape: Vec<usize>,
    mean: f32,
    deviation: f32,
}

fn plans(config: &Config) -> Vec<Plan> {
    let Config { vocab, hidden, intermediate, head_dim, .. } = *config;
    let (q, kv) = (config.heads * head_dim, config.kv_heads * head_dim);
    let mut plans = Vec::new();
    let mut add = |name: String, shape: &[usize], mean: f32, deviation: f32| {
        plans.push(Plan { name, shape: shape.to_vec(), mean, deviation });
    };
    // The linear layers preserve a deviation of one. The embedding is small, so that answers do not
    // repeat.
    let spread = |cols: usize| 1.0 / (cols as f32).sqrt();
    add("model.embed_tokens.weight".into(), &[vocab, hidden], 0.0, spread(hidden));
    for layer in 0..config.layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        // Queries and keys are larger: uniform attention would hide mistakes.
        let linears = [
            ("self_attn.q_proj", q, hidden, 1.5, config.qkv_bias),
            ("self_attn.k_proj", kv, hidden, 1.5, config.qkv_bias),
            ("self_attn.v_proj", kv, hidden, 1.0, config.qkv_bias),
            ("self_attn.o_proj", hidden, q, 1.0, config.output_bias),
            ("mlp.gate_proj", intermediate, hidden, 1.0, config.mlp_bias),
            ("mlp.up_proj", intermediate, hidden, 1.0, config.mlp_bias),
            ("mlp.down_proj", hidden, intermediate, 1.0, config.mlp_bias),
        ];
        for (part, rows, cols, gain, bias) in linears {
            add(name(&format!("{part}.weight")), &[rows, cols], 0.0, gain * spread(cols));
            if bias {
                add(name(&format!("{part}.bias")), &[rows], 0.0, 0.3);
            }
        }
        add(name("input_layernorm.weight"), &[hidden], 1.0, 0.1);
        add(name("post_attention_layernorm.weight"), &[hidden], 1.0, 0.1);
        if config.architecture == Architecture::Qwen3 {
            add(name("self_attn.q_norm.weight"), &[head_dim], 1.2, 0.1);
            add(name("self_attn.k_norm.weight"), &[head_dim], 1.2, 0.1);
        }
    }
    add("model.norm.weight".into(), &[hidden], 1.0, 0.1);
    if !config.tied {
        add("lm_head.weight".into(), &[vocab, hidden], 0.0, spread(hidden));
    }
    plans
}

fn write_weights(folder: &Path, config: &Config, made: &ModelSpec) -> std::io::Result<u64> {
    let mut plans = plans(config);
    if let Some(init) = made.init {
        plans
            .iter_mut()
            .filter(|plan| plan.shape.len() == 2)
            .for_each(|plan| plan.deviation = init);
    }
    let share = plans.len().div_ceil(made.shards);
    let files: Vec<&[Plan]> = plans.chunks(share).collect();
    let mut index = BTreeMap::new();
    let mut total = 0;
    for (number, plans) in files.iter().enumerate() {
        let name = match files.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        total += write_file(&folder.join(&name), plans, config.dtype, made.seed)?;
        index.extend(plans.iter().map(|plan| (plan.name.clone(), name.clone())));
    }
    if files.len() > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": index});
        std::fs::write(folder.join("model.safetensors.index.json"), format!("{index:#}\n"))?;
    }
    Ok(total)
}

fn write_file(path: &Path, plans: &[Plan], dtype: Dtype, seed: u64) -> std::io::Result<u64> {
    let name = match dtype {
        Dtype::F32 => "F32",
        Dtype::Bf16 => "BF16",
    };
    let mut header = json!({"__metadata__": {"format": "pt"}});
    let mut end = 0;
    for Plan { name: tensor, shape, .. } in plans {
        let begin = end;
        end += shape.iter().product::<usize>() * dtype.size();
        header[tensor] = json!({"dtype": name, "shape": shape, "data_offsets": [begin, end]});
    }
    let mut header = header.to_string();
    // The header's length is a multiple of 8, so that the data is aligned.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for plan in plans {
        let mut random = Random::of(&plan.name, seed);
        for _ in 0..plan.shape.iter().product() {
            let value = plan.mean + plan.deviation * random.normal();
            match dtype {
                Dtype::F32 => file.write_all(&value.to_le_bytes())?,
                Dtype::Bf16 => file.write_all(&bf16(value).to_le_bytes())?,
            }
        }
    }
    file.into_inner().map_err(std::io::IntoInnerError::into_error)?;
    Ok(end as u64)
}

/// A random number generator that depends only on a name and a seed.
struct Random(u64);

impl Random {
    fn of(name: &str, seed: u64) -> Random {
        let mut random = Random(seed);
        for byte in name.bytes() {
            random.0 = random.0.wrapping_mul(0x100_0000_01b3) ^ u64::from(byte);
            random.next();
        }
        random
    }

    /// Returns the next number of SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns an approximately normal number with a deviation of one: the sum of four uniform
    /// ones.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|part| (bits >> (16 * part)) & 0xffff).sum();
        (sum as f32 - 131_070.0) / 37_837.0
    }
}

/// Returns a tokenizer with one token per byte and no merges.
fn tokenizer() -> Value {
    let mut other = 256;
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255_u8 {
        // Byte-level tokenizers represent an unprintable byte by a letter from U+0100 on.
        let seen = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let letter = if seen { u32::from(byte) } else { other };
        other += u32::from(!seen);
        vocab.insert(char::from_u32(letter).into_iter().collect(), byte.into());
    }
    let added = SPECIAL.map(|(id, content)| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    });
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": [],
        },
    })
}

fn tokenizer_config(max_positions: usize) -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": null,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": false,
        "chat_template": CHAT_TEMPLATE,
    })
}
