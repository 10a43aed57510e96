//! The compatibility hash: what two engines must have in common before they look at each other's memory.

use std::fmt;

use crate::config::{ConnectorKind, KvTransferConfig};
use kvx_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::python_json;
use crate::Version;
use crate::params::TransferMode;

/// A compatibility hash: 64 hexadecimal digits, if it comes from a vLLM or a kvx.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CompatibilityHash(String);

impl CompatibilityHash {
    /// What a peer has sent, or an operator has read from a log: any text, only to be compared.
    pub fn foreign(text: impl Into<String>) -> Self {
        CompatibilityHash(text.into())
    }

    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CompatibilityHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What goes into the hash. All of it must be as the vLLM peer has it, to the letter. Between engines of one's own any
/// values do that are the same on both sides; set all that decides what the bytes mean, for nothing else compares it.
///
/// ```
/// use kvx_vllm::Version;
/// use kvx_vllm::wire::CompatibilityFactors;
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
    /// Decides which factors there are.
    pub version: Version,
    /// The peer's `vllm.__version__`: any build has its own hash.
    pub vllm_version: String,
    /// The peer's `NIXL_CONNECTOR_VERSION`.
    pub connector_version: u32,
    /// The name or path as given to `vllm serve`.
    pub model: String,
    /// As torch names it: `torch.bfloat16`.
    pub dtype: String,
    /// KV heads of the whole model.
    pub num_kv_heads: u32,
    /// Values in a head.
    pub head_size: u32,
    /// Layers of the whole model.
    pub num_hidden_layers: u32,
    /// `FLASH_ATTN`, `FLASHINFER`, `CPU_ATTN`, …
    pub attn_backend_name: String,
    /// `--kv-cache-dtype`: `auto`, `fp8`, …
    pub cache_dtype: String,
    /// Whether the hybrid KV cache manager is on. Since vLLM 0.20.
    pub is_hma_enabled: bool,
    /// Whether all layers of a block lie side by side. Until vLLM 0.28.
    pub cross_layers_blocks: bool,
    /// Speculative decoding that works on hidden states (EAGLE, MTP), and only that. Since vLLM 0.28.
    pub speculative: Option<SpeculativeFactors>,
    /// Pull and push connectors do not shake hands with each other. Since vLLM 0.28.
    pub transfer_mode: TransferMode,
    /// Factors by name, of versions that are not known here too; they win over the others.
    pub further: Map<String, Value>,
}

/// A draft model that works on the target's hidden states. Its attention backend is not part of the hash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeculativeFactors {
    /// `eagle3`, `mtp`, …
    pub method: String,
    /// The draft model's name or path.
    pub model: String,
    /// Its revision, if one was given.
    pub revision: Option<String>,
    /// The revision of its code, if one was given.
    pub code_revision: Option<String>,
    /// Whether it drafts several tokens at once.
    pub parallel_drafting: bool,
    /// Its `kv_cache_dtype`; without, the target's.
    pub kv_cache_dtype: Option<String>,
    /// The target's layers that it looks at, if its configuration names them.
    pub auxiliary_layer_ids: Option<Vec<u32>>,
}

impl CompatibilityFactors {
    /// The factors of a plain model under `version`: bfloat16, `FLASH_ATTN`, cache type `auto`, hybrid cache manager
    /// on, pull; no heads and no layers. Set the fields that differ.
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

    /// As [`new`](Self::new), for a configuration: its version and mode, and what `kv_connector_extra_config.factors`
    /// writes over any factor. Operators cannot change what their vLLM hashes, so they write it there: `model` as it
    /// was given to `vllm serve`, `vllm_version` with its suffix, and so on.
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

    /// The exact text that is hashed: as Python's `json.dumps(factors, sort_keys=True)` writes it.
    ///
    /// # Errors
    ///
    /// A further factor that holds a number with a fraction: Python's rules for those are its own.
    pub fn json(&self) -> Result<String> {
        python_json::text(&Value::Object(self.map())).map_err(|key| {
            Error::new(
                ErrorKind::Invalid,
                format!("the factor {key} holds a fraction, which cannot be hashed as Python does"),
            )
        })
    }

    /// The factors by name.
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

    /// The hash.
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
