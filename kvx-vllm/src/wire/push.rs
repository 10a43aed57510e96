//! The registration that a decode side with the NixlPushConnector sends to the prefill side: where
//! to write.

use kvx_core::Result;

use crate::msgpack::{self, MsgpackReader, MsgpackValue, MsgpackWriter};
use crate::wire::record::{Record as _, RecordFields, Shape, record};

const WHAT: &str = "push registration";

/// A decode side's blocks for a request, for the prefill side to write into: the map after
/// `PUSH_REG:`.
///
/// Only `request_id` is required. A prefill side needs the other fields too, and must check that
/// they are present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushRegistration {
    /// The request's id on the decode side.
    pub request_id: String,
    /// The decode side's engine id.
    pub decode_engine_id: Option<String>,
    /// The host of the decode side's side channel.
    pub decode_host: Option<String>,
    /// The port of the decode side's side channel.
    pub decode_port: Option<u16>,
    /// The decode side's tensor-parallel size.
    pub decode_tp_size: Option<u32>,
    /// The decode side's logical blocks, one list for each KV cache group.
    pub local_block_ids: Vec<Vec<u32>>,
    /// The prefill side's engine id, as the decode side received it.
    pub remote_engine_id: Option<String>,
    /// The host of the prefill side's side channel.
    pub remote_host: Option<String>,
    /// The port of the prefill side's side channel.
    pub remote_port: Option<u16>,
    /// The prefill side's tensor-parallel size.
    pub remote_tp_size: Option<u32>,
    /// The prefill side's pipeline-parallel size.
    pub remote_pp_size: Option<u32>,
    /// kvx only, ignored by vLLM: the grants for writes into the blocks, one for each worker of the
    /// decode side. Revoking a grant ends all writes for this request.
    pub kvx_grants: Vec<PushGrant>,
    /// kvx only: the number of times that the decode side has registered its memory anew. Data of
    /// earlier handshakes are outdated.
    pub kvx_registration: Option<u64>,
    shape: Shape,
}

/// The memory of one decode worker that the prefill side may write into for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushGrant {
    /// The worker's pipeline stage.
    pub pp: u32,
    /// The worker's tensor-parallel rank.
    pub tp: u32,
    /// One region descriptor of a kvx agent for each piece of memory that holds its caches.
    pub regions: Vec<Vec<u8>>,
}

impl PushGrant {
    /// The most grants that are read: one for each worker.
    pub const MAX: usize = crate::ids::MAX_RANKS as usize;
    /// The most regions of a worker that are read.
    pub const MAX_REGIONS: usize = 1024;

    pub(crate) fn read(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Self> {
        if reader.array(3)? != 3 {
            return Err(reader.malformed("a grant has three parts"));
        }
        let (pp, tp) = (reader.unsigned_32()?, reader.unsigned_32()?);
        let regions = Self::read_regions(reader)?;
        Ok(PushGrant { pp, tp, regions })
    }

    pub(crate) fn read_regions(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Vec<Vec<u8>>> {
        reader.list(Self::MAX_REGIONS, |reader| Ok(reader.binary()?.to_vec()))
    }
}

impl MsgpackValue for PushGrant {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.array(3);
        self.pp.write_to(writer);
        self.tp.write_to(writer);
        self.regions.write_to(writer);
    }
}

impl PushRegistration {
    /// The longest registration that is read, in bytes.
    pub const MAX_LEN: usize = 16 << 20;
    /// The most KV cache groups that are read.
    pub const MAX_GROUPS: usize = 1024;
    /// The most blocks of a group that are read.
    pub const MAX_BLOCKS: usize = 1 << 20;

    /// Creates a registration of these blocks, without addresses.
    pub fn new(request_id: impl Into<String>, local_block_ids: Vec<Vec<u32>>) -> Self {
        PushRegistration {
            request_id: request_id.into(),
            decode_engine_id: None,
            decode_host: None,
            decode_port: None,
            decode_tp_size: None,
            local_block_ids,
            remote_engine_id: None,
            remote_host: None,
            remote_port: None,
            remote_tp_size: None,
            remote_pp_size: None,
            kvx_grants: Vec::new(),
            kvx_registration: None,
            shape: Shape::default(),
        }
    }

    /// Returns unknown keys, with their values as msgpack.
    pub fn unknown(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.shape.unknown()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        self.encode_map()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let fields = RecordFields::read(WHAT, bytes, Self::MAX_LEN, Self::KEYS)?;
        let groups = |reader: &mut MsgpackReader<'_>| {
            reader.list(Self::MAX_GROUPS, |reader| {
                reader.list(Self::MAX_BLOCKS, MsgpackReader::unsigned_32)
            })
        };
        Ok(PushRegistration {
            request_id: fields.required("request_id", MsgpackReader::owned_text)?,
            decode_engine_id: fields.optional("decode_engine_id", MsgpackReader::owned_text)?,
            decode_host: fields.optional("decode_host", MsgpackReader::owned_text)?,
            decode_port: fields.optional("decode_port", MsgpackReader::port)?,
            decode_tp_size: fields.optional("decode_tp_size", MsgpackReader::size)?,
            local_block_ids: fields.or_default("local_block_ids", groups)?,
            remote_engine_id: fields.optional("remote_engine_id", MsgpackReader::owned_text)?,
            remote_host: fields.optional("remote_host", MsgpackReader::owned_text)?,
            remote_port: fields.optional("remote_port", MsgpackReader::port)?,
            remote_tp_size: fields.optional("remote_tp_size", MsgpackReader::size)?,
            remote_pp_size: fields.optional("remote_pp_size", MsgpackReader::size)?,
            kvx_grants: fields
                .or_default("kvx_grants", |reader| reader.list(PushGrant::MAX, PushGrant::read))?,
            kvx_registration: fields.optional("kvx_registration", MsgpackReader::unsigned)?,
            shape: fields.shape(),
        })
    }
}

record! {
    PushRegistration as registration:
    "request_id" => request_id,
    "decode_engine_id" => decode_engine_id or None,
    "decode_host" => decode_host or None,
    "decode_port" => decode_port or None,
    "decode_tp_size" => decode_tp_size or None,
    "local_block_ids" => local_block_ids,
    "remote_engine_id" => remote_engine_id or None,
    "remote_host" => remote_host or None,
    "remote_port" => remote_port or None,
    "remote_tp_size" => remote_tp_size or None,
    "remote_pp_size" => remote_pp_size or None,
    "kvx_grants" => kvx_grants or Vec::new(),
    "kvx_registration" => kvx_registration or None,
}
