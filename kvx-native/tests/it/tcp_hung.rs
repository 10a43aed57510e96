//! Unresolved page faults: the operations that wait for them, and those that do not. Clause P12 has
//! more tests, with processes.

use std::time::{Duration, Instant};

use crate::tcp_pair::{CUT_OFF, Pair, agent, agent_with, pattern};
use kvx_core::{Agent, ErrorKind, Grid, Memory, MemoryKind, Peer, Plan, Region, Transfer};
use kvx_testkit::{HungPage, TestDevice, skip, test};

const LEN: usize = 4 << 20;
/// The deadline of operations that wait for the page.
const DEADLINE: Duration = Duration::from_millis(500);
/// The time for which a condition must stay false.
const STAYS: Duration = Duration::from_millis(300);

fn cannot(test: &str) -> bool {
    let refused = HungPage::refused();
    if let Some(why) = &refused {
        skip(test, why, "run the tests as root");
    }
    refused.is_some()
}

/// Reads all of a peer's region into this one.
fn read(peer: &Peer, name: &str, into: &Region, deadline: Duration) -> Transfer {
    let whole = Grid::packed(LEN as u64, 1);
    let from = peer.region(name).unwrap().grid(whole).unwrap().blocks(vec![0]);
    let plan = Plan::read(into.grid(whole).unwrap().blocks(vec![0]), from).unwrap();
    peer.transfer(&plan).deadline(deadline).post().unwrap()
}

#[test(own_process)]
fn an_owners_page_fault_delays_its_region_and_no_other() {
    if cannot("an_owners_page_fault_delays_its_region_and_no_other") {
        return;
    }
    let pair = Pair::new(LEN);
    let bytes = pattern(LEN, 9);
    let well = pair.owner.register("well", Memory::owned(bytes.clone())).unwrap();
    let other = agent("other");
    let into = other.register("into", Memory::owned(vec![0; LEN])).unwrap();
    let to_owner = other.connect(pair.owner.metadata().unwrap()).unwrap();
    to_owner.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();

    let page = HungPage::of(pair.theirs.memory()).unwrap();
    let held_up = read(&pair.peer, "kv", &pair.ours, DEADLINE);
    for _ in 0..20 {
        read(&to_owner, "well", &into, CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    }
    assert_eq!(Pair::all(&into), bytes);
    assert!(matches!(
        held_up.wait_blocking(CUT_OFF).unwrap_err().kind(),
        ErrorKind::TimedOut | ErrorKind::PeerLost
    ));
    // No turn touches this region, although a hung turn may still touch the other.
    well.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    assert_eq!(
        pair.theirs.revoke(STAYS).wait_blocking(CUT_OFF).unwrap_err().kind(),
        ErrorKind::StillShared
    );
    assert_eq!(kvx_core::quarantined_bytes(), LEN as u64);
    drop(page);
    let until = Instant::now() + CUT_OFF;
    while kvx_core::quarantined_bytes() > 0 {
        assert!(
            Instant::now() < until,
            "the memory stays quarantined although the page fault is resolved"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    // The reader connects again and continues.
    let again = pair.owner.register("again", Memory::owned(pair.bytes.clone())).unwrap();
    let peer = pair.reader.connect(pair.owner.metadata().unwrap()).unwrap();
    read(&peer, "again", &pair.ours, CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    assert_eq!(Pair::all(&pair.ours), pair.bytes);
    drop(again);
}

/// Returns an agent that is connected to this owner by one bulk lane, and its region.
fn connected(name: &str, owner: &Agent) -> (Agent, Region, Peer) {
    let agent = agent_with(name, r#"{"tcp": {"connections": 1}}"#, None);
    let into = agent.register("into", Memory::owned(vec![2; LEN])).unwrap();
    let peer = agent.connect(owner.metadata().unwrap()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    (agent, into, peer)
}

#[test(own_process)]
fn a_hung_lane_withholds_no_bounce_buffers_from_others() {
    if cannot("a_hung_lane_withholds_no_bounce_buffers_from_others") {
        return;
    }
    let owner = agent("owner");
    let device = TestDevice::new(MemoryKind::Cuda);
    let _device = owner.register("device", device.allocate(LEN)).unwrap();
    let host = owner.register("host", Memory::owned(vec![1; LEN])).unwrap();
    let (_greedy, into, greedy) = connected("greedy", &owner);
    let (_other, others, other) = connected("other", &owner);
    let page = HungPage::of(host.memory()).unwrap();
    let mut held_up = vec![read(&greedy, "host", &into, DEADLINE)];
    // More than the buffers hold, in requests that arrive with the one that hangs.
    let grid = Grid::packed(100 << 10, 40);
    for block in 0..38 {
        let from = greedy.region("device").unwrap().grid(grid).unwrap().blocks(vec![block]);
        let plan = Plan::read(into.grid(grid).unwrap().blocks(vec![block]), from).unwrap();
        held_up.push(greedy.transfer(&plan).deadline(DEADLINE).post().unwrap());
    }
    for transfer in held_up {
        transfer.wait_blocking(CUT_OFF).ok(); // some may have been served before
    }
    read(&other, "device", &others, CUT_OFF / 4).wait_blocking(CUT_OFF).unwrap();
    drop(page);
}

#[test(own_process)]
fn no_write_is_accepted_where_a_hung_write_may_still_land() {
    if cannot("no_write_is_accepted_where_a_hung_write_may_still_land") {
        return;
    }
    let owner = agent("owner");
    let theirs = owner.register("kv", Memory::owned(vec![0; LEN])).unwrap();
    let page_size = 4096;
    let (middle, last) = ((LEN / 2 / page_size) as u32, 9);
    let grid = Grid::packed(page_size as u64, (LEN / page_size) as u32);
    let write = |peer: &Peer, from: &Region, blocks: &[u32], deadline| {
        let to = peer.region("kv").unwrap().grid(grid).unwrap().blocks(blocks.to_vec());
        let plan = Plan::write(from.grid(grid).unwrap().blocks(blocks.to_vec()), to).unwrap();
        peer.transfer(&plan).deadline(deadline).post().unwrap().wait_blocking(CUT_OFF)
    };
    let (writer, from, peer) = connected("writer", &owner);
    let page = HungPage::of(theirs.memory()).unwrap();
    from.copy_in(0, &vec![1; LEN]).unwrap();
    let hung = write(&peer, &from, &[middle, middle + 1, last], DEADLINE).unwrap_err();
    assert!(matches!(hung.kind(), ErrorKind::TimedOut | ErrorKind::PeerLost), "{hung:?}");

    from.copy_in(0, &vec![2; LEN]).unwrap();
    // A transfer may fail a moment before the handle counts as lost, and the handle is reused until
    // then.
    peer.loss(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let peer = writer.connect(owner.metadata().unwrap()).unwrap();
    assert_eq!(write(&peer, &from, &[last], CUT_OFF).unwrap_err().kind(), ErrorKind::Exhausted);
    drop(page);
    let until = Instant::now() + CUT_OFF;
    while let Err(error) = write(&peer, &from, &[last], CUT_OFF) {
        assert!(error.kind() == ErrorKind::Exhausted && Instant::now() < until, "{error:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut block = [0];
    theirs.copy_out(last as usize * page_size, &mut block).unwrap();
    assert_eq!(block, [2]);
}
