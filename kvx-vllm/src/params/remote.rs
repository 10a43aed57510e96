//! Blocks that another engine holds for a request, and how to reach them.

use serde_json::Value;

use super::TransferParams;
use super::transfer::BlockIdForm;
use crate::Version;

/// Who moves the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TransferMode {
    /// The decode side reads: `NixlConnector` and `NixlPullConnector`.
    #[default]
    Pull,
    /// The prefill side writes: `NixlPushConnector`.
    Push,
}

impl TransferMode {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            TransferMode::Pull => "pull",
            TransferMode::Push => "push",
        }
    }

    pub(super) fn from_value(value: &Value) -> Option<Self> {
        match value.as_str()? {
            "pull" => Some(TransferMode::Pull),
            "push" => Some(TransferMode::Push),
            _ => None,
        }
    }
}

/// Blocks that another engine holds for a request: what [`TransferParams::remote_blocks`] has checked.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteBlocks {
    /// The engine that holds them.
    pub engine_id: String,
    /// The request's id in that engine: what notifications to it must name.
    pub request_id: String,
    /// Where its side channel listens.
    pub host: String,
    /// Where its side channel listens.
    pub port: u16,
    /// Logical block ids, a list per KV cache group. Empty in push mode, where the prefill side knows them.
    pub block_ids: Vec<Vec<u32>>,
    /// The larger of its tensor and decode context parallel sizes, at least 1.
    pub tp_size: u32,
    /// Its decode context parallel size, at least 1.
    pub dcp_size: u32,
    /// Its pipeline parallel size, at least 1.
    pub pp_size: u32,
    /// How many tokens the blocks hold, if it says so.
    pub num_tokens: Option<u64>,
    /// When it lets go of the blocks, in seconds on its own monotonic clock: decode instances say so.
    pub expiry_time: Option<f64>,
    /// How often it has changed its registration.
    pub registration_generation: u64,
    /// Who moves the data.
    pub mode: TransferMode,
    /// How many tokens of the prompt it found in its own cache.
    pub prefill_cached_tokens: Option<u64>,
    /// kvx only: which contents of the blocks are meant, as text.
    pub block_reference: Option<String>,
    /// kvx only: its signature over all this.
    pub signature: Option<String>,
}

impl RemoteBlocks {
    /// One rank of everything, pull mode, generation 0: set the fields that differ.
    pub fn new(
        engine_id: impl Into<String>,
        request_id: impl Into<String>,
        host: impl Into<String>,
        port: u16,
        block_ids: Vec<Vec<u32>>,
    ) -> Self {
        RemoteBlocks {
            engine_id: engine_id.into(),
            request_id: request_id.into(),
            host: host.into(),
            port,
            block_ids,
            tp_size: 1,
            dcp_size: 1,
            pp_size: 1,
            num_tokens: None,
            expiry_time: None,
            registration_generation: 0,
            mode: TransferMode::Pull,
            prefill_cached_tokens: None,
            block_reference: None,
            signature: None,
        }
    }

    /// How many blocks there are in all groups.
    pub fn block_count(&self) -> usize {
        self.block_ids.iter().map(Vec::len).sum()
    }

    /// The keys that an engine of this version writes.
    pub(super) fn into_params(self, version: Version) -> TransferParams {
        let mut params = TransferParams {
            remote_block_ids: Some(self.block_ids),
            block_id_form: BlockIdForm::of(version),
            remote_engine_id: Some(self.engine_id),
            remote_request_id: Some(self.request_id),
            remote_host: Some(self.host),
            remote_port: Some(self.port),
            tp_size: Some(self.tp_size),
            kvx_block_reference: self.block_reference,
            kvx_signature: self.signature,
            ..TransferParams::default()
        };
        let pull = self.mode == TransferMode::Pull;
        let since = |first| version.speaks(first);
        params.remote_num_tokens = since(Version::V0_21).then_some(self.num_tokens.unwrap_or(0));
        if pull && since(Version::V0_26) {
            params.remote_blocks_expiry_time = self.expiry_time;
            if self.expiry_time.is_none() {
                params.rest.insert("remote_blocks_expiry_time".to_owned(), Value::Null);
            }
        }
        // Push knew of pipeline stages before pull did.
        params.pp_size =
            since(if pull { Version::V0_29 } else { Version::V0_26 }).then_some(self.pp_size);
        params.transfer_mode = since(Version::V0_28).then_some(self.mode);
        params.dcp_size =
            since(if pull { Version::V0_29 } else { Version::V0_30 }).then_some(self.dcp_size);
        params.remote_prefill_cached_tokens =
            self.prefill_cached_tokens.filter(|_| since(Version::V0_32));
        params.remote_registration_generation =
            (pull && since(Version::V0_33)).then_some(self.registration_generation);
        params
    }
}
