//! Reads `config.json` and `generation_config.json`.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{ModelError, Result};
use super::rope::Rope;

/// The architectures that this server computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// `LlamaForCausalLM`
    Llama,
    /// `Qwen2ForCausalLM`: with biases on queries, keys and values.
    Qwen2,
    /// `Qwen3ForCausalLM`: with norms on each head of queries and keys.
    Qwen3,
}

impl Architecture {
    /// All architectures, with their names in `config.json`'s `architectures` and `model_type`.
    pub const ALL: [(Architecture, &'static str, &'static str); 3] = [
        (Architecture::Llama, "LlamaForCausalLM", "llama"),
        (Architecture::Qwen2, "Qwen2ForCausalLM", "qwen2"),
        (Architecture::Qwen3, "Qwen3ForCausalLM", "qwen3"),
    ];
}

/// The number format of weights and of the KV cache. Sums always use `F32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// The upper half of an `F32`.
    Bf16,
}

impl Dtype {
    /// Returns the bytes per number.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 => 2,
        }
    }

    /// Returns PyTorch's name of the format, as in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
        }
    }
}

/// A model's shape.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "the names are config.json's, shortened")]
pub struct Config {
    pub architecture: Architecture,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub norm_epsilon: f32,
    /// The longest sequence that the model was trained for.
    pub max_positions: usize,
    /// The number format of the weights and, by default, of the KV cache.
    pub dtype: Dtype,
    /// The embedding is also the last layer.
    pub tied: bool,
    /// Biases: of queries, keys and values; of attention's output; of the three feed-forward
    /// matrices.
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    /// Tokens that end an answer, from `generation_config.json` or else `config.json`.
    pub eos: Vec<u32>,
    /// The content of `generation_config.json`, the defaults of requests; null without the file.
    pub generation: Value,
    pub(super) rope: Rope,
}

impl Config {
    /// Reads the two files in `folder`.
    ///
    /// # Errors
    /// Fails if a file is missing or not JSON, a size is invalid, or the model needs a feature that
    /// this server does not have.
    pub fn read(folder: &Path) -> Result<Config> {
        let config = read_json(&folder.join("config.json"))?.ok_or_else(|| {
            ModelError::new(format!(
                "{} has no config.json: pass the folder of a Hugging Face model, or make one with \
                 `kvx make-model {}`",
                folder.display(),
                folder.display()
            ))
        })?;
        let generation = read_json(&folder.join("generation_config.json"))?.unwrap_or(Value::Null);
        Config::parse(&config, generation).map_err(|error| {
            ModelError::new(format!("{}: {error}", folder.join("config.json").display()))
        })
    }

    /// Parses JSON that was already read.
    ///
    /// # Errors
    /// See [`Config::read`].
    pub fn parse(json: &Value, generation: Value) -> Result<Config> {
        let architecture = architecture(json)?;
        refuse_what_is_not_computed(json)?;
        let (hidden, heads) = (size(json, "hidden_size")?, size(json, "num_attention_heads")?);
        let kv_heads = optional_size(json, "num_key_value_heads")?.unwrap_or(heads);
        let head_dim = optional_size(json, "head_dim")?.unwrap_or(hidden / heads);
        if heads % kv_heads != 0 {
            return Err(ModelError::new(format!(
                "{heads} heads cannot share {kv_heads} heads of keys and values"
            )));
        }
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(ModelError::new(format!(
                "head_dim is {head_dim}; the rotation needs an even number"
            )));
        }
        let max_positions = size(json, "max_position_embeddings")?;
        let flag = |name: &str| json[name].as_bool().unwrap_or(false);
        let attention_bias = flag("attention_bias");
        let eos = [&generation, json]
            .into_iter()
            .map(|json| tokens(&json["eos_token_id"]))
            .find(|eos| !eos.is_empty());
        Ok(Config {
            architecture,
            vocab: size(json, "vocab_size")?,
            hidden,
            intermediate: size(json, "intermediate_size")?,
            layers: size(json, "num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            norm_epsilon: json["rms_norm_eps"].as_f64().unwrap_or(1e-6) as f32,
            max_positions,
            dtype: dtype(json)?,
            tied: flag("tie_word_embeddings"),
            qkv_bias: attention_bias || architecture == Architecture::Qwen2,
            output_bias: attention_bias && architecture != Architecture::Qwen2,
            mlp_bias: flag("mlp_bias") && architecture == Architecture::Llama,
            eos: eos.unwrap_or_default(),
            generation,
            rope: Rope::parse(json, head_dim, max_positions)?,
        })
    }
}

