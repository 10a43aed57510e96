//! The compatibility hash of the properties that two engines must have in common before they access
//! each other's memory.

use std::fmt;

use crate::config::{ConnectorKind, KvTransferConfig};
use kvx_core::{ErrorKind, Result};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::python_json;
use crate::Version;
use crate::params::TransferMode;

/// A compatibility hash: 64 hexadecimal digits, if it comes from vLLM or kvx.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CompatibilityHash(String);

impl CompatibilityHash {
    /// Takes a hash from a peer or from a log. Any text is accepted, only for comparison.
    pub fn foreign(text: impl Into<String>) -> Self {
        CompatibilityHash(text.into())
    }

    /// Returns the hash as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CompatibilityHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The input of the hash. For a vLLM peer, every value must be exactly the peer's. Between kvx
/// engines, any values that are equal on both sides work. Set all values that decide how the bytes
/// are interpreted, at least the model, the numbers of heads and layers, the size of a head, the
/// data type and the attention backend: no other check compares them.
///
/// ```
/// # mod kvx { pub mod connector { pub use kvx_vllm::{Version, wire::CompatibilityFactors}; } }
/// use kvx::connector::{CompatibilityFactors, Version};
/// let mut factors = CompatibilityFactors::new(Version::V0_33, "Qwen/Qwen3-0.6B");
/// factors.num_kv_heads = 8;
/// factors.head_size = 128;
/// factors.num_hidden_layers = 28;
/// assert!(factors.hash()?.as_str().starts_with("cde24c48"));
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CompatibilityFactors {
    /// The version that decides which factors exist.
    pub version: Version,
    /// The peer's `vllm.__version__`. Every build has its own hash.
    pub vllm_version: String,
    /// The peer's `NIXL_CONNECTOR_VERSION`.
    pub connector_version: u32,
    /// The name or path as given to `vllm serve`.
    pub model: String,
    /// The type as torch names it: `torch.bfloat16`.
    pub dtype: String,
    /// The number of KV heads of the whole model.
    pub num_kv_heads: u32,
    /// The number of values in a head.
    pub head_size: u32,
    /// The number of layers of the whole model.
    pub num_hidden_layers: u32,
    /// `FLASH_ATTN`, `FLASHINFER`, `CPU_ATTN`, …
    pub attn_backend_name: String,
    /// `--kv-cache-dtype`: `auto`, `fp8`, …
    pub cache_dtype: String,
    /// True if the hybrid KV cache manager is on. Since vLLM 0.20.
    pub is_hma_enabled: bool,
    /// True if all layers of a block are adjacent. Until vLLM 0.28.
    pub cross_layers_blocks: bool,
    /// Speculative decoding on hidden states (EAGLE, MTP). Other methods are not hashed. Since vLLM
    /// 0.28.
    pub speculative: Option<SpeculativeFactors>,
    /// The transfer mode: pull and push connectors reject each other's handshakes. Since vLLM 0.28.
    pub transfer_mode: TransferMode,
    /// Factors by name, also those of unknown versions. They override the other fields.
    pub further: Map<String, Value>,
}

/// A draft model that uses the target's hidden states. Its attention backend is not hashed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeculativeFactors {
    /// `eagle3`, `mtp`, …
    pub method: String,
    /// The name or path of the draft model.
    pub model: String,
    /// The revision of the draft model, if one was given.
    pub revision: Option<String>,
    /// The revision of the draft model's code, if one was given.
    pub code_revision: Option<String>,
    /// True if the model drafts several tokens at once.
    pub parallel_drafting: bool,
    /// The draft model's `kv_cache_dtype`; `None` for the target's.
    pub kv_cache_dtype: Option<String>,
    /// The layers of the target that it reads, if its configuration names them.
    pub auxiliary_layer_ids: Option<Vec<u32>>,
}

