//! Transfers and notifications between agents over TCP.

use crate::tcp_pair;
use crate::tcp_pair::{CUT_OFF, Pair, agent, agent_with, shuffled};
use kvx_core::{ErrorKind, Grid, Memory, Plan};
use kvx_testkit::test;

#[test]
fn scattered_blocks_arrive_where_the_plan_says() {
    let pair = Pair::new(8 << 20);
    let grid = Grid::packed(4096, 2048);
    let (from, to) = (shuffled(2048, 1), shuffled(2048, 2));
    let report = pair
        .peer
        .post(&pair.read(grid, from.clone(), to.clone()))
        .unwrap()
        .wait_blocking(CUT_OFF)
        .unwrap();
    assert_eq!((report.bytes, report.blocks), (8 << 20, 2048));
    let got = Pair::all(&pair.ours);
    for (from, to) in from.iter().zip(&to) {
        let (from, to) = (*from as usize * 4096, *to as usize * 4096);
        assert_eq!(got[to..to + 4096], pair.bytes[from..from + 4096]);
    }
}

#[test]
fn written_blocks_arrive_and_others_stay_unchanged() {
    let pair = Pair::new(4 << 20);
    pair.ours.copy_in(0, &vec![9; 4 << 20]).unwrap();
    let grid = Grid { base: 512, stride: 2048, length: 1024, count: 2000 };
    let (from, to) = (shuffled(1000, 3), (1000..2000).collect::<Vec<u32>>());
    pair.peer.post(&pair.write(grid, from, to)).unwrap().wait_blocking(CUT_OFF).unwrap();
    let got = Pair::all(&pair.theirs);
    for (at, (got, was)) in got.iter().zip(&pair.bytes).enumerate() {
        let (block, offset) = (at.wrapping_sub(512) / 2048, at.wrapping_sub(512) % 2048);
        let written = (1000..2000).contains(&block) && offset < 1024;
        assert_eq!(*got, if written { 9 } else { *was }, "at {at}");
    }
}

#[test]
fn large_transfers_of_few_and_of_many_blocks() {
    let pair = Pair::new(64 << 20);
    for length in [512u64, 64 << 10, 64 << 20] {
        let count = ((64 << 20) / length) as u32;
        pair.ours.copy_in(0, &vec![0; 64 << 20]).unwrap();
        let list = shuffled(count, length);
        let plan = pair.read(Grid::packed(length, count), list.clone(), list);
        pair.peer.post(&plan).unwrap().wait_blocking(CUT_OFF).unwrap();
        assert!(Pair::all(&pair.ours) == pair.bytes, "blocks of {length}");
    }
    pair.ours.copy_in(0, &vec![5; 64 << 20]).unwrap();
    let list = shuffled(1024, 5);
    pair.peer
        .post(&pair.write(Grid::packed(64 << 10, 1024), list.clone(), list))
        .unwrap()
        .wait_blocking(CUT_OFF)
        .unwrap();
    assert!(Pair::all(&pair.theirs).iter().all(|byte| *byte == 5));
}

#[test]
fn many_transfers_at_once_from_many_threads() {
    let pair = Pair::new(4 << 20);
    let grid = Grid::packed(4096, 1024);
    std::thread::scope(|scope| {
        for thread in 0..8u32 {
            let pair = &pair;
            scope.spawn(move || {
                let blocks: Vec<u32> = (thread * 128..(thread + 1) * 128).collect();
                let single: Vec<_> = blocks
                    .iter()
                    .map(|block| {
                        pair.peer.post(&pair.read(grid, vec![*block], vec![*block])).unwrap()
                    })
                    .collect();
                let together = pair.peer.post(&pair.read(grid, blocks.clone(), blocks)).unwrap();
                for transfer in single {
                    transfer.wait_blocking(CUT_OFF).unwrap();
                }
                together.wait_blocking(CUT_OFF).unwrap();
            });
        }
    });
    assert!(Pair::all(&pair.ours) == pair.bytes);
}