/// Returns the file's JSON, or `None` if there is no such file.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ModelError::new(format!("{}: {error}", path.display()))),
    };
    let value = serde_json::from_str(&text)
        .map_err(|error| ModelError::new(format!("{} is not JSON: {error}", path.display())))?;
    Ok(Some(value))
}

fn architecture(json: &Value) -> Result<Architecture> {
    let named: Vec<&str> =
        json["architectures"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let known = Architecture::ALL.iter().find(|(_, name, _)| named.contains(name));
    known.map(|(architecture, ..)| *architecture).ok_or_else(|| {
        let ours: Vec<_> = Architecture::ALL.iter().map(|(_, name, _)| *name).collect();
        ModelError::new(format!(
            "architectures is {named:?}: this server computes {}",
            ours.join(", ")
        ))
    })
}

/// Rejects settings that would give wrong answers if they were ignored.
fn refuse_what_is_not_computed(json: &Value) -> Result<()> {
    let refuse = |what: String| {
        Err(ModelError::new(format!(
            "{what}: this server does not support that; use another model"
        )))
    };
    match json["hidden_act"].as_str() {
        None | Some("silu") => {}
        Some(other) => return refuse(format!("hidden_act is {other}")),
    }
    if !json["quantization_config"].is_null() {
        return refuse("the weights are quantized (quantization_config)".into());
    }
    let layer_types = json["layer_types"].as_array().into_iter().flatten();
    let slides = layer_types.filter_map(Value::as_str).any(|kind| kind != "full_attention");
    if json["use_sliding_window"].as_bool() == Some(true) || slides {
        return refuse(
            "the model uses sliding-window attention (use_sliding_window, layer_types)".into(),
        );
    }
    match json["partial_rotary_factor"].as_f64() {
        None | Some(1.0) => Ok(()),
        Some(part) => refuse(format!("partial_rotary_factor is {part}")),
    }
}

/// The largest size that is accepted: the product of three sizes still fits into 64 bits.
const LARGEST: u64 = 1 << 21;

fn size(json: &Value, name: &str) -> Result<usize> {
    optional_size(json, name)?.ok_or_else(|| ModelError::new(format!("{name} is missing")))
}

fn optional_size(json: &Value, name: &str) -> Result<Option<usize>> {
    match (&json[name], json[name].as_u64()) {
        (Value::Null, _) => Ok(None),
        (_, Some(size)) if (1..=LARGEST).contains(&size) => Ok(Some(size as usize)),
        (value, _) => Err(ModelError::new(format!(
            "{name} is {value}; it must be a number from 1 to {LARGEST}"
        ))),
    }
}

fn dtype(json: &Value) -> Result<Dtype> {
    let name = [&json["dtype"], &json["torch_dtype"]]
        .into_iter()
        .find_map(Value::as_str)
        .unwrap_or("float32");
    [Dtype::F32, Dtype::Bf16].into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
        ModelError::new(format!(
            "the weights are {name}; save the model as float32 or bfloat16, which this server reads"
        ))
    })
}

fn tokens(value: &Value) -> Vec<u32> {
    let several = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    several.iter().filter_map(|token| u32::try_from(token.as_u64()?).ok()).collect()
}
