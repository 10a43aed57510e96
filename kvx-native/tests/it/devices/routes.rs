//! The backend that serves each kind of memory, and the reasons in the route why others do not.

use std::sync::Arc;

use kvx_core::{
    Agent, ErrorKind, Grid, GridSet, Memory, MemoryKind, Op, Plan, Region, Report, Result,
};
use kvx_testkit::{TestDevice, test};

use super::ends::{CUT_OFF, Ends, agent, registry};

const LEN: usize = 64 << 10;

/// Reads or writes all of `kv`.
fn run(op: Op, agent: &Agent, ours: &Region, owner: &Agent) -> Result<Report> {
    let peer = agent.connect(&owner.metadata()?)?;
    let grid = Grid::packed(4096, 16);
    let plan = Plan::of(
        op,
        [(ours.grid(grid)?.blocks(0..16), peer.region("kv")?.grid(grid)?.blocks(0..16))],
    )?;
    peer.transfer(&plan).deadline(CUT_OFF).post()?.wait_blocking(CUT_OFF)
}

/// Checks that both operations go over TCP if it is available, and that otherwise the error says
/// why SHM does not serve them.
fn goes_over_tcp(
    local: &dyn Fn() -> Memory,
    remote: &dyn Fn() -> Memory,
    near: Option<&Arc<TestDevice>>,
    why: &str,
) {
    for op in [Op::Read, Op::Write] {
        for with_tcp in [true, false] {
            let backends: &[&str] = if with_tcp { &["SHM", "TCP"] } else { &["SHM"] };
            let (reader, owner) = (agent("reader", backends, near), agent("owner", backends, None));
            let theirs = match owner.register("kv", remote()) {
                Err(refused) if !with_tcp => {
                    assert!(refused.sentence().contains(why), "{refused}");
                    continue;
                }
                registered => registered.unwrap(),
            };
            let ours = reader.register("kv", local()).unwrap();
            theirs.copy_in(0, &[2; LEN]).unwrap();
            let result = run(op, &reader, &ours, &owner);
            if with_tcp {
                assert_eq!(result.unwrap().backend, "TCP", "{op}");
            } else {
                let refused = result.unwrap_err();
                assert!(
                    matches!(refused.kind(), ErrorKind::NoRoute | ErrorKind::Unsupported),
                    "{refused:?}"
                );
                assert!(refused.sentence().contains(why), "{op}: {refused}");
            }
        }
    }
}

#[test]
fn memory_that_a_device_does_not_share_goes_over_tcp() {
    let (ours, theirs) = (TestDevice::new(MemoryKind::Cuda), TestDevice::new(MemoryKind::Cuda));
    theirs.refuse_to_share("it lies in a memory pool");
    goes_over_tcp(
        &|| ours.allocate(LEN),
        &|| theirs.allocate(LEN),
        Some(&ours),
        "it lies in a memory pool",
    );
}

#[test]
fn memory_that_a_device_does_not_open_goes_over_tcp() {
    let (ours, theirs) =
        (TestDevice::numbered(MemoryKind::Cuda, 1), TestDevice::numbered(MemoryKind::Cuda, 2));
    for local in [true, false] {
        let memory = || if local { ours.allocate(LEN) } else { Memory::pool(LEN).build().unwrap() };
        // The owner pulls a write of host memory, so no device must open anything.
        if local {
            goes_over_tcp(&memory, &|| theirs.allocate(LEN), Some(&ours), "does not reach");
        }
    }
}

#[test]
fn memory_of_a_device_that_an_agent_was_not_given_goes_over_tcp() {
    let (ours, theirs) = (TestDevice::new(MemoryKind::Cuda), TestDevice::new(MemoryKind::Cuda));
    goes_over_tcp(
        &|| ours.allocate(LEN),
        &|| theirs.allocate(LEN),
        None,
        "this agent was not given",
    );
    let rocm = TestDevice::new(MemoryKind::Rocm);
    goes_over_tcp(
        &|| ours.allocate(LEN),
        &|| theirs.allocate(LEN),
        Some(&rocm),
        "this agent was not given",
    );
}

