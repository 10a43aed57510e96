//! The inner part of a handshake's answer: the memory of one worker.

use kvx_core::{ErrorKind, Result};

use crate::Version;
use crate::msgpack::{self, MsgpackReader, MsgpackValue, MsgpackWriter};
use crate::wire::record::{Record as _, RecordFields, Shape, record};

const WHAT: &str = "agent metadata";
/// The key of kvx's metadata for other kvx agents. vLLM ignores it.
const KVX_METADATA: &str = "kvx_metadata";
const KERNEL_PER_LOGICAL: &str = "physical_blocks_per_logical_kv_block";

/// A layer that shares a region with others: its part of each block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedMember {
    /// The layer's name.
    pub layer: String,
    /// The bytes from the start of the region's block.
    pub offset: u64,
    /// The bytes of the layer in each block.
    pub len: u64,
}

/// One worker's description of its memory for its peers: `NixlAgentMetadata` of vLLM 0.16 to 0.33.
///
/// A decoded message encodes to the same bytes: the order of keys, omitted keys and unknown keys
/// survive. A new message has the keys of its version.
///
/// ```
/// # mod kvx { pub mod connector { pub use kvx_vllm::{Version, wire::NixlAgentMetadata}; } }
/// use kvx::connector::{NixlAgentMetadata, Version};
/// let mut metadata = NixlAgentMetadata::new("prefill-0", Version::V0_33);
/// metadata.kv_caches_base_addr = vec![0x7f00_0000_0000];
/// metadata.block_lens = vec![4096];
/// metadata.block_strides = vec![4096];
/// metadata.num_blocks = 4;
/// metadata.kvx_metadata = Some(b"what kvx::Agent::metadata gives".to_vec());
/// let bytes = metadata.encode();
/// assert_eq!(NixlAgentMetadata::decode(&bytes, Version::V0_33)?, metadata);
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NixlAgentMetadata {
    /// The engine that this worker belongs to.
    pub engine_id: String,
    /// NIXL's description of the agent, opaque to kvx.
    pub agent_metadata: Vec<u8>,
    /// The start of each region. The lists "for each region" have the same length and order.
    pub kv_caches_base_addr: Vec<u64>,
    /// The device of the addresses.
    pub device_id: u64,
    /// The number of kernel blocks in each region.
    pub num_blocks: u64,
    /// The bytes of a block, for each region.
    pub block_lens: Vec<u64>,
    /// The bytes from one block to the next, for each region. Before vLLM 0.29 they equal the
    /// lengths.
    pub block_strides: Vec<u64>,
    /// The order of dimensions in memory: `LBHNC`, or `HND` and `NHD` in older versions.
    pub kv_cache_layout: String,
    /// The number of tokens in a kernel block.
    pub block_size: u64,
    /// The bytes of the convolution state and of the temporal state of a Mamba layer; zeros without
    /// such layers.
    pub ssm_sizes: (u64, u64),
    /// The attention implementation, which decides the internal layout of a block.
    pub attn_backend_name: String,
    /// The number of kernel blocks in a logical block.
    pub physical_blocks_per_logical_kv_block: u32,
    /// The number of blocks, for each region, if they differ.
    pub region_num_blocks: Option<Vec<u64>>,
    /// The KV cache group, for each region; -1 if groups share it.
    pub region_group_ids: Option<Vec<i64>>,
    /// The first layer, for each region.
    pub region_names: Option<Vec<String>>,
    /// `VRAM` or `DRAM`, for each region.
    pub region_mem_types: Option<Vec<String>>,
    /// The decode-context-parallel size.
    pub dcp_size: u32,
    /// The prefill-context-parallel size.
    pub pcp_size: u32,
    /// The bytes of a page of a model's extra embedding state, if it has one.
    pub ple_block_len: Option<u64>,
    /// The layers that share a region, for each region; or empty.
    pub region_members: Vec<Vec<String>>,
    /// Layers that are adjacent in the blocks of their region.
    pub packed_member_layouts: Vec<PackedMember>,
    /// kvx's own metadata, for agents that use it instead of NIXL's.
    pub kvx_metadata: Option<Vec<u8>>,
    shape: Shape,
}

impl NixlAgentMetadata {
    /// The longest metadata that is read, in bytes.
    pub const MAX_LEN: usize = 16 << 20;
    /// The most regions that are read.
    pub const MAX_REGIONS: usize = 1 << 16;

