//! Two agents over TCP, for the tests of this crate.
#![allow(dead_code, reason = "each program uses a part of it")]

pub(crate) mod raw;
pub(crate) mod relay;

use std::time::Duration;

use kvx_core::{Agent, Grid, Memory, Options, Peer, Plan, Region, Registry, Secret};
use kvx_native::Tcp;

/// The time limit for each step, which is exceeded only by a hang.
pub(crate) const CUT_OFF: Duration = Duration::from_secs(10);

pub(crate) fn registry() -> Registry {
    let mut registry = Registry::new();
    registry.add(Tcp).unwrap();
    registry
}

pub(crate) fn agent(name: &str) -> Agent {
    Agent::builder(name).registry(registry()).build().unwrap()
}

pub(crate) fn agent_with(name: &str, options: &str, secret: Option<u8>) -> Agent {
    let mut builder = Agent::builder(name).options(Options::parse(options).unwrap());
    if let Some(secret) = secret {
        builder = builder.secret(Secret::from_bytes([secret; 32]));
    }
    builder.registry(registry()).build().unwrap()
}

/// Returns bytes that differ from place to place.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        bytes.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Returns a permutation of `0..count`.
pub(crate) fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut list: Vec<u32> = (0..count).collect();
    let mut state = seed | 1;
    for at in (1..list.len()).rev() {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        list.swap(at, (state >> 33) as usize % (at + 1));
    }
    list
}

/// An owner with a region `kv` and a reader that is connected to it.
pub(crate) struct Pair {
    pub(crate) owner: Agent,
    pub(crate) theirs: Region,
    pub(crate) reader: Agent,
    pub(crate) ours: Region,
    pub(crate) peer: Peer,
    pub(crate) bytes: Vec<u8>,
}

impl Pair {
    pub(crate) fn new(len: usize) -> Self {
        Self::of(agent("owner"), agent("reader"), len)
    }

    pub(crate) fn of(owner: Agent, reader: Agent, len: usize) -> Self {
        let bytes = pattern(len, 7);
        let theirs = owner.register("kv", Memory::owned(bytes.clone())).unwrap();
        let ours = reader.register("kv", Memory::owned(vec![0; len])).unwrap();
        let peer = reader.connect(owner.metadata().unwrap()).unwrap();
        peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
        Pair { owner, theirs, reader, ours, peer, bytes }
    }

    pub(crate) fn read(&self, grid: Grid, from: Vec<u32>, to: Vec<u32>) -> Plan {
        let remote = self.peer.region("kv").unwrap().grid(grid).unwrap();
        Plan::read(self.ours.grid(grid).unwrap().blocks(to), remote.blocks(from)).unwrap()
    }

    pub(crate) fn write(&self, grid: Grid, from: Vec<u32>, to: Vec<u32>) -> Plan {
        let remote = self.peer.region("kv").unwrap().grid(grid).unwrap();
        Plan::write(self.ours.grid(grid).unwrap().blocks(from), remote.blocks(to)).unwrap()
    }

    pub(crate) fn all(region: &Region) -> Vec<u8> {
        let mut bytes = vec![0; region.memory().len()];
        region.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    /// Checks that one small read works.
    pub(crate) fn still_works(&self) {
        let plan = self.read(Grid::packed(64, 4), vec![3], vec![1]);
        self.peer.post(&plan).unwrap().wait_blocking(CUT_OFF).unwrap();
    }
}
