//! Blocks that another engine holds for a request, and the engine's address.

use serde_json::Value;

use super::TransferParams;
use super::transfer::BlockIdForm;
use crate::Version;

/// The side that moves the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TransferMode {
    /// The decode side reads: `NixlConnector` and `NixlPullConnector`.
    #[default]
    Pull,
    /// The prefill side writes: `NixlPushConnector`.
    Push,
}

impl TransferMode {
    /// Returns the mode as it is written.
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

/// Blocks that another engine holds for a request, checked by [`TransferParams::remote_blocks`].
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteBlocks {
    /// The engine that holds the blocks.
    pub engine_id: String,
    /// The request's id in that engine. Notifications to the engine must use it.
    pub request_id: String,
    /// The host of the engine's side channel.
    pub host: String,
    /// The port of the engine's side channel.
    pub port: u16,
    /// Logical block ids, one list for each KV cache group. Empty in push mode, where the prefill
    /// side knows them.
    pub block_ids: Vec<Vec<u32>>,
    /// The larger of the engine's tensor-parallel and decode-context-parallel sizes, at least 1.
    pub tp_size: u32,
    /// The engine's decode-context-parallel size, at least 1.
    pub dcp_size: u32,
    /// The engine's pipeline-parallel size, at least 1.
    pub pp_size: u32,
    /// The number of tokens that the blocks hold, if the engine reports it.
    pub num_tokens: Option<u64>,
    /// The time at which the engine releases the blocks, in seconds on its own monotonic clock.
    /// Decode instances report it.
    pub expiry_time: Option<f64>,
    /// The number of changes to the engine's registration.
    pub registration_generation: u64,
    /// The side that moves the data.
    pub mode: TransferMode,
    /// The number of prompt tokens that the prefill instance found in its own cache: for statistics
    /// only, and not signed.
    pub prefill_cached_tokens: Option<u64>,
    /// kvx only: the identity of the blocks' contents, as text.
    pub block_reference: Option<String>,
    /// kvx only: the engine's signature over all other fields.
    pub signature: Option<String>,
}

impl RemoteBlocks {
    /// Creates blocks of an engine with one rank, in pull mode, with generation 0. Set the fields
    /// that differ.
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

    /// Returns the number of blocks in all groups.
    pub fn block_count(&self) -> usize {
        self.block_ids.iter().map(Vec::len).sum()
    }

    /// Converts to the keys that an engine of this version writes.
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
        // The push connector wrote pipeline stages before the pull connector did.
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
