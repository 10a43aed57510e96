//! The outer part of a handshake's answer: a hash to compare before the inner part is read.

use kvx_core::{Error, ErrorKind, Result};

use crate::msgpack::{MsgpackReader, MsgpackWriter};
use crate::wire::CompatibilityHash;
use crate::wire::record::{Record, RecordFields, Shape};

const WHAT: &str = "handshake payload";

/// The answer to a handshake: the compatibility hash, and the agent metadata as bytes that are only read if it fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandshakePayload {
    /// What both engines must agree on.
    pub compatibility_hash: CompatibilityHash,
    /// The encoded [`NixlAgentMetadata`](super::NixlAgentMetadata).
    pub agent_metadata_bytes: Vec<u8>,
    /// Why a kvx listener does not answer. vLLM does not know this key: it sees a hash that says the same.
    pub refusal: Option<String>,
    /// A kvx listener's word to kvx decodes: see [`KvxRequest`](super::KvxRequest). vLLM does not know this key.
    pub kvx_challenge: Option<Vec<u8>>,
    /// What proves a kvx listener to a kvx decode. vLLM does not know this key.
    pub kvx_proof: Option<Vec<u8>>,
    shape: Shape,
}

impl HandshakePayload {
    /// The longest that is read.
    pub const MAX_LEN: usize = 16 << 20;
    const MAX_HASH: usize = 1024;
    const MAX_REFUSAL: usize = 1024;
    const MAX_WORD: usize = 64;

    /// An answer.
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

    /// No, in words. vLLM finds them in place of the hash, and writes them into its log when it refuses the
    /// handshake; if it does not compare hashes, it refuses the empty metadata.
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

    /// The answer as bytes: those that it was read from, if it was.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_map()
    }

    /// Reads an answer.
    ///
    /// # Errors
    ///
    /// Malformed bytes; a missing key is named. `Unsupported`: a vLLM before 0.13, whose answer has no hash around it.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let fields = RecordFields::read(WHAT, bytes, Self::MAX_LEN, Self::KEYS)?;
        if fields.has_unknown("engine_id") && !fields.has("compatibility_hash") {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a vLLM before 0.13 answers, whose handshake has no compatibility hash; kvx speaks with vLLM 0.16 and \
                 later: upgrade the peer",
            ));
        }
        let text = |reader: &mut MsgpackReader<'_>, max| {
            let text = reader.text()?;
            if text.len() > max {
                return Err(
                    reader.malformed(format_args!("{} bytes, at most {max} are taken", text.len()))
                );
            }
            Ok(text.to_owned())
        };
        let word = |reader: &mut MsgpackReader<'_>| {
            let bytes = reader.binary()?;
            if bytes.len() > Self::MAX_WORD {
                let max = Self::MAX_WORD;
                return Err(reader
                    .malformed(format_args!("{} bytes, at most {max} are taken", bytes.len())));
            }
            Ok(bytes.to_owned())
        };
        Ok(HandshakePayload {
            compatibility_hash: CompatibilityHash::foreign(
                fields.required("compatibility_hash", |reader| text(reader, Self::MAX_HASH))?,
            ),
            agent_metadata_bytes: fields
                .required("agent_metadata_bytes", |reader| Ok(reader.binary()?.to_owned()))?,
            refusal: fields.optional("kvx_refusal", |reader| text(reader, Self::MAX_REFUSAL))?,
            kvx_challenge: fields.optional("kvx_challenge", word)?,
            kvx_proof: fields.optional("kvx_proof", word)?,
            shape: fields.shape(),
        })
    }
}

impl Record for HandshakePayload {
    const KEYS: &'static [&'static str] = &[
        "compatibility_hash",
        "agent_metadata_bytes",
        "kvx_refusal",
        "kvx_challenge",
        "kvx_proof",
    ];

    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn is_default(&self, key: &str) -> bool {
        match key {
            "kvx_refusal" => self.refusal.is_none(),
            "kvx_challenge" => self.kvx_challenge.is_none(),
            "kvx_proof" => self.kvx_proof.is_none(),
            _ => false,
        }
    }

    fn write(&self, key: &str, writer: &mut MsgpackWriter) {
        match key {
            "compatibility_hash" => writer.text(self.compatibility_hash.as_str()),
            "agent_metadata_bytes" => writer.binary(&self.agent_metadata_bytes),
            "kvx_refusal" => writer.optional(self.refusal.as_deref(), MsgpackWriter::text),
            "kvx_challenge" => {
                writer.optional(self.kvx_challenge.as_deref(), MsgpackWriter::binary)
            }
            "kvx_proof" => writer.optional(self.kvx_proof.as_deref(), MsgpackWriter::binary),
            other => unreachable!("{other} is no key of a {WHAT}"),
        }
    }
}
