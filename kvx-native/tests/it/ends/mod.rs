//! Two ends of a link for the tests of SHM: short helpers for agents, regions and plans.

pub(crate) mod child;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{
    Agent, Grid, Memory, Options, Peer, PeerRegion, Plan, Region, Registry, Report, Result,
};
use kvx_native::Shm;
use rustix::fs::MemfdFlags;

/// The time limit for each step, which is exceeded only by a hang.
pub(crate) const CUT_OFF: Duration = Duration::from_secs(10);

pub(crate) fn registry() -> Registry {
    let mut registry = Registry::new();
    registry.add(Shm).unwrap();
    registry
}

/// Returns an agent with SHM only, which notices a silent peer within 800 ms.
pub(crate) fn agent(name: &str) -> Agent {
    Agent::builder(name)
        .peer_timeout(Duration::from_millis(800))
        .registry(registry())
        .build()
        .unwrap()
}

pub(crate) fn agent_with(name: &str, options: &str) -> Agent {
    Agent::builder(name)
        .options(Options::parse(options).unwrap())
        .registry(registry())
        .build()
        .unwrap()
}

/// The kind of memory of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    Pool,
    Foreign,
    /// The program's own memory file, adopted.
    File,
}

pub(crate) const BOTH: [On; 2] = [On::Pool, On::Foreign];
pub(crate) const ALL: [On; 3] = [On::Pool, On::Foreign, On::File];

impl On {
    pub(crate) fn memory(self, len: usize) -> Memory {
        match self {
            On::Pool => Memory::pool(len).build().unwrap(),
            On::Foreign => Memory::owned(vec![0; len]),
            On::File => {
                let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                let file = rustix::fs::memfd_create("engine", flags).unwrap();
                rustix::fs::ftruncate(&file, len as u64).unwrap();
                Memory::adopt_file(file, len).unwrap()
            }
        }
    }
}

pub(crate) const BLOCK: u64 = 4096;

/// Registers a region of `blocks` blocks, each filled with its [`pattern`].
pub(crate) fn region(agent: &Agent, name: &str, on: On, blocks: u32, seed: u8) -> Region {
    let memory = Arc::new(on.memory(blocks as usize * BLOCK as usize));
    for block in 0..blocks {
        memory
            .copy_in(block as usize * BLOCK as usize, &[pattern(seed, block); BLOCK as usize])
            .unwrap();
    }
    agent.register(name, memory).unwrap()
}

pub(crate) fn pattern(seed: u8, block: u32) -> u8 {
    seed.wrapping_add((block % 251) as u8).wrapping_mul(31) | 1
}

/// Returns the byte that fills a block. Panics if its bytes differ.
pub(crate) fn filled_with(region: &Region, block: u32) -> u8 {
    let mut bytes = [0; BLOCK as usize];
    region.copy_out(block as usize * BLOCK as usize, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "block {block} is torn");
    bytes[0]
}

pub(crate) fn read(local: &Region, remote: &PeerRegion, ours: &[u32], theirs: &[u32]) -> Plan {
    let grid = |count| Grid::packed(BLOCK, count);
    let local =
        local.grid(grid((local.memory().len() as u64 / BLOCK) as u32)).unwrap().blocks(ours);
    let remote =
        remote.grid(grid((kvx_core::Place::len(remote) / BLOCK) as u32)).unwrap().blocks(theirs);
    Plan::read(local, remote).unwrap()
}

pub(crate) fn write(local: &Region, remote: &PeerRegion, ours: &[u32], theirs: &[u32]) -> Plan {
    let grid = |count| Grid::packed(BLOCK, count);
    let local =
        local.grid(grid((local.memory().len() as u64 / BLOCK) as u32)).unwrap().blocks(ours);
    let remote =
        remote.grid(grid((kvx_core::Place::len(remote) / BLOCK) as u32)).unwrap().blocks(theirs);
    Plan::write(local, remote).unwrap()
}

pub(crate) fn connect(from: &Agent, to: &Agent) -> Peer {
    from.connect(to.metadata().unwrap()).unwrap()
}

pub(crate) fn run(peer: &Peer, plan: &Plan) -> Result<Report> {
    peer.transfer(plan).deadline(CUT_OFF).post()?.wait_blocking(CUT_OFF)
}

/// Waits until the loss of the peer has been reported.
pub(crate) fn until_lost(peer: &Peer) {
    let begun = Instant::now();
    while peer.lost().is_none() {
        assert!(begun.elapsed() < CUT_OFF, "the peer is not lost");
        std::thread::yield_now();
    }
}

pub(crate) fn shut_down(agents: &[&Agent]) {
    for agent in agents {
        agent.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    }
}
