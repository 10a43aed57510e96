//! The decode engine that a prefill is compared to, from its arguments.

use std::io::ErrorKind;
use std::path::Path;

use kvx::config::{KvTransferConfig, Surroundings};
use kvx::connector::{CompatibilityFactors, Version};
use serde_json::Value;

use crate::Result;

/// The decode engine, as far as its arguments describe it.
pub(super) struct Engine {
    pub(super) version: Version,
    /// The version that the arguments name.
    pub(super) kv_compat: Option<Version>,
    /// `None` if no arguments were given.
    pub(super) config: Option<KvTransferConfig>,
    pub(super) factors: CompatibilityFactors,
    /// The reason that the hash cannot be computed.
    pub(super) unknown: Option<String>,
    /// True if the model's weights are float32 and no argument names the served type.
    pub(super) is_float32: bool,
    pub(super) block_size: Option<u64>,
}

impl Engine {
    /// Reads the arguments of `vllm serve`, and the model's folder if it is on this machine.
    pub(super) fn read(serve: &[String]) -> Result<Self> {
        let (config, rest) =
            KvTransferConfig::from_arguments(serve.to_vec(), &Surroundings::of_process())?;
        let option = |names: &[&str]| option(&rest, names);
        let model = option(&["--model"])
            .or_else(|| rest.first().filter(|first| !first.starts_with('-')).cloned());
        let model = model.unwrap_or_default();
        let mut factors = CompatibilityFactors::from_config(&config, &model);
        let mut dtype = None;
        if let Some(text) = model_config(&model)? {
            let whole = text.get("text_config").unwrap_or(&text);
            let number =
                |key: &str| whole[key].as_u64().and_then(|number| u32::try_from(number).ok());
            let heads = number("num_attention_heads");
            factors.num_kv_heads = number("num_key_value_heads").or(heads).unwrap_or(0);
            let divided = || Some(number("hidden_size")? / heads.filter(|heads| *heads > 0)?);
            factors.head_size = number("head_dim").or_else(divided).unwrap_or(0);
            factors.num_hidden_layers = number("num_hidden_layers").unwrap_or(0);
            let written = ["dtype", "torch_dtype"]
                .iter()
                .find_map(|key| whole[key].as_str().or(text[key].as_str()));
            dtype = written.map(str::to_owned);
        }
        // Choose as vLLM does: `auto` is the type of the model, but never float32.
        let chosen = option(&["--dtype"]).filter(|dtype| dtype != "auto");
        let is_float32 = chosen.is_none() && dtype.as_deref() == Some("float32");
        let chosen = chosen.or(dtype.filter(|dtype| dtype != "float32"));
        match chosen.as_deref() {
            Some("half") => factors.dtype = "torch.float16".to_owned(),
            Some("float") => factors.dtype = "torch.float32".to_owned(),
            Some(dtype) => factors.dtype = format!("torch.{}", dtype.trim_start_matches("torch.")),
            None => {}
        }
        if let Some(cache) = option(&["--kv-cache-dtype"]) {
            factors.cache_dtype = cache;
        }
        if let Some(backend) = option(&["--attention-backend"]) {
            factors.attn_backend_name = backend;
        }
        factors.is_hma_enabled =
            !rest.iter().any(|word| dashes(word) == "--disable-hybrid-kv-cache-manager");
        let block_size = option(&["--block-size"]).and_then(|size| size.parse().ok());
        let written = |key: &str| factors.further.contains_key(key);
        let sized =
            factors.num_kv_heads > 0 && factors.head_size > 0 && factors.num_hidden_layers > 0;
        let unknown = if model.is_empty() && !written("model") {
            Some("no model is named: name it as for `vllm serve`".to_owned())
        } else if !sized
            && !["num_kv_heads", "head_size", "num_hidden_layers"].iter().all(|key| written(key))
        {
            Some(format!(
                "there is no {model}/config.json with its heads, head size and layers: run this where \
                the folder is, or \
                 write num_kv_heads, head_size and num_hidden_layers in kv_connector_extra_config.factors"
            ))
        } else {
            None
        };
        let version = factors.version;
        let kv_compat = config.extra().contains_key("kv_compat").then(|| config.version());
        let config = (!serve.is_empty()).then_some(config);
        Ok(Engine { version, kv_compat, config, factors, unknown, is_float32, block_size })
    }
}

/// Reads `config.json` of a model whose folder is on this machine.
fn model_config(model: &str) -> Result<Option<Value>> {
    let path = Path::new(model).join("config.json");
    match std::fs::read_to_string(&path) {
        _ if model.is_empty() => Ok(None),
        Ok(text) => {
            let config = serde_json::from_str(&text);
            Ok(Some(config.map_err(|error| format!("{} is not JSON: {error}", path.display()))?))
        }
        // The name of a model whose folder is not on this machine.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(format!("{}: {error}", path.display()).into()),
    }
}

fn dashes(word: &str) -> String {
    word.split('=').next().unwrap_or_default().replace('_', "-")
}

/// Returns the value of an option, separate or after `=`; the last one counts.
fn option(rest: &[String], names: &[&str]) -> Option<String> {
    let position = rest
        .iter()
        .rposition(|word| word.starts_with("--") && names.contains(&dashes(word).as_str()))?;
    match rest[position].split_once('=') {
        Some((_, value)) => Some(value.to_owned()),
        None => rest.get(position + 1).cloned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn engine(serve: &[&str]) -> Engine {
        Engine::read(&serve.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn factors_come_from_the_arguments_and_from_the_models_folder() {
        let folder = std::env::temp_dir().join(format!("kvx-probe-model-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let config = json!({"num_attention_heads": 16, "hidden_size": 1024, "num_key_value_heads": 8,
            "num_hidden_layers": 28, "torch_dtype": "float16"});
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let path = folder.to_str().unwrap();
        let read = engine(&[
            path,
            "--kv_cache_dtype=fp8",
            "--block-size",
            "32",
            "--disable-hybrid-kv-cache-manager",
        ]);
        std::fs::remove_dir_all(&folder).unwrap();
        let factors = &read.factors;
        assert_eq!(
            (factors.num_kv_heads, factors.head_size, factors.num_hidden_layers),
            (8, 64, 28)
        );
        assert_eq!(
            (&*factors.dtype, &*factors.cache_dtype, &*factors.model),
            ("torch.float16", "fp8", path)
        );
        assert_eq!(
            (factors.is_hma_enabled, read.block_size, read.unknown),
            (false, Some(32), None)
        );

        let unknown = engine(&["--model", "Qwen/Qwen3-0.6B", "--dtype", "half"]);
        assert_eq!(unknown.factors.dtype, "torch.float16");
        assert!(unknown.unknown.unwrap().contains("kv_connector_extra_config.factors"));
        assert!(engine(&[]).config.is_none());
    }
}
