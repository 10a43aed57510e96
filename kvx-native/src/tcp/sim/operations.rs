//! The operations of a simulation, and the memory that they use.

use std::sync::Arc;
use std::time::Instant;

use kvx_core::backend::{
    BoundPlan, LinkId, LocalRegion as _, LocalSide, Pair, PlacedGrid, RegionKey, RegionSpec,
    RemoteSide,
};
use kvx_core::{ErrorKind, Grid, Indices, Memory, Op, RegionId, TransferId};
use kvx_testkit::Random;

use super::agent::{Agent, Outcome};
use crate::tcp::memory::regions::TcpRemote;
use crate::tcp::region::TcpRegion;

/// The number of blocks of each region.
pub(super) const BLOCKS: u32 = 32;
/// The multipliers of the block orders at this end and at the peer.
const ORDERS: [u32; 2] = [3, 5];
/// The filler of memory that must not be touched any more. No block contains it.
pub(super) const POISON: u8 = 0xee;

/// A registered region, and its expected content.
pub(super) struct Place {
    pub(super) region: Arc<TcpRegion>,
    pub(super) memory: Arc<Memory>,
    id: RegionId,
    key: RegionKey,
    pub(super) content: Vec<u8>,
    /// The pending revocation.
    pub(super) revoked: Option<Outcome>,
}

impl Place {
    /// Registers a region of blocks of this size, with random content.
    pub(super) fn new(agent: &Agent, id: u64, block: usize, random: &mut Random) -> Self {
        let content = content(block, random);
        let memory = Arc::new(Memory::owned(content.clone()));
        let (id, key) = (RegionId(id), RegionKey([id as u8; 16]));
        let region = agent.register(RegionSpec { id, key, memory: Arc::clone(&memory) });
        Place { region, memory, id, key, content, revoked: None }
    }

    pub(super) fn set(&mut self, content: Vec<u8>) {
        self.memory.copy_in(0, &content).expect("the lengths are equal");
        self.content = content;
    }

    pub(super) fn poison(&mut self) {
        self.set(vec![POISON; self.content.len()]);
    }

    pub(super) fn look(&self) -> Vec<u8> {
        let mut content = vec![0; self.memory.len()];
        self.memory.copy_out(0, &mut content).expect("the lengths are equal");
        content
    }

    pub(super) fn check(&self, whose: &str) {
        assert!(self.look() == self.content, "{whose}: a write to memory that must not be touched");
    }

    /// Begins the revocation.
    pub(super) fn revoke(&mut self) {
        let (done, outcome) = Outcome::new();
        self.revoked = Some(outcome);
        self.region.revoke(done);
    }
}

/// The role of a region in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum PlaceRole {
    Local,
    Source,
    Sink,
}

impl PlaceRole {
    pub(super) const ALL: [PlaceRole; 3] = [PlaceRole::Local, PlaceRole::Source, PlaceRole::Sink];

    /// Returns the peer's region that a transfer uses.
    pub(super) fn of_peer(op: Op) -> Self {
        if op == Op::Read { PlaceRole::Source } else { PlaceRole::Sink }
    }
}

/// Returns random blocks of this size.
pub(super) fn content(block: usize, random: &mut Random) -> Vec<u8> {
    let mut content = Vec::with_capacity(block * BLOCKS as usize);
    for _ in 0..BLOCKS {
        content.resize(content.len() + block, 1 + random.below(usize::from(POISON) - 1) as u8);
    }
    content
}

/// A transfer in progress.
pub(super) struct Posted {
    pub(super) id: TransferId,
    pub(super) link: LinkId,
    pub(super) op: Op,
    pub(super) is_list: bool,
    pub(super) outcome: Outcome,
    /// The content of the source.
    pub(super) from: Vec<u8>,
    /// The time at which core cancels it.
    pub(super) deadline: Instant,
    pub(super) is_cancelled: bool,
    /// The error kinds with which it may end.
    pub(super) ends_by: Vec<ErrorKind>,
    /// True if its target was replaced.
    pub(super) is_orphan: bool,
}

/// Memory between which an agent's transfers move, one at a time: from the peer's source to its
/// local memory, or from there to the peer's sink.
pub(super) struct Slot {
    /// The number of the agent whose transfers these are.
    pub(super) of: usize,
    pub(super) block: usize,
    pub(super) local: Place,
    pub(super) source: Place,
    pub(super) sink: Place,
    pub(super) posted: Option<Posted>,
}

impl Slot {
    pub(super) fn plan(&self, link: LinkId, op: Op, is_list: bool) -> BoundPlan {
        let remote = if op == Op::Read { &self.source } else { &self.sink };
        let grid = Grid::packed(self.block as u64, BLOCKS);
        let grids = || -> Arc<[PlacedGrid]> { Arc::from([PlacedGrid { region: 0, grid }]) };
        let [local_indices, remote_indices] = ORDERS.map(|by| indices(is_list, by));
        let pair = Pair { local: grids(), remote: grids(), local_indices, remote_indices };
        let local = LocalSide {
            id: self.local.id,
            key: self.local.key,
            memory: Arc::clone(&self.local.memory),
            region: Arc::clone(&self.local.region) as _,
        };
        let remote = RemoteSide {
            id: remote.id,
            key: remote.key,
            len: remote.memory.len() as u64,
            region: Arc::new(TcpRemote { stage: 0 }),
        };
        kvx_core::fuzz::bound(op, link, pair, local, remote)
    }

    pub(super) fn place(&mut self, which: PlaceRole) -> &mut Place {
        match which {
            PlaceRole::Local => &mut self.local,
            PlaceRole::Source => &mut self.source,
            PlaceRole::Sink => &mut self.sink,
        }
    }

    /// Returns the memory that a transfer writes.
    pub(super) fn target(&mut self, op: Op) -> &mut Place {
        if op == Op::Read { &mut self.local } else { &mut self.sink }
    }
}

fn indices(is_list: bool, by: u32) -> Indices {
    match is_list {
        false => (0..BLOCKS).into(),
        true => (0..BLOCKS - 8).map(|index| index * by % BLOCKS).collect::<Vec<_>>().into(),
    }
}

/// Returns the content of a target after a transfer from `from`.
pub(super) fn moved(posted: &Posted, block: usize, mut target: Vec<u8>) -> Vec<u8> {
    let [local, remote] = ORDERS.map(|by| indices(posted.is_list, by));
    let [to, from] = if posted.op == Op::Read { [local, remote] } else { [remote, local] };
    for number in 0..to.len() {
        let [to, from] = [&to, &from].map(|order| order.at(number) as usize * block);
        target[to..to + block].copy_from_slice(&posted.from[from..from + block]);
    }
    target
}

/// A notification in progress.
pub(super) struct SentNotice {
    pub(super) of: usize,
    pub(super) number: u64,
    pub(super) link: LinkId,
    pub(super) outcome: Outcome,
    pub(super) ends_by: Vec<ErrorKind>,
    /// True if its receiver was restarted.
    pub(super) is_orphan: bool,
}
