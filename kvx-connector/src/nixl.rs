//! Access between a kvx agent and NIXL agents with the backend KVX, in both directions and without
//! a NIXL library here.
//!
//! A NIXL agent loads the bytes of [`blob`] in place of another NIXL agent's metadata. [`NixlPeer`]
//! connects to a NIXL agent with its metadata. Notifications up to 64 KiB arrive as they were sent,
//! on both sides. For longer ones, and for ones that start like a part of a longer one, see
//! [`notes`](kvx_vllm::wire::nixl::notes) and [`Assembly`](kvx_vllm::wire::nixl::Assembly).
//!
//! ```
//! # mod kvx { pub use {kvx_connector as connector, kvx_core::Op}; }
//! use kvx::connector::nixl::{self, NixlPeer};
//! # fn example(agent: kvx_core::Agent, cache: kvx_core::Region, theirs: &[u8]) -> kvx_core::Result<()> {
//! let ours: Vec<u8> = nixl::blob(&agent, [&cache])?; // theirs: agent.add_remote_agent(ours)
//! let peer = NixlPeer::connect(&agent, theirs)?; // theirs: agent.get_agent_metadata()
//! // 4 KiB from an address of the NIXL agent's into the first block here.
//! let plan = peer.plan(kvx::Op::Read, &cache, [(0, 0x7f00_0000_1000, 4096)])?;
//! peer.peer().transfer(&plan).notify(*b"request-7:1").post()?.wait_blocking(std::time::Duration::from_secs(5))?;
//! # Ok(())
//! # }
//! ```

use std::collections::BTreeMap;
use std::fmt;

use kvx_core::backend::{Generation, Metadata};
use kvx_core::{Agent, Error, ErrorKind, Op, Peer, PeerRegion, Place, Plan, Region, Result, Span};

use kvx_vllm::wire::nixl::{NixlBlob, NixlDescriptor, NixlMemory, NixlSection};

/// The name of kvx's backend in NIXL.
pub const BACKEND: &str = "KVX";

/// Returns the metadata of `agent` with these regions, for NIXL agents with the backend KVX.
///
/// NIXL agents know the regions by their addresses in this process, and device memory also by the
/// driver's device number. Call this again with all regions after registering more.
///
/// # Errors
/// - `Revoked`: a region was revoked.
/// - `Closed`: the agent was shut down.
/// - `Exhausted`: NIXL's format cannot hold that much.
pub fn blob<'a>(agent: &Agent, regions: impl IntoIterator<Item = &'a Region>) -> Result<Vec<u8>> {
    blob_with_leases(agent, regions, None)
}

/// Returns [`blob`] of an engine. With the region of its leases, NIXL agents confirm their reads.
pub(crate) fn blob_with_leases<'a>(
    agent: &Agent,
    regions: impl IntoIterator<Item = &'a Region>,
    leases: Option<&Region>,
) -> Result<Vec<u8>> {
    let (mut host, mut devices) = (Vec::new(), Vec::new());
    for region in regions {
        let memory = region.memory();
        let (address, len) = (memory.address(), memory.len() as u64);
        let access = memory.device_access();
        let device = access.map_or(0, |access| u64::from(access.ordinal()));
        let described = NixlDescriptor { device, address, len, key: region.metadata()? };
        if access.is_some() { &mut devices } else { &mut host }.push(described);
    }
    let section = |kind, mut memory: Vec<NixlDescriptor>| {
        memory.sort();
        NixlSection { backend: BACKEND.into(), kind, memory }
    };
    let sections = [section(NixlMemory::Dram, host), section(NixlMemory::Vram, devices)];
    let blob = NixlBlob {
        agent: agent.identity().name.to_string(),
        connections: vec![(BACKEND.into(), introduction_with(agent, leases)?)],
        sections: sections.into_iter().filter(|section| !section.memory.is_empty()).collect(),
    };
    blob.encode()
}

/// Returns the connection data of an agent, which does not change during the agent's life, as NIXL
/// requires.
///
/// # Errors
/// `Closed`: the agent was shut down.
pub fn introduction(agent: &Agent) -> Result<Vec<u8>> {
    introduction_with(agent, None)
}

fn introduction_with(agent: &Agent, leases: Option<&Region>) -> Result<Vec<u8>> {
    let mut metadata = Metadata::decode(&agent.metadata()?)?;
    metadata.regions.retain(|region| leases.is_some_and(|leases| leases.id() == region.id));
    if leases.is_none() {
        // A later region must not change these bytes. With a region in them, the generation stays:
        // caches that are registered again have another region, and a peer that knows an earlier
        // introduction takes a new one only if its generation is higher.
        metadata.generation = Generation(0);
    }
    metadata.encode()
}

/// A NIXL agent with the backend KVX, as a peer of a kvx agent.
pub struct NixlPeer {
    peer: Peer,
    /// The regions with their keys, by first address.
    regions: BTreeMap<u64, (Vec<u8>, PeerRegion)>,
}

