//! Two agents over one backend, each with a test device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{
    Agent, AgentBuilder, Grid, Memory, MemoryKind, Op, Peer, Plan, Region, Registry, Report,
    Result, Transfer,
};
use kvx_testkit::TestDevice;

/// The time limit for each step, which is exceeded only by a hang.
pub(crate) const CUT_OFF: Duration = Duration::from_secs(8);
pub(crate) const BLOCK: u64 = 4096;
pub(crate) const BOTH: [&str; 2] = ["SHM", "TCP"];
pub(crate) const OPS: [Op; 2] = [Op::Read, Op::Write];

/// The end whose device is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Busy {
    Ours,
    Theirs,
}

pub(crate) fn registry() -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).unwrap().add(kvx_native::Tcp).unwrap();
    registry
}

pub(crate) fn agent(name: &str, backends: &[&str], device: Option<&Arc<TestDevice>>) -> Agent {
    builder(name, backends, device).registry(registry()).build().unwrap()
}

fn builder(name: &str, backends: &[&str], device: Option<&Arc<TestDevice>>) -> AgentBuilder {
    let builder = Agent::builder(name).backends(backends.iter().copied());
    match device {
        Some(device) => builder.device(Arc::clone(device) as _),
        None => builder,
    }
}

/// An owner and a reader that is connected to it, each with a region `kv`.
pub(crate) struct Ends {
    pub(crate) owner: Agent,
    pub(crate) reader: Agent,
    devices: [Arc<TestDevice>; 2],
    /// The reader's region, with content 1.
    pub(crate) ours: Region,
    /// The owner's region, with content 2.
    pub(crate) theirs: Region,
    pub(crate) peer: Peer,
}

impl Ends {
    /// Creates regions of `blocks` blocks, each on the end's device or in a pool.
    pub(crate) fn new(backend: &str, local: bool, remote: bool, blocks: u32) -> Self {
        Self::patient(backend, local, remote, blocks, CUT_OFF)
    }

    /// Like [`new`](Self::new), with agents whose peers may be silent for `timeout`.
    pub(crate) fn patient(
        backend: &str,
        local: bool,
        remote: bool,
        blocks: u32,
        timeout: Duration,
    ) -> Self {
        let devices = [0, 1].map(|_| TestDevice::new(MemoryKind::Cuda));
        let [reader, owner] =
            [("reader", &devices[0]), ("owner", &devices[1])].map(|(name, device)| {
                builder(name, &[backend], Some(device))
                    .peer_timeout(timeout)
                    .registry(registry())
                    .build()
                    .unwrap()
            });
        let len = blocks as usize * BLOCK as usize;
        let memory = |on_device: bool, device: &Arc<TestDevice>| match on_device {
            true => device.allocate(len),
            false => Memory::pool(len).build().unwrap(),
        };
        let ours = reader.register("kv", memory(local, &devices[0])).unwrap();
        let theirs = owner.register("kv", memory(remote, &devices[1])).unwrap();
        let peer = reader.connect(owner.metadata().unwrap()).unwrap();
        let ends = Ends { owner, reader, devices, ours, theirs, peer };
        ends.fill(&ends.ours, 1);
        ends.fill(&ends.theirs, 2);
        ends.run(Op::Read, &[], &[]).unwrap();
        ends.works();
        ends
    }

    pub(crate) fn device(&self, busy: Busy) -> &Arc<TestDevice> {
        &self.devices[busy as usize]
    }

    /// Waits until that device has been asked for a copy that it holds back.
    pub(crate) fn until_waiting(&self, busy: Busy) {
        let until = Instant::now() + CUT_OFF;
        while self.device(busy).waiting() == 0 {
            assert!(Instant::now() < until, "the device is not asked for a copy");
            std::thread::yield_now();
        }
    }

    fn byte(seed: u8, block: u32) -> u8 {
        seed.wrapping_mul(37).wrapping_add((block % 251) as u8) | 1
    }

    /// Fills a region with content `seed`.
    pub(crate) fn fill(&self, region: &Region, seed: u8) {
        let blocks = region.memory().len() as u64 / BLOCK;
        let bytes = (0..blocks as u32).flat_map(|block| [Self::byte(seed, block); BLOCK as usize]);
        region.copy_in(0, &bytes.collect::<Vec<_>>()).unwrap();
    }

    /// Panics unless the block equals block `number` of content `seed`.
    pub(crate) fn check(region: &Region, block: u32, seed: u8, number: u32) {
        let mut bytes = [0; BLOCK as usize];
        region.copy_out(block as usize * BLOCK as usize, &mut bytes).unwrap();
        assert!(
            bytes == [Self::byte(seed, number); BLOCK as usize],
            "block {block} of {}",
            region.name()
        );
    }

    /// Returns `count` distinct blocks below 1000, unordered.
    pub(crate) fn scattered(count: u32, step: u32) -> Vec<u32> {
        (0..count).map(|at| at * step % 1000).collect()
    }

    pub(crate) fn plan(&self, op: Op, ours: &[u32], theirs: &[u32]) -> Result<Plan> {
        let grid = Grid::packed(BLOCK, (self.ours.memory().len() as u64 / BLOCK) as u32);
        let remote = self.peer.region("kv")?.grid(grid)?.blocks(theirs);
        Plan::of(op, [(self.ours.grid(grid)?.blocks(ours), remote)])
    }

    pub(crate) fn transfer(&self, op: Op, ours: &[u32], theirs: &[u32]) -> Transfer {
        let plan = self.plan(op, ours, theirs).unwrap();
        self.peer.transfer(&plan).deadline(CUT_OFF).post().unwrap()
    }

    pub(crate) fn run(&self, op: Op, ours: &[u32], theirs: &[u32]) -> Result<Report> {
        let plan = self.plan(op, ours, theirs)?;
        self.peer.transfer(&plan).deadline(CUT_OFF).post()?.wait_blocking(CUT_OFF)
    }

    /// Posts a transfer of all blocks to the same positions.
    pub(crate) fn post(&self, op: Op) -> Transfer {
        self.post_within(op, CUT_OFF)
    }

    pub(crate) fn post_within(&self, op: Op, deadline: Duration) -> Transfer {
        let all: Vec<u32> = (0..(self.ours.memory().len() as u64 / BLOCK) as u32).collect();
        let plan = self.plan(op, &all, &all).unwrap();
        self.peer.transfer(&plan).deadline(deadline).post().unwrap()
    }

    /// Moves a block in each direction, and restores the contents.
    pub(crate) fn works(&self) {
        for (op, region, seed, other) in
            [(Op::Read, &self.ours, 2, 1), (Op::Write, &self.theirs, 1, 2)]
        {
            self.fill(&self.ours, 1);
            self.fill(&self.theirs, 2);
            self.run(op, &[3], &[5]).unwrap();
            let (to, from) = if op == Op::Read { (3, 5) } else { (5, 3) };
            Self::check(region, to, seed, from);
            Self::check(region, 0, other, 0);
        }
        self.fill(&self.ours, 1);
        self.fill(&self.theirs, 2);
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.devices.iter().for_each(|device| device.release());
    }
}
