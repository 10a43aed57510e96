//! The decode side's request for blocks, with the description of its memory.

use std::collections::BTreeMap;

use kvx_core::Result;

use crate::msgpack::{self, MsgpackReader, MsgpackValue, MsgpackWriter};
use crate::wire::PushGrant;
use crate::wire::record::{Record as _, RecordFields, Shape, record};

const WHAT: &str = "pull request";

/// A request whose blocks the decode side asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulledRequest {
    /// The request's id on the decode side. Answers use it.
    pub request_id: String,
    /// The id of the request that both sides know.
    pub transfer_id: String,
    /// The decode side's blocks, one list for each KV cache group. Without blocks, the prefill side
    /// releases its own.
    pub block_ids: Vec<Vec<u32>>,
}

/// `MooncakeXferMetadata`: a decode worker's request to a prefill worker to write blocks into its
/// memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequest {
    /// The host of the decode worker's Mooncake engine.
    pub remote_hostname: String,
    /// The port of the decode worker's Mooncake engine.
    pub remote_port: u16,
    /// The decode side's tensor-parallel size.
    pub remote_tp_size: u32,
    /// The decode worker's tensor-parallel rank.
    pub remote_tp_rank: u32,
    /// The requested blocks.
    pub req_blocks: Vec<PulledRequest>,
    /// The start of each region. This list and the following ones, up to the row offsets, are the
    /// layout. They are empty once the other side has it.
    pub kv_caches_base_addr: Vec<u64>,
    /// The bytes from one block to the next, for each region.
    pub block_lens: Vec<u64>,
    /// The bytes of a block, for each region.
    pub kv_block_lens: Vec<u64>,
    /// The layer of each region.
    pub registered_layer_names: Vec<String>,
    /// The occurrence of each layer's name, for names that occur several times.
    pub registered_layer_indices: Vec<i64>,
    /// The KV cache group of each region.
    pub registered_group_indices: Vec<i64>,
    /// The groups that share each region.
    pub registered_shared_group_ids: Vec<Vec<i64>>,
    /// The bytes from the start of its row to each region's view; -1 if unknown.
    pub registered_row_offsets: Vec<i64>,
    /// The decode side's pipeline-parallel size.
    pub remote_pp_size: u32,
    /// The id of the layout; 0 if every request contains the layout.
    pub layout_id: u64,
    /// The kvx agent metadata to access the requesting worker's memory. Part of the layout; kvx
    /// only.
    pub kvx_metadata: Option<Vec<u8>>,
    /// The number of tokens in a logical block of the requesting worker. Part of the layout; kvx
    /// only.
    pub kvx_block_size: Option<u32>,
    /// The engine that the request is for. kvx only: a new engine at the address of a former one
    /// rejects the request at once.
    pub kvx_engine_id: Option<String>,
    /// The grants for each request of `req_blocks`: region descriptors of the requesting worker's
    /// kvx agent. Revoking a grant ends all writes for that request. kvx only.
    pub kvx_grants: BTreeMap<String, Vec<Vec<u8>>>,
    shape: Shape,
}

impl PullRequest {
    /// The longest request that is read, in bytes.
    pub const MAX_LEN: usize = 16 << 20;
    /// The most regions, requests, or KV cache groups that are read.
    pub const MAX_ITEMS: usize = 1 << 16;
    /// The most blocks of a group that are read.
    pub const MAX_BLOCKS: usize = 1 << 20;

    /// Creates a request from this worker, without blocks.
    pub fn new(
        remote_hostname: impl Into<String>,
        remote_port: u16,
        remote_tp_size: u32,
        remote_tp_rank: u32,
    ) -> Self {
        PullRequest {
            remote_hostname: remote_hostname.into(),
            remote_port,
            remote_tp_size,
            remote_tp_rank,
            req_blocks: Vec::new(),
            kv_caches_base_addr: Vec::new(),
            block_lens: Vec::new(),
            kv_block_lens: Vec::new(),
            registered_layer_names: Vec::new(),
            registered_layer_indices: Vec::new(),
            registered_group_indices: Vec::new(),
            registered_shared_group_ids: Vec::new(),
            registered_row_offsets: Vec::new(),
            remote_pp_size: 1,
            layout_id: 0,
            kvx_metadata: None,
            kvx_block_size: None,
            kvx_engine_id: None,
            kvx_grants: BTreeMap::new(),
            shape: Shape::default(),
        }
    }

    /// Removes the layout: the other side knows it by its id.
    #[doc(hidden)]
    pub fn forget_layout(&mut self) {
        for addresses in
            [&mut self.kv_caches_base_addr, &mut self.block_lens, &mut self.kv_block_lens]
        {
            addresses.clear();
        }
        for indices in [
            &mut self.registered_layer_indices,
            &mut self.registered_group_indices,
            &mut self.registered_row_offsets,
        ] {
            indices.clear();
        }
        self.registered_layer_names.clear();
        self.registered_shared_group_ids.clear();
        self.kvx_metadata = None;
        self.kvx_block_size = None;
    }