    /// Creates metadata without regions and with default values, with the keys of `version`.
    pub fn new(engine_id: impl Into<String>, version: Version) -> Self {
        NixlAgentMetadata {
            engine_id: engine_id.into(),
            agent_metadata: Vec::new(),
            kv_caches_base_addr: Vec::new(),
            device_id: 0,
            num_blocks: 0,
            block_lens: Vec::new(),
            block_strides: Vec::new(),
            kv_cache_layout: String::new(),
            block_size: 0,
            ssm_sizes: (0, 0),
            attn_backend_name: String::new(),
            physical_blocks_per_logical_kv_block: 1,
            region_num_blocks: None,
            region_group_ids: None,
            region_names: None,
            region_mem_types: None,
            dcp_size: 1,
            pcp_size: 1,
            ple_block_len: None,
            region_members: Vec::new(),
            packed_member_layouts: Vec::new(),
            kvx_metadata: None,
            shape: Shape::of(written(version)),
        }
    }

    /// Returns unknown keys, with their values as msgpack.
    pub fn unknown(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.shape.unknown()
    }

    /// Encodes the message. A decoded and unchanged message encodes to the same bytes.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_map()
    }

    /// Decodes the metadata of a worker of a `version` engine.
    ///
    /// # Errors
    ///
    /// Malformed bytes, more regions than [`MAX_REGIONS`](Self::MAX_REGIONS), lists and texts that
    /// take more than 64 MiB of memory, or the absence of a key that this version always writes,
    /// which the error names.
    pub fn decode(bytes: &[u8], version: Version) -> Result<Self> {
        let fields = RecordFields::read(WHAT, bytes, Self::MAX_LEN, Self::KEYS)?;
        let addresses = |reader: &mut MsgpackReader<'_>| {
            reader.list(Self::MAX_REGIONS, MsgpackReader::unsigned)
        };
        let names = |reader: &mut MsgpackReader<'_>| {
            reader.list(Self::MAX_REGIONS, MsgpackReader::owned_text)
        };
        let always = |key: &str| since(key).is_some_and(|first| version.speaks(first));
        let block_lens = fields.required("block_lens", addresses)?;
        Ok(NixlAgentMetadata {
            engine_id: fields.required("engine_id", MsgpackReader::owned_text)?,
            agent_metadata: fields.required("agent_metadata", MsgpackReader::binary)?.to_owned(),
            kv_caches_base_addr: fields.required("kv_caches_base_addr", addresses)?,
            device_id: fields.required("device_id", MsgpackReader::unsigned)?,
            num_blocks: fields.required("num_blocks", MsgpackReader::unsigned)?,
            block_strides: fields
                .required_if(always("block_strides"), "block_strides", addresses)?
                .unwrap_or_else(|| block_lens.clone()),
            block_lens,
            kv_cache_layout: fields.required("kv_cache_layout", MsgpackReader::owned_text)?,
            block_size: fields.required("block_size", MsgpackReader::unsigned)?,
            ssm_sizes: fields
                .required_if(always("ssm_sizes"), "ssm_sizes", |reader| {
                    reader.pair(MsgpackReader::unsigned, MsgpackReader::unsigned)
                })?
                .unwrap_or_default(),
            attn_backend_name: fields
                .required_if(
                    always("attn_backend_name"),
                    "attn_backend_name",
                    MsgpackReader::owned_text,
                )?
                .unwrap_or_default(),
            physical_blocks_per_logical_kv_block: fields
                .required_if(always(KERNEL_PER_LOGICAL), KERNEL_PER_LOGICAL, MsgpackReader::size)?
                .unwrap_or(1),
            region_num_blocks: fields.nullable("region_num_blocks", addresses)?,
            region_group_ids: fields.nullable("region_group_ids", |reader| {
                reader.list(Self::MAX_REGIONS, MsgpackReader::signed)
            })?,
            region_names: fields.nullable("region_names", names)?,
            region_mem_types: fields.nullable("region_mem_types", names)?,
            dcp_size: fields.optional("dcp_size", MsgpackReader::size)?.unwrap_or(1),
            pcp_size: fields.optional("pcp_size", MsgpackReader::size)?.unwrap_or(1),
            ple_block_len: fields.nullable("ple_block_len", MsgpackReader::unsigned)?,
            region_members: fields
                .or_default("region_members", |reader| reader.list(Self::MAX_REGIONS, names))?,
            packed_member_layouts: fields.or_default("packed_member_layouts", packed_members)?,
            kvx_metadata: fields.nullable(KVX_METADATA, MsgpackReader::owned_binary)?,
            shape: fields.shape(),
        })
    }

    /// Returns the number of regions.
    pub fn regions(&self) -> usize {
        self.kv_caches_base_addr.len()
    }

    /// Returns the number of blocks in a region.
    pub fn blocks_of(&self, region: usize) -> Option<u64> {
        match &self.region_num_blocks {
            Some(counts) => counts.get(region).copied(),
            None => (region < self.regions()).then_some(self.num_blocks),
        }
    }

    /// Checks that the lists match each other and every block is in the address space, so that
    /// addresses can be computed.
    ///
    /// # Errors
    ///
    /// The list or the region at fault.
    pub fn check_regions(&self) -> Result<()> {
        let regions = self.regions();
        let bad = |why: String| {
            Err(ErrorKind::Malformed
                .because(format!("malformed {WHAT} of {}: {why}", self.engine_id)))
        };
        let lists = [
            ("block_lens", Some(self.block_lens.len())),
            ("block_strides", Some(self.block_strides.len())),
            ("region_num_blocks", self.region_num_blocks.as_ref().map(Vec::len)),
            ("region_group_ids", self.region_group_ids.as_ref().map(Vec::len)),
            ("region_names", self.region_names.as_ref().map(Vec::len)),
            ("region_mem_types", self.region_mem_types.as_ref().map(Vec::len)),
            ("region_members", Some(self.region_members.len()).filter(|len| *len > 0)),
        ];
        if let Some((key, len)) = lists
            .iter()
            .find_map(|(key, len)| len.filter(|len| *len != regions).map(|len| (key, len)))
        {
            return bad(format!("{key} has {len} items for {regions} regions"));
        }
        if self.block_size == 0 {
            return bad("block_size is 0".to_owned());
        }
        let spans = self
            .kv_caches_base_addr
            .iter()
            .zip(&self.block_lens)
            .zip(&self.block_strides)
            .enumerate();
        for (region, ((base, len), stride)) in spans {
            let blocks = self.blocks_of(region).unwrap_or(0);
            let end = stride
                .checked_mul(blocks.saturating_sub(1))
                .and_then(|last| base.checked_add(last)?.checked_add(*len));
            if end.is_none() {
                return bad(format!(
                    "region {region} of {blocks} blocks ends beyond the address space"
                ));
            }
        }
        match self
            .packed_member_layouts
            .iter()
            .find(|member| member.offset.checked_add(member.len).is_none())
        {
            Some(member) => bad(format!("{} ends beyond its block", member.layer)),
            None => Ok(()),
        }
    }
}