impl CompatibilityFactors {
    /// Creates the factors of a plain model under `version`: bfloat16, `FLASH_ATTN`, cache type
    /// `auto`, hybrid cache manager on, pull mode, no heads and no layers. Set the fields that
    /// differ.
    pub fn new(version: Version, model: impl Into<String>) -> Self {
        CompatibilityFactors {
            version,
            vllm_version: version.vllm_version().to_owned(),
            connector_version: version.connector_version(),
            model: model.into(),
            dtype: "torch.bfloat16".to_owned(),
            num_kv_heads: 0,
            head_size: 0,
            num_hidden_layers: 0,
            attn_backend_name: "FLASH_ATTN".to_owned(),
            cache_dtype: "auto".to_owned(),
            is_hma_enabled: true,
            cross_layers_blocks: false,
            speculative: None,
            transfer_mode: TransferMode::Pull,
            further: Map::new(),
        }
    }

    /// Creates the factors as [`new`](Self::new) for a configuration: its version and mode,
    /// overridden by `kv_connector_extra_config.factors`. Operators cannot change what their vLLM
    /// hashes, so they write its values there: `model` as given to `vllm serve`, `vllm_version`
    /// with its suffix, and so on.
    pub fn from_config(config: &KvTransferConfig, model: impl Into<String>) -> Self {
        CompatibilityFactors {
            cross_layers_blocks: config.nixl().enable_cross_layers_blocks,
            transfer_mode: match config.connector() {
                Some(ConnectorKind::NixlPush) => TransferMode::Push,
                _ => TransferMode::Pull,
            },
            further: config.nixl().factors.clone(),
            ..CompatibilityFactors::new(config.version().spoken(), model)
        }
    }

    /// Returns the text that is hashed, exactly as Python's `json.dumps(factors, sort_keys=True)`
    /// writes it.
    ///
    /// # Errors
    ///
    /// A further factor with a fractional number: Python formats those differently.
    pub fn json(&self) -> Result<String> {
        python_json::text(&Value::Object(self.map())).map_err(|key| {
            ErrorKind::Invalid.because(format!(
                "the factor {key} holds a fraction, which cannot be hashed as Python does"
            ))
        })
    }

    /// Returns the factors by name.
    #[doc(hidden)]
    pub fn map(&self) -> Map<String, Value> {
        let mut factors = Map::new();
        let mut put = |key: &str, value: Value| factors.insert(key.to_owned(), value);
        put("vllm_version", self.vllm_version.as_str().into());
        put("nixl_connector_version", self.connector_version.into());
        put("model", self.model.as_str().into());
        put("dtype", self.dtype.as_str().into());
        put("num_kv_heads", self.num_kv_heads.into());
        put("head_size", self.head_size.into());
        put("num_hidden_layers", self.num_hidden_layers.into());
        put("attn_backend_name", self.attn_backend_name.as_str().into());
        put("cache_dtype", self.cache_dtype.as_str().into());
        if self.version.hashes_cross_layers() {
            put("cross_layers_blocks", self.cross_layers_blocks.into());
        }
        if self.version.hashes_cache_manager() {
            put("is_hma_enabled", self.is_hma_enabled.into());
        }
        if self.version.hashes_transfer_mode() {
            let speculative =
                self.speculative.as_ref().map(|factors| factors.value(&self.cache_dtype));
            put("speculative_config", speculative.unwrap_or_default());
            put("transfer_mode", self.transfer_mode.as_str().into());
        }
        factors.extend(self.further.clone());
        factors
    }

    /// Returns the hash.
    ///
    /// # Errors
    ///
    /// As [`json`](Self::json).
    pub fn hash(&self) -> Result<CompatibilityHash> {
        Ok(CompatibilityHash(hex_digest(&Sha256::digest(self.json()?))))
    }
}

pub(super) fn hex_digest(digest: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(64);
    for byte in digest {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

impl SpeculativeFactors {
    fn value(&self, target_cache_dtype: &str) -> Value {
        serde_json::json!({
            "method": self.method,
            "model": self.model,
            "revision": self.revision,
            "code_revision": self.code_revision,
            "parallel_drafting": self.parallel_drafting,
            "kv_cache_dtype": self.kv_cache_dtype.as_deref().unwrap_or(target_cache_dtype),
            "auxiliary_layer_ids": self.auxiliary_layer_ids,
        })
    }
}
