//! Checks of a peer's answer, in vLLM's order.

use kvx_core::{ErrorKind, Result};

use super::{HandshakePayload, NixlAgentMetadata};
use crate::Version;
use crate::wire::{CompatibilityFactors, CompatibilityHash, explain_by_one};

/// The expected engine at the other end of a handshake, and the properties of this engine that it
/// must match.
#[derive(Clone, Debug, PartialEq)]
pub struct Expectation {
    /// The version of the peer.
    pub version: Version,
    /// The engine that the parameters name.
    pub engine_id: String,
    /// This engine's hash.
    pub compatibility_hash: CompatibilityHash,
    /// The factors of that hash, so that an error can name the difference.
    pub factors: Option<CompatibilityFactors>,
    /// True if the peer's hash must be the same.
    pub enforce_handshake_compat: bool,
    /// This engine's decode-context-parallel size.
    pub dcp_size: u32,
    /// This engine's prefill-context-parallel size.
    pub pcp_size: u32,
}

impl Expectation {
    /// Creates an expectation that compares hashes, without context parallelism.
    pub fn new(
        version: Version,
        engine_id: impl Into<String>,
        compatibility_hash: CompatibilityHash,
    ) -> Self {
        Expectation {
            version,
            engine_id: engine_id.into(),
            compatibility_hash,
            factors: None,
            enforce_handshake_compat: true,
            dcp_size: 1,
            pcp_size: 1,
        }
    }

    /// Describes the known factor in which the peer differs, if it differs in only one.
    fn difference(&self, theirs: &CompatibilityHash) -> String {
        let found =
            self.factors.as_ref().and_then(|ours| explain_by_one(ours, theirs).ok().flatten());
        match found {
            Some(found) => found.to_string(),
            None => "the versions of vLLM, the model's name, types, heads, layers, attention backend or transfer mode \
                     differ (`kvx probe` with the peer's side channel tries two of them at a time)"
                .to_owned(),
        }
    }

    /// Decodes and checks a payload. The checks are, in this order: it can be decoded; it is not a
    /// refusal; the hashes are equal; the metadata can be decoded; the context-parallel sizes are
    /// compatible; the engine is the expected one; the metadata is consistent.
    ///
    /// # Errors
    ///
    /// [`Malformed`](ErrorKind::Malformed): a part cannot be decoded, or its lists do not match
    /// each other.
    /// [`Invalid`](ErrorKind::Invalid): a kvx peer rejects the request, with its reason.
    /// [`Incompatible`](ErrorKind::Incompatible): the hashes differ.
    /// [`Unsupported`](ErrorKind::Unsupported): the context-parallel sizes, or a vLLM that is too
    /// old.
    /// [`PeerRestarted`](ErrorKind::PeerRestarted): another engine answers at this address.
    pub fn check(&self, payload: &[u8]) -> Result<NixlAgentMetadata> {
        let payload = HandshakePayload::decode(payload).map_err(|error| match error.kind() {
            ErrorKind::Unsupported => error,
            _ => ErrorKind::Malformed.because(format!(
                "{error}; the peer may speak another version than {}: set kv_compat to its version",
                self.version
            )),
        })?;
        if let Some(why) = &payload.refusal {
            return Err(
                ErrorKind::Invalid.because(format!("the peer refuses the handshake: {why}"))
            );
        }
        let (ours, theirs) = (&self.compatibility_hash, &payload.compatibility_hash);
        if self.enforce_handshake_compat && ours != theirs {
            return Err(ErrorKind::Incompatible.because(format!(
                "compatibility hash mismatch (here {:.8}, there {:.8}): {}; give both engines the \
                 same",
                ours.as_str(),
                theirs.as_str(),
                self.difference(theirs)
            )));
        }
        let metadata = NixlAgentMetadata::decode(&payload.agent_metadata_bytes, self.version)
            .map_err(|error| {
                ErrorKind::Malformed.because(format!(
                    "{error}; the peer's metadata is not that of {}",
                    self.version
                ))
            })?;
        self.check_context_parallel(&metadata)?;
        if metadata.engine_id != self.engine_id {
            return Err(ErrorKind::PeerRestarted.because(format!(
                "engine id mismatch: expected {}, got {}; the prefill side has restarted, or its \
                 side channel host is the default and points to another machine: set \
                 VLLM_NIXL_SIDE_CHANNEL_HOST there",
                self.engine_id, metadata.engine_id
            )));
        }
        metadata.check_regions()?;
        Ok(metadata)
    }

    fn check_context_parallel(&self, peer: &NixlAgentMetadata) -> Result<()> {
        let sizes = format!(
            "here PCP {} and DCP {}, there PCP {} and DCP {}",
            self.pcp_size, self.dcp_size, peer.pcp_size, peer.dcp_size
        );
        let refused = |why| {
            Err(ErrorKind::Unsupported
                .because(format!("{why}: {sizes}; give the engines compatible sizes")))
        };
        if peer.pcp_size > 1 && peer.dcp_size != 1 && peer.dcp_size != peer.pcp_size {
            return refused(
                "the peer's decode context parallelism does not span its prefill context parallel ranks",
            );
        }
        let replicated = |pcp, dcp| pcp > 1 && dcp == 1;
        if (replicated(self.pcp_size, self.dcp_size) && peer.dcp_size > 1)
            || (replicated(peer.pcp_size, peer.dcp_size) && self.dcp_size > 1)
        {
            return refused(
                "one side's cache is replicated over its prefill context ranks, the other's is split",
            );
        }
        Ok(())
    }
}