#[test]
fn small_transfers_during_large_ones_move_every_byte_correctly() {
    let pair = Pair::new(64 << 20);
    let (large, small) = (Grid::packed(64 << 10, 1024), Grid::packed(4096, 16));
    // The first block belongs to the small transfers.
    let list: Vec<u32> = shuffled(1024, 9).into_iter().filter(|block| *block > 0).collect();
    let together = |plan: Plan| {
        let running = pair.peer.post(&plan).unwrap();
        for block in (0..16).cycle().take(320) {
            pair.peer
                .post(&pair.read(small, vec![block], vec![block]))
                .unwrap()
                .wait_blocking(CUT_OFF)
                .unwrap();
        }
        running.wait_blocking(CUT_OFF).unwrap();
    };
    together(pair.read(large, list.clone(), list.clone()));
    assert!(Pair::all(&pair.ours) == pair.bytes);
    let mut other: Vec<u8> = pair.bytes.iter().map(|byte| !byte).collect();
    other[..64 << 10].copy_from_slice(&pair.bytes[..64 << 10]);
    pair.ours.copy_in(0, &other).unwrap();
    together(pair.write(large, list.clone(), list));
    assert!(Pair::all(&pair.theirs) == other && Pair::all(&pair.ours) == other);
}

#[test]
fn the_two_sides_may_have_different_grids() {
    let pair = Pair::new(1 << 20);
    let ours = Grid { base: 3, stride: 1111, length: 1000, count: 900 };
    let theirs = Grid { base: 100, stride: 1000, length: 1000, count: 1000 };
    let remote = pair.peer.region("kv").unwrap().grid(theirs).unwrap();
    let plan =
        Plan::read(pair.ours.grid(ours).unwrap().blocks(0..900), remote.blocks(50..950)).unwrap();
    pair.peer.post(&plan).unwrap().wait_blocking(CUT_OFF).unwrap();
    let got = Pair::all(&pair.ours);
    for block in 0..900 {
        let (to, from) = (3 + block * 1111, 100 + (50 + block) * 1000);
        assert_eq!(got[to..to + 1000], pair.bytes[from..from + 1000]);
        assert!(got[to + 1000..to + 1111].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn an_agent_may_be_linked_to_itself_and_to_another_of_its_process() {
    Pair::new(4096).still_works();
    let agent = agent("alone");
    let one = agent.register("kv", Memory::owned(vec![3; 4096])).unwrap();
    let two = agent.register("other", Memory::owned(vec![0; 4096])).unwrap();
    let myself = agent.connect(agent.metadata().unwrap()).unwrap();
    myself.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let remote = myself.region("kv").unwrap().grid(Grid::packed(4096, 1)).unwrap();
    let plan = Plan::read(two.grid(Grid::packed(4096, 1)).unwrap().blocks([0]), remote.blocks([0]))
        .unwrap();
    myself.post(&plan).unwrap().wait_blocking(CUT_OFF).unwrap();
    assert_eq!(Pair::all(&two), Pair::all(&one));
    myself.notify(b"to myself", CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    assert_eq!(&*agent.notification(CUT_OFF).join().unwrap().bytes, b"to myself");
}

#[test]
fn the_same_plan_can_be_posted_repeatedly() {
    let pair = Pair::new(1 << 20);
    let grid = Grid::packed(256, 4096);
    let list = shuffled(4096, 9);
    let plan = pair.read(grid, list.clone(), list);
    for _ in 0..50 {
        pair.peer.post(&plan).unwrap().wait_blocking(CUT_OFF).unwrap();
    }
    assert!(Pair::all(&pair.ours) == pair.bytes);
}

#[test]
fn notifications_are_binary_up_to_64_kib_and_wait_instead_of_being_lost() {
    let owner = kvx_core::Agent::builder("owner")
        .notifications(4, 64 << 10)
        .registry(tcp_pair::registry())
        .build()
        .unwrap();
    let pair = Pair::of(owner, agent("reader"), 4096);
    let sent: Vec<Vec<u8>> = (0..300u32)
        .map(|number| {
            let len = if number % 50 == 0 { 64 << 10 } else { 4 + number as usize };
            let mut bytes = vec![0; len];
            bytes[..4].copy_from_slice(&number.to_le_bytes());
            bytes
        })
        .collect();
    let waiting: Vec<_> = sent.iter().map(|bytes| pair.peer.notify(bytes, CUT_OFF)).collect();
    // The queue takes four; the others wait and do not prevent reads.
    pair.still_works();
    let mut got: Vec<Vec<u8>> = (0..300)
        .map(|_| {
            let notification = pair.owner.notification(CUT_OFF).join().unwrap();
            assert_eq!(notification.from, *pair.reader.identity());
            notification.bytes.to_vec()
        })
        .collect();
    got.sort_by_key(|bytes| u32::from_le_bytes(bytes[..4].try_into().unwrap()));
    assert!(got == sent);
    for acknowledged in waiting {
        acknowledged.wait_blocking(CUT_OFF).unwrap();
    }
    assert!(pair.owner.try_notification().is_none());
}

#[test]
fn ipv6_and_an_advertised_name_work() {
    for options in [
        r#"{"tcp": {"bind": "::1"}}"#,
        r#"{"tcp": {"bind": "0.0.0.0", "advertise": ["localhost"]}}"#,
    ] {
        let pair = Pair::of(agent_with("owner", options, None), agent("reader"), 4096);
        pair.still_works();
    }
}

#[test]
fn an_address_that_does_not_answer_is_followed_by_the_next() {
    // 127.0.0.1 refuses connections to port 1; the second address is right.
    let port = tcp_pair::raw::free_port();
    let options = format!(
        r#"{{"tcp": {{"ports": {port}, "advertise": ["127.0.0.1:1", "127.0.0.1:{port}"]}}}}"#
    );
    Pair::of(agent_with("owner", &options, None), agent("reader"), 4096).still_works();
}

#[test]
fn an_address_without_a_listener_is_a_lost_peer() {
    let owner = agent("owner");
    let metadata = owner.metadata().unwrap();
    owner.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let reader = agent("reader");
    let error = reader
        .connect(&metadata)
        .and_then(|peer| peer.ready(CUT_OFF).wait_blocking(CUT_OFF))
        .unwrap_err();
    assert!(error.to_string().contains("no socket listens there"), "{error}");
}

#[test]
fn a_restarted_agent_on_the_same_port_is_reported() {
    let port = tcp_pair::raw::free_port();
    let options = format!(r#"{{"tcp": {{"ports": {port}}}}}"#);
    let first = agent_with("owner", &options, None);
    let metadata = first.metadata().unwrap();
    first.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let _second = agent_with("owner", &options, None);
    let reader = agent("reader");
    let error = reader
        .connect(&metadata)
        .and_then(|peer| peer.ready(CUT_OFF).wait_blocking(CUT_OFF))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerRestarted, "{error}");
}

#[test]
fn secrets_must_match_on_both_ends() {
    let (a, b) = (Some(3), Some(4));
    Pair::of(agent_with("owner", "{}", a), agent_with("reader", "{}", a), 4096).still_works();
    for (ours, theirs) in [(a, b), (a, None), (None, a)] {
        let owner = agent_with("owner", "{}", theirs);
        let reader = agent_with("reader", "{}", ours);
        let peer = reader.connect(owner.metadata().unwrap()).unwrap();
        let error = peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Authentication, "{error}");
    }
}

#[test]
fn shutdown_ends_transfers_in_flight() {
    let pair = Pair::new(64 << 20);
    let list = shuffled(16 << 10, 4);
    let plan = pair.read(Grid::packed(4096, 16 << 10), list.clone(), list);
    let transfers: Vec<_> = (0..8).map(|_| pair.peer.post(&plan).unwrap()).collect();
    pair.reader.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    for transfer in transfers {
        let settled = transfer.settled();
        match transfer.wait_blocking(CUT_OFF) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::Closed, "{error}"),
        }
        settled.wait_blocking(CUT_OFF).unwrap();
    }
}
