//! Attacks by an authenticated SHM peer that lends memory of another process as its own. A target
//! that opened it would copy it to where the peer may read it.

use std::sync::Arc;

use kvx_backend::process::ProcessId;
use kvx_core::backend::wire::Writer as _;
use kvx_core::backend::{Direction, IpcHandle, LinkProcess, Piece, Ticket};
use kvx_core::{Agent, DeviceAccess, DeviceId, Grid, Memory, MemoryKind, Plan, Result};
use kvx_gpu::Device;
use kvx_testkit::{Child, hex, unhex};

use super::roles::{hear, say};
use super::sharing::Owner;
use super::{Bench, LONG, ROLE, Test, all_of, filled, pattern};
use crate::native::registry;

pub(crate) const TESTS: &[(&str, Test)] =
    &[("a_peer_lends_only_memory_that_it_owns", only_its_own_memory)];

const LEN: usize = 64 << 10;
const GRID: Grid = Grid::packed(4096, 16);
/// The length of a pool that is one allocation.
const WHOLE: usize = 2 << 20;
const HONEST: &str = "honest";

/// A device whose memory other processes open with a forged handle.
struct Forger {
    device: Arc<Device>,
    handle: IpcHandle,
}

// SAFETY: the device copies, which upholds the contract.
unsafe impl DeviceAccess for Forger {
    fn kind(&self) -> MemoryKind {
        self.device.kind()
    }

    fn device(&self) -> DeviceId {
        self.device.device()
    }

    fn ordinal(&self) -> u32 {
        self.device.ordinal()
    }

    fn pinned(&self, len: usize) -> Result<Memory> {
        self.device.pinned(len)
    }

    unsafe fn copy(&self, direction: Direction, pieces: &[Piece], done: Ticket) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.device.copy(direction, pieces, done) };
    }

    fn share(&self, _: &Arc<Memory>) -> Result<IpcHandle> {
        Ok(self.handle.clone())
    }

    fn open(
        self: Arc<Self>,
        owner: DeviceId,
        process: LinkProcess<'_>,
        handle: &IpcHandle,
        len: usize,
    ) -> Result<Memory> {
        Arc::clone(&self.device).open(owner, process, handle, len)
    }
}

/// Returns an agent with SHM and a device.
pub(crate) fn agent(name: &str, device: Arc<dyn DeviceAccess>) -> Agent {
    agent_over(&["SHM"], name, device)
}

/// Returns an agent with some backends and a device.
pub(crate) fn agent_over(backends: &[&str], name: &str, device: Arc<dyn DeviceAccess>) -> Agent {
    let builder = Agent::builder(name).backends(backends.iter().copied());
    builder.registry(registry("")).device(device).build().expect("the backends open")
}

/// Writes memory of a peer's process into the region of a target, as the peer describes it.
fn write(device: &Arc<Device>, target: &[u8], forged: Option<IpcHandle>) -> Result<()> {
    let pool = filled(device, &[9; LEN]);
    let (address, id) = (pool.address(), device.device());
    let access: Arc<dyn DeviceAccess> = match forged {
        Some(handle) => Arc::new(Forger { device: Arc::clone(device), handle }),
        None => Arc::clone(device) as _,
    };
    let agent = agent("peer", Arc::clone(&access));
    // SAFETY: the pool is the owner of its memory.
    let memory = unsafe { Memory::adopt_device(address, LEN, id, access, pool) };
    let out = agent.register("out", memory)?;
    let peer = agent.connect(target)?;
    let all = 0..GRID.count;
    let there = peer.region("in")?.grid(GRID)?.blocks(all.clone());
    let plan = Plan::write(out.grid(GRID)?.blocks(all), there)?;
    let written = peer.transfer(&plan).deadline(LONG).post()?.wait_blocking(LONG);
    agent.shutdown(LONG).wait_blocking(LONG)?;
    written.map(drop)
}

/// For [`super::roles`]: writes to the target with each handle that the parent names, and reports
/// the result.
pub(crate) fn attack(bench: &Bench<'_>) {
    loop {
        let line = hear();
        let words: Vec<_> = line.split(' ').collect();
        let (target, forged) = match words[..] {
            [target, HONEST] => (target, None),
            [target, offset, bytes] => {
                let offset = offset.parse().expect("a number");
                (target, Some(IpcHandle { bytes: unhex(bytes), offset }))
            }
            _ => return,
        };
        match write(&bench.device, &unhex(target), forged) {
            Ok(()) => say("written"),
            Err(error) => say(&format!("{}: {error}", error.kind().as_str())),
        }
    }
}

/// Returns the handle that this process would make for a pool, without sharing it.
fn handle_of(pool: &Memory) -> IpcHandle {
    let mut bytes = vec![1];
    ProcessId::current().encode(&mut bytes);
    bytes.put_u64(pool.address());
    bytes.put_u64(WHOLE as u64);
    bytes.put_u8(0);
    bytes.put(&[7; 64]);
    IpcHandle { bytes, offset: 0 }
}

fn only_its_own_memory(bench: &Bench<'_>) {
    let target = agent("target", Arc::clone(&bench.device) as _);
    let before = pattern(31, LEN);
    let region = target.register("in", filled(&bench.device, &before)).unwrap();
    let metadata = hex(&target.metadata().unwrap());
    let secret = filled(&bench.device, &pattern(32, WHOLE));
    let others = [Owner::start("owner 0"), Owner::start("owner 0 mapped")];
    let mut peer = Child::start_self(ROLE, "forger").expect("a process starts");
    let mut ask = |how: &str| {
        peer.say(&format!("{metadata} {how}")).unwrap();
        peer.hear(LONG).expect("the peer reports its result")
    };
    let [by_driver, by_descriptor] = others.each_ref().map(|other| other.handle.clone());
    for (what, handle) in [
        ("memory of the target that is not shared", handle_of(&secret)),
        ("memory of a third process", by_driver),
        ("a descriptor of a third process", by_descriptor),
    ] {
        region.copy_in(0, &before).unwrap();
        let told = ask(&format!("{} {}", handle.offset, hex(&handle.bytes)));
        assert!(told.starts_with("authentication: "), "{what}: {told}");
        assert!(all_of(region.memory())[..LEN] == before, "{what} was copied");
        assert_eq!(ask(HONEST), "written", "after {what}");
        assert!(all_of(region.memory())[..LEN] == [9; LEN], "after {what}");
    }
    drop(others);
    target.shutdown(LONG).wait_blocking(LONG).unwrap();
}