/// SHM would move it from device to device.
#[test]
fn staged_device_memory_goes_through_the_host_where_shm_would_reach_it() {
    for (staged, backend) in [(false, "SHM"), (true, "TCP")] {
        let device = TestDevice::new(MemoryKind::Cuda);
        let agent = |name, backends: &[&str]| {
            let builder = Agent::builder(name)
                .backends(backends.iter().copied())
                .device(Arc::clone(&device) as _);
            builder.stage_device_memory(staged).registry(registry()).build().unwrap()
        };
        let (reader, owner) = (agent("reader", &["SHM", "TCP"]), agent("owner", &["SHM", "TCP"]));
        let ours = reader.register("kv", device.allocate(LEN)).unwrap();
        let theirs = owner.register("kv", device.allocate(LEN)).unwrap();
        theirs.copy_in(0, &[2; LEN]).unwrap();
        assert_eq!(run(Op::Read, &reader, &ours, &owner).unwrap().backend, backend);
        let mut bytes = vec![0; LEN];
        ours.copy_out(0, &mut bytes).unwrap();
        assert!(bytes == [2; LEN]);
        assert_eq!(device.counters().hops > 0, backend == "SHM");
        // Host memory is unaffected, and a backend that cannot stage explains why it does not take
        // the device's.
        let alone = agent("alone", &["SHM"]);
        alone.register("host", Memory::owned(vec![0; LEN])).unwrap();
        let registered = alone.register("kv", device.allocate(LEN));
        if !staged {
            registered.unwrap();
        } else {
            let refused = registered.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Unsupported);
            assert!(refused.sentence().contains("kv_buffer_device is cpu, and SHM"), "{refused}");
        }
    }
}

#[test]
fn two_devices_share_a_plan_over_tcp() {
    let devices = [1, 2, 3].map(|number| TestDevice::numbered(MemoryKind::Cuda, number));
    let (reader, owner) = (agent("reader", &["TCP"], None), agent("owner", &["TCP"], None));
    let name = |at: usize| format!("kv.{at}");
    let ours: Vec<_> = (0..3)
        .map(|at| reader.register(&name(at), devices[at / 2].allocate(LEN)).unwrap())
        .collect();
    let theirs: Vec<_> = (0..3)
        .map(|at| owner.register(&name(at), devices[1 + at % 2].allocate(LEN)).unwrap())
        .collect();
    for (at, region) in theirs.iter().enumerate() {
        region.copy_in(0, &[at as u8 + 1; LEN]).unwrap();
    }
    let peer = reader.connect(owner.metadata().unwrap()).unwrap();
    let grid = Grid::packed(4096, 16);
    let local = GridSet::join(ours.iter().map(|region| region.grid(grid).unwrap())).unwrap();
    let remote = (0..3).map(|at| peer.region(&name(at)).unwrap().grid(grid).unwrap());
    let remote = GridSet::join(remote).unwrap();
    let plan = Plan::read(local.blocks(0..16), remote.blocks(0..16)).unwrap();
    peer.transfer(&plan).deadline(CUT_OFF).post().unwrap().wait_blocking(CUT_OFF).unwrap();
    for (at, region) in ours.iter().enumerate() {
        let mut bytes = vec![0; LEN];
        region.copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == at as u8 + 1), "region {at}");
    }
}

#[test]
fn opened_memory_is_closed_when_it_is_revoked_and_when_the_link_ends() {
    let ends = Ends::new("SHM", true, true, 8);
    let device = ends.device(super::ends::Busy::Ours);
    assert_eq!(device.allocations(), 2, "the local memory and the peer's");
    ends.theirs.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    assert_eq!(device.allocations(), 1);

    let ends = Ends::new("SHM", true, true, 8);
    let device = Arc::clone(ends.device(super::ends::Busy::Ours));
    ends.owner.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let until = std::time::Instant::now() + CUT_OFF;
    while device.allocations() > 1 {
        assert!(std::time::Instant::now() < until, "the peer's memory is still open");
        std::thread::yield_now();
    }
}
