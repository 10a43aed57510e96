//! The outer part of a handshake's answer: a hash that is compared before the inner part is
//! decoded.

use kvx_core::{ErrorKind, Result};

use crate::msgpack::{MsgpackReader, MsgpackValue, MsgpackWriter};
use crate::wire::CompatibilityHash;
use crate::wire::record::{Record as _, RecordFields, Shape, record};

const WHAT: &str = "handshake payload";

/// The answer to a handshake: the compatibility hash, and the agent metadata as bytes, decoded only
/// if the hash matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandshakePayload {
    /// The hash that both engines must agree on.
    pub compatibility_hash: CompatibilityHash,
    /// The encoded [`NixlAgentMetadata`](super::NixlAgentMetadata).
    pub agent_metadata_bytes: Vec<u8>,
    /// The reason why a kvx listener rejects the request. vLLM does not know this key; it gets the
    /// reason in place of the hash.
    pub refusal: Option<String>,
    /// A kvx listener's challenge for kvx decode engines: see [`KvxRequest`](super::KvxRequest).
    /// vLLM does not know this key.
    pub kvx_challenge: Option<Vec<u8>>,
    /// The proof of a kvx listener's identity for a kvx decode engine. vLLM does not know this key.
    pub kvx_proof: Option<Vec<u8>>,
    shape: Shape,
}

impl HandshakePayload {
    /// The longest payload that is read, in bytes.
    pub const MAX_LEN: usize = 16 << 20;
    const MAX_HASH: usize = 1024;
    const MAX_REFUSAL: usize = 1024;
    const MAX_WORD: usize = 64;

    /// Creates an answer.
    pub fn new(compatibility_hash: CompatibilityHash, agent_metadata_bytes: Vec<u8>) -> Self {
        HandshakePayload {
            compatibility_hash,
            agent_metadata_bytes,
            refusal: None,
            kvx_challenge: None,
            kvx_proof: None,
            shape: Shape::default(),
        }
    }

    /// Creates a refusal with a reason. vLLM finds the reason in place of the hash and logs it when
    /// it rejects the handshake. If it does not compare hashes, it rejects the empty metadata.
    pub fn refused(why: impl std::fmt::Display) -> Self {
        let mut why = why.to_string();
        if let Some((end, _)) = why.char_indices().nth(Self::MAX_REFUSAL / 4) {
            why.truncate(end);
        }
        HandshakePayload {
            refusal: Some(why.clone()),
            ..Self::new(CompatibilityHash::foreign(format!("refused by kvx: {why}")), Vec::new())
        }
    }

    /// Encodes the answer. An answer that was decoded encodes to the same bytes.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_map()
    }

    /// Decodes an answer.
    ///
    /// # Errors
    ///
    /// Malformed bytes; the error names a missing key. `Unsupported`: an answer of vLLM before
    /// 0.13, which has no hash.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let fields = RecordFields::read(WHAT, bytes, Self::MAX_LEN, Self::KEYS)?;
        if fields.has_unknown("engine_id") && !fields.has("compatibility_hash") {
            return Err(ErrorKind::Unsupported.because(
                "the peer runs vLLM before 0.13, whose handshake has no compatibility hash; kvx \
                 supports vLLM 0.16 and later: upgrade the peer",
            ));
        }
        let check = |reader: &MsgpackReader<'_>, len, max| match len {
            len if len > max => {
                Err(reader.malformed(format_args!("{len} bytes exceed the limit of {max}")))
            }
            _ => Ok(()),
        };
        let text = |reader: &mut MsgpackReader<'_>, max| {
            let text = reader.text()?;
            check(reader, text.len(), max).map(|()| text.to_owned())
        };
        let word = |reader: &mut MsgpackReader<'_>| {
            let bytes = reader.binary()?;
            check(reader, bytes.len(), Self::MAX_WORD).map(|()| bytes.to_owned())
        };
        Ok(HandshakePayload {
            compatibility_hash: CompatibilityHash::foreign(
                fields.required("compatibility_hash", |reader| text(reader, Self::MAX_HASH))?,
            ),
            agent_metadata_bytes: fields
                .required("agent_metadata_bytes", MsgpackReader::owned_binary)?,
            refusal: fields.optional("kvx_refusal", |reader| text(reader, Self::MAX_REFUSAL))?,
            kvx_challenge: fields.optional("kvx_challenge", word)?,
            kvx_proof: fields.optional("kvx_proof", word)?,
            shape: fields.shape(),
        })
    }
}

record! {
    HandshakePayload as payload:
    "compatibility_hash" => compatibility_hash,
    "agent_metadata_bytes" => agent_metadata_bytes,
    "kvx_refusal" => refusal or None,
    "kvx_challenge" => kvx_challenge or None,
    "kvx_proof" => kvx_proof or None,
}

impl MsgpackValue for CompatibilityHash {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.text(self.as_str());
    }
}