impl NixlPeer {
    /// Connects to the agent that this metadata describes, as [`Agent::connect`] does.
    ///
    /// # Errors
    /// - `Malformed`: the metadata cannot be read.
    /// - `Incompatible`: the agent has no backend KVX, or one that has no protocol version in
    ///   common with this one.
    /// - `Closed`: `agent` was shut down.
    pub fn connect(agent: &Agent, blob: &[u8]) -> Result<Self> {
        let blob = NixlBlob::decode(blob)?;
        let Some((_, introduction)) =
            blob.connections.iter().find(|(backend, _)| backend == BACKEND)
        else {
            let backends: Vec<_> =
                blob.connections.iter().map(|(backend, _)| backend.as_str()).collect();
            return Err(incompatible(
                &blob.agent,
                format_args!(
                    "it has no backend KVX, but {}: create it there (in vLLM \"backends\": [\"KVX\"])",
                    if backends.is_empty() { "none".into() } else { backends.join(", ") }
                ),
            ));
        };
        let peer = agent.connect(introduction)?;
        if *peer.identity().name != *blob.agent {
            let other = &peer.identity().name;
            return Err(incompatible(
                &blob.agent,
                format_args!("its backend introduces itself as {other}"),
            ));
        }
        let mut made = NixlPeer { peer, regions: BTreeMap::new() };
        made.take(&blob)?;
        Ok(made)
    }

    /// Takes newer or partial metadata of the same agent, with memory that was registered since.
    /// Returns the number of new ranges.
    ///
    /// # Errors
    /// - `Malformed`: the metadata cannot be read.
    /// - `PeerRestarted`: it describes another incarnation of the agent.
    /// - `Invalid`: it describes another agent.
    pub fn update(&mut self, blob: &[u8]) -> Result<usize> {
        let blob = NixlBlob::decode(blob)?;
        if *blob.agent != *self.peer.identity().name {
            let why = format!(
                "the metadata is of agent {}, this is {}",
                blob.agent,
                self.peer.identity().name
            );
            return Err(ErrorKind::Invalid.because(why));
        }
        self.take(&blob)
    }

    /// Takes all ranges, or none if there is an error.
    fn take(&mut self, blob: &NixlBlob) -> Result<usize> {
        // An address of a process belongs to one memory, of the host or of a device.
        let is_memory = |kind| matches!(kind, NixlMemory::Dram | NixlMemory::Vram);
        let ours = |section: &&NixlSection| section.backend == BACKEND && is_memory(section.kind);
        let mut learnt = Vec::new();
        for range in blob.sections.iter().filter(ours).flat_map(|section| &section.memory) {
            if self.regions.get(&range.address).is_some_and(|(key, _)| *key == range.key) {
                continue;
            }
            let region = self.peer.import_region(&range.key)?;
            if region.len() != range.len || range.address.checked_add(range.len).is_none() {
                return Err(ErrorKind::Malformed.because(format!(
                    "agent {} lists {} bytes at {:#x}, but its KVX metadata lists {}",
                    blob.agent,
                    range.len,
                    range.address,
                    region.len()
                )));
            }
            learnt.push((range, region));
        }
        let new = learnt.len();
        for (range, region) in learnt {
            if let Some((_, old)) = self.regions.insert(range.address, (range.key.clone(), region))
            {
                self.peer.forget(&old);
            }
        }
        Ok(new)
    }

    /// Returns the peer, for transfers, notifications and its route.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Returns whether this metadata belongs to a NIXL agent with the backend KVX.
    pub fn is_offered(blob: &[u8]) -> bool {
        let offers =
            |blob: NixlBlob| blob.connections.iter().any(|(backend, _)| backend == BACKEND);
        NixlBlob::decode(blob).is_ok_and(offers)
    }

    /// Yields the regions with their first addresses at the agent.
    pub fn regions(&self) -> impl Iterator<Item = (u64, &PeerRegion)> {
        self.regions.iter().map(|(address, (_, region))| (*address, region))
    }

    /// Returns the region that holds these bytes of the agent's memory, and their offset in it.
    ///
    /// # Errors
    /// `Unregistered`: the agent has not registered these bytes.
    pub fn place(&self, address: u64, len: u64) -> Result<(PeerRegion, u64)> {
        // Ranges may overlap, so the nearest one that starts before the address need not be long
        // enough.
        let before = self.regions.range(..=address).rev();
        let mut holding = before.filter(|(base, (_, region))| {
            let offset = address - *base;
            offset.checked_add(len).is_some_and(|end| end <= region.len())
        });
        match holding.next() {
            Some((base, (_, region))) => Ok((region.clone(), address - base)),
            None => Err(ErrorKind::Unregistered.because(format!(
                "agent {} has registered no {len} bytes at {address:#x}: if it has since, update \
                 the peer with its newer metadata",
                self.peer.identity().name
            ))),
        }
    }

    /// Returns a plan over pieces of any length, each with its offset in `local`, its address at
    /// the agent, and its length.
    ///
    /// # Errors
    /// Those of [`place`](NixlPeer::place) and [`Plan::of_spans`].
    pub fn plan(
        &self,
        op: Op,
        local: &Region,
        pieces: impl IntoIterator<Item = (u64, u64, u64)>,
    ) -> Result<Plan> {
        let mut lists: Vec<(Region, PeerRegion, Vec<Span>)> = Vec::new();
        for (offset, address, len) in pieces {
            let (region, remote) = self.place(address, len)?;
            let span = Span { local: offset, remote, len };
            match lists.iter_mut().find(|(_, known, _)| known.id() == region.id()) {
                Some((_, _, spans)) => spans.push(span),
                None => lists.push((local.clone(), region, vec![span])),
            }
        }
        Plan::of_spans(op, lists)
    }
}

impl fmt::Debug for NixlPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NixlPeer({:?}, {} regions)", self.peer, self.regions.len())
    }
}

fn incompatible(agent: &str, why: impl fmt::Display) -> Error {
    ErrorKind::Incompatible.because(format!("NIXL agent {agent} cannot be reached: {why}"))
}