    /// Returns only the description of the requesting worker and its layout.
    pub(crate) fn of_worker(&self) -> Self {
        PullRequest {
            req_blocks: Vec::new(),
            layout_id: 0,
            kvx_engine_id: None,
            kvx_grants: BTreeMap::new(),
            shape: Shape::default(),
            ..self.clone()
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_map()
    }

    /// Decodes a message. Does not check that its lists match each other.
    ///
    /// # Errors
    ///
    /// Malformed bytes, or lists and texts that take more than 64 MiB of memory; the error names a
    /// missing key.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let fields = RecordFields::read(WHAT, bytes, Self::MAX_LEN, Self::KEYS)?;
        let addresses =
            |reader: &mut MsgpackReader<'_>| reader.list(Self::MAX_ITEMS, MsgpackReader::unsigned);
        let indices =
            |reader: &mut MsgpackReader<'_>| reader.list(Self::MAX_ITEMS, MsgpackReader::signed);
        let names = |reader: &mut MsgpackReader<'_>| {
            reader.list(Self::MAX_ITEMS, MsgpackReader::owned_text)
        };
        let shared = |reader: &mut MsgpackReader<'_>| reader.list(Self::MAX_ITEMS, indices);
        Ok(PullRequest {
            remote_hostname: fields.required("remote_hostname", MsgpackReader::owned_text)?,
            remote_port: fields.required("remote_port", MsgpackReader::port)?,
            remote_tp_size: fields.required("remote_tp_size", MsgpackReader::size)?,
            remote_tp_rank: fields.required("remote_tp_rank", MsgpackReader::unsigned_32)?,
            req_blocks: fields.required("req_blocks", pulled)?,
            kv_caches_base_addr: fields.required("kv_caches_base_addr", addresses)?,
            block_lens: fields.required("block_lens", addresses)?,
            kv_block_lens: fields.required("kv_block_lens", addresses)?,
            registered_layer_names: fields.or_default("registered_layer_names", names)?,
            registered_layer_indices: fields.or_default("registered_layer_indices", indices)?,
            registered_group_indices: fields.or_default("registered_group_indices", indices)?,
            registered_shared_group_ids: fields
                .or_default("registered_shared_group_ids", shared)?,
            registered_row_offsets: fields.or_default("registered_row_offsets", indices)?,
            remote_pp_size: fields.optional("remote_pp_size", MsgpackReader::size)?.unwrap_or(1),
            layout_id: fields.or_default("layout_id", MsgpackReader::unsigned)?,
            kvx_metadata: fields.nullable("kvx_metadata", MsgpackReader::owned_binary)?,
            kvx_block_size: fields.nullable("kvx_block_size", MsgpackReader::size)?,
            kvx_engine_id: fields.nullable("kvx_engine_id", MsgpackReader::owned_text)?,
            kvx_grants: fields.or_default("kvx_grants", grants)?,
            shape: fields.shape(),
        })
    }
}

fn pulled(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Vec<PulledRequest>> {
    let count = reader.map(PullRequest::MAX_ITEMS)?;
    reader.keep::<PulledRequest>(count)?;
    let mut requests = Vec::with_capacity(count);
    for _ in 0..count {
        let request_id = reader.owned_text()?;
        let (transfer_id, block_ids) = reader.pair(MsgpackReader::owned_text, |reader| {
            reader.list(PullRequest::MAX_ITEMS, |reader| {
                reader.list(PullRequest::MAX_BLOCKS, MsgpackReader::unsigned_32)
            })
        })?;
        requests.push(PulledRequest { request_id, transfer_id, block_ids });
    }
    Ok(requests)
}

fn grants(reader: &mut MsgpackReader<'_>) -> msgpack::Result<BTreeMap<String, Vec<Vec<u8>>>> {
    let regions = |reader: &mut MsgpackReader<'_>| {
        reader.list(PushGrant::MAX_REGIONS, MsgpackReader::owned_binary)
    };
    let count = reader.map(PullRequest::MAX_ITEMS)?;
    reader.keep::<(String, Vec<Vec<u8>>)>(count)?;
    (0..count).map(|_| Ok((reader.owned_text()?, regions(reader)?))).collect()
}

record! {
    PullRequest as request:
    "remote_hostname" => remote_hostname,
    "remote_port" => remote_port,
    "remote_tp_size" => remote_tp_size,
    "remote_tp_rank" => remote_tp_rank,
    "req_blocks" => req_blocks,
    "kv_caches_base_addr" => kv_caches_base_addr,
    "block_lens" => block_lens,
    "kv_block_lens" => kv_block_lens,
    "registered_layer_names" => registered_layer_names or Vec::new(),
    "registered_layer_indices" => registered_layer_indices or Vec::new(),
    "registered_group_indices" => registered_group_indices or Vec::new(),
    "registered_shared_group_ids" => registered_shared_group_ids or Vec::new(),
    "registered_row_offsets" => registered_row_offsets or Vec::new(),
    "remote_pp_size" => remote_pp_size or 1,
    "layout_id" => layout_id or 0,
    "kvx_metadata" => kvx_metadata or None,
    "kvx_block_size" => kvx_block_size or None,
    "kvx_engine_id" => kvx_engine_id or None,
    "kvx_grants" => kvx_grants or BTreeMap::new(),
}

impl MsgpackValue for Vec<PulledRequest> {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.map(self.len());
        for request in self {
            writer.text(&request.request_id);
            writer.array(2);
            writer.text(&request.transfer_id);
            request.block_ids.write_to(writer);
        }
    }
}