fn packed_members(reader: &mut MsgpackReader<'_>) -> msgpack::Result<Vec<PackedMember>> {
    let count = reader.map(NixlAgentMetadata::MAX_REGIONS)?;
    reader.keep::<PackedMember>(count)?;
    let mut members = Vec::with_capacity(count);
    for _ in 0..count {
        let layer = reader.owned_text()?;
        let (offset, len) = reader.pair(MsgpackReader::unsigned, MsgpackReader::unsigned)?;
        members.push(PackedMember { layer, offset, len });
    }
    Ok(members)
}

/// Returns the first version whose workers write a key; `None` if vLLM never writes it.
fn since(key: &str) -> Option<Version> {
    Some(match key {
        "ssm_sizes" | "attn_backend_name" => Version::V0_20,
        KERNEL_PER_LOGICAL => Version::V0_21,
        "block_strides" | "dcp_size" | "pcp_size" => Version::V0_29,
        "region_num_blocks" | "region_group_ids" | "region_names" | "region_mem_types" => {
            Version::V0_30
        }
        "region_members" | "packed_member_layouts" => Version::V0_31,
        "ple_block_len" => Version::V0_32,
        KVX_METADATA => return None,
        _ => Version::V0_16,
    })
}

/// Returns the keys that workers of this version write, in their order.
fn written(version: Version) -> impl Iterator<Item = &'static str> {
    let keys = NixlAgentMetadata::KEYS.iter().copied();
    keys.filter(move |key| since(key).is_some_and(|first| version.speaks(first)))
}

record! {
    NixlAgentMetadata as metadata:
    "engine_id" => engine_id,
    "agent_metadata" => agent_metadata,
    "kv_caches_base_addr" => kv_caches_base_addr,
    "device_id" => device_id,
    "num_blocks" => num_blocks,
    "block_lens" => block_lens,
    "block_strides" => block_strides or metadata.block_lens,
    "kv_cache_layout" => kv_cache_layout,
    "block_size" => block_size,
    "ssm_sizes" => ssm_sizes or (0, 0),
    "attn_backend_name" => attn_backend_name or String::new(),
    KERNEL_PER_LOGICAL => physical_blocks_per_logical_kv_block or 1,
    "region_num_blocks" => region_num_blocks or None,
    "region_group_ids" => region_group_ids or None,
    "region_names" => region_names or None,
    "region_mem_types" => region_mem_types or None,
    "dcp_size" => dcp_size or 1,
    "pcp_size" => pcp_size or 1,
    "ple_block_len" => ple_block_len or None,
    "region_members" => region_members or Vec::new(),
    "packed_member_layouts" => packed_member_layouts or Vec::new(),
    KVX_METADATA => kvx_metadata or None,
}

impl MsgpackValue for Vec<PackedMember> {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.map(self.len());
        for member in self {
            writer.text(&member.layer);
            (member.offset, member.len).write_to(writer);
        }
    }
}
