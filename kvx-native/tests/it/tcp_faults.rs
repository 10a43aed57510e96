//! Peers that stall, vanish or revoke: transfers resolve, settle, and touch no memory afterwards.

use std::time::Duration;

use crate::tcp_pair::relay::Relay;
use crate::tcp_pair::{CUT_OFF, Pair, agent, agent_with, registry, shuffled};
use kvx_core::{Agent, ErrorKind, Grid, Options, Plan};
use kvx_testkit::test;

const BIG: usize = 32 << 20;

/// The ways in which bytes of memory are sent: directly from there, or sealed in a copy.
const SEALS: [&str; 2] = ["control", "all"];

/// Returns a pair that is connected through a relay.
fn relayed(relay: &Relay) -> Pair {
    sealed(relay, SEALS[0])
}

/// Like [`relayed`], with this seal.
fn sealed(relay: &Relay, seal: &str) -> Pair {
    // One bulk lane, so that a stall is certainly in the middle of a payload.
    let reader = agent_with("reader", r#"{"tcp": {"connections": 1}}"#, None);
    Pair::of(
        agent_with("owner", &relay.options(&format!(r#""seal": "{seal}""#)), None),
        reader,
        BIG,
    )
}

fn everything(pair: &Pair, read: bool) -> Plan {
    let (grid, all) = (Grid::packed(64 << 10, 512), (0..512).collect::<Vec<u32>>());
    if read { pair.read(grid, all.clone(), all) } else { pair.write(grid, all.clone(), all) }
}

/// Returns an agent with a shorter peer timeout.
fn impatient(name: &str, timeout: Duration) -> Agent {
    Agent::builder(name).peer_timeout(timeout).registry(registry()).build().unwrap()
}

/// Cancels a transfer in the middle of its payload, and checks that it settles at once.
fn cancel_in_the_middle(relay: &Relay, pair: &Pair, read: bool) {
    let transfer = pair.peer.post(&everything(pair, read)).unwrap();
    let settled = transfer.settled();
    relay.wait_until_stuck();
    transfer.cancel();
    settled.wait_blocking(CUT_OFF).unwrap();
    assert_eq!(transfer.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::Cancelled);
}

/// Waits until late bytes have arrived: later work on the same lanes completes after them.
fn let_late_bytes_pass(relay: &Relay, pair: &Pair) {
    relay.go_on();
    let grid = Grid::packed(1 << 20, 32);
    for _ in 0..20 {
        pair.peer.post(&pair.read(grid, vec![0], vec![0])).unwrap().wait_blocking(CUT_OFF).unwrap();
    }
}

#[test]
fn a_cancelled_read_settles_at_once_and_late_bytes_are_discarded() {
    for seal in SEALS {
        let relay = Relay::new();
        let pair = sealed(&relay, seal);
        // The stall is in the middle of a payload.
        relay.stall_answers(3_000_001);
        cancel_in_the_middle(&relay, &pair, true);
        pair.ours.copy_in(0, &vec![0x5a; BIG]).unwrap();
        let_late_bytes_pass(&relay, &pair);
        assert!(Pair::all(&pair.ours)[1 << 20..].iter().all(|byte| *byte == 0x5a));
    }
}

#[test]
fn a_cancelled_write_settles_at_once_and_sends_no_later_content() {
    for seal in SEALS {
        let relay = Relay::new();
        let pair = sealed(&relay, seal);
        pair.ours.copy_in(0, &vec![1; BIG]).unwrap();
        relay.stall_requests(3_000_001);
        cancel_in_the_middle(&relay, &pair, false);
        // Later content of this memory must not be sent.
        pair.ours.copy_in(0, &vec![0x5a; BIG]).unwrap();
        let_late_bytes_pass(&relay, &pair);
        let later = |bytes: &[u8]| bytes.windows(64).any(|bytes| bytes == [0x5a; 64]);
        assert!(!later(&Pair::all(&pair.theirs)));
        assert!(!relay.recorded().iter().any(|sent| later(sent)), "later content reached the wire");
    }
}

fn another_peer_connects(pair: &Pair) {
    let late = agent("late");
    let peer = late.connect(pair.owner.metadata().unwrap()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

#[test]
fn a_transfer_whose_peer_is_silent_is_lost_after_the_peer_timeout() {
    for read in [true, false] {
        let relay = Relay::new();
        let owner = agent_with("owner", &relay.options(""), None);
        let pair = Pair::of(owner, impatient("reader", Duration::from_millis(1500)), BIG);
        relay.stall_answers(0);
        relay.stall_requests(1_000_000);
        let transfer = pair.peer.post(&everything(&pair, read)).unwrap();
        let settled = transfer.settled();
        let error = transfer.wait_blocking(CUT_OFF).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        settled.wait_blocking(CUT_OFF).unwrap();
        // The owner still serves other peers.
        relay.go_on();
        another_peer_connects(&pair);
    }
}

#[test]
fn a_transfer_to_a_lost_peer_with_a_silent_address_fails_with_peer_lost() {
    let relay = Relay::new();
    let pair = relayed(&relay);
    relay.cut();
    pair.peer.loss(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    // The reader connects to that address again, but gets no answer.
    relay.stall_answers(0);
    let posted =
        pair.peer.transfer(&everything(&pair, true)).deadline(Duration::from_millis(300)).post();
    let error = posted.and_then(|transfer| transfer.wait_blocking(CUT_OFF)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
}

#[test]
fn a_peer_that_is_busy_but_alive_is_not_lost() {
    // The owner's agent takes no notifications for several times the peer timeout.
    let owner =
        Agent::builder("owner").notifications(1, 64 << 10).registry(registry()).build().unwrap();
    let pair = Pair::of(owner, impatient("reader", Duration::from_millis(1500)), 4096);
    let waiting: Vec<_> = (0..5u8).map(|number| pair.peer.notify([number], CUT_OFF * 3)).collect();
    let quiet = pair.owner.wait_for_senders(b"never sent", 1, Duration::from_secs(5));
    assert_eq!(quiet.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::TimedOut);
    for _ in 0..5 {
        pair.owner.notification(CUT_OFF).join().unwrap();
    }
    for acknowledged in waiting {
        acknowledged.wait_blocking(CUT_OFF).unwrap();
    }
    pair.still_works();
}

#[test]
fn a_cut_connection_fails_transfers_in_flight_at_once() {
    for read in [true, false] {
        let relay = Relay::new();
        let pair = relayed(&relay);
        if read {
            relay.stall_answers(2_000_000)
        } else {
            relay.stall_requests(2_000_000)
        }
        let transfers: Vec<_> =
            (0..3).map(|_| pair.peer.post(&everything(&pair, read)).unwrap()).collect();
        relay.wait_until_stuck();
        relay.cut();
        for transfer in transfers {
            let settled = transfer.settled();
            let error = transfer.wait_blocking(CUT_OFF).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            settled.wait_blocking(CUT_OFF).unwrap();
        }
        another_peer_connects(&pair);
    }
}

#[test]
fn a_revoked_region_is_released_at_once_although_its_readers_and_writers_stall() {
    for (read, seal) in [true, false].into_iter().flat_map(|read| SEALS.map(|seal| (read, seal))) {
        let relay = Relay::new();
        let pair = sealed(&relay, seal);
        pair.ours.copy_in(0, &vec![1; BIG]).unwrap();
        if read {
            relay.stall_answers(2_000_001)
        } else {
            relay.stall_requests(2_000_001)
        }
        let transfer = pair.peer.post(&everything(&pair, read)).unwrap();
        relay.wait_until_stuck();
        let memory = pair.theirs.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
        memory.copy_in(0, &vec![0x5a; BIG]).unwrap();
        relay.go_on();
        let error = transfer.wait_blocking(CUT_OFF).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Revoked, "{error}");
        let mut theirs = vec![0; BIG];
        memory.copy_out(0, &mut theirs).unwrap();
        assert!(theirs.iter().all(|byte| *byte == 0x5a), "bytes were written after the revocation");
        if read {
            assert!(
                !Pair::all(&pair.ours).windows(64).any(|bytes| bytes == [0x5a; 64]),
                "bytes were read after the revocation"
            );
        }
        let other = pair.owner.register("other", kvx_core::Memory::owned(vec![4; 4096])).unwrap();
        pair.peer.update(pair.owner.metadata().unwrap()).unwrap();
        let grid = Grid::packed(4096, 1);
        let remote = pair.peer.region("other").unwrap().grid(grid).unwrap();
        let plan =
            Plan::read(pair.ours.grid(grid).unwrap().blocks([0]), remote.blocks([0])).unwrap();
        pair.peer.post(&plan).unwrap().wait_blocking(CUT_OFF).unwrap();
        assert_eq!(Pair::all(&pair.ours)[..4096], Pair::all(&other));
    }
}

#[test]
fn an_owner_that_is_shut_down_is_a_lost_peer() {
    let pair = Pair::new(BIG);
    let transfers: Vec<_> =
        (0..4).map(|_| pair.peer.post(&everything(&pair, true)).unwrap()).collect();
    pair.owner.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    for transfer in transfers {
        if let Err(error) = transfer.wait_blocking(CUT_OFF) {
            assert!(matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Revoked), "{error}");
        }
    }
    let plan = everything(&pair, true);
    let error =
        pair.peer.post(&plan).and_then(|transfer| transfer.wait_blocking(CUT_OFF)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Revoked), "{error}");
}

#[test]
fn a_peer_that_does_not_answer_the_handshake_is_lost_within_the_peer_timeout() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let options = format!(r#"{{"tcp": {{"advertise": "{}"}}}}"#, silent.local_addr().unwrap());
    let owner = Agent::builder("owner")
        .options(Options::parse(&options).unwrap())
        .registry(registry())
        .build()
        .unwrap();
    let reader = impatient("reader", Duration::from_millis(300));
    let peer = reader.connect(owner.metadata().unwrap()).unwrap();
    let error = peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err();
    assert!(error.to_string().contains("no answer from"), "{error}");
}

#[test]
fn random_transfers_with_random_cancels_move_the_right_bytes() {
    const SHARE: usize = 1 << 20;
    let pair = Pair::new(4 * SHARE);
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let pair = &pair;
            scope.spawn(move || {
                let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ thread as u64;
                let mut draw = move |below: u64| {
                    state = state
                        .wrapping_mul(0x5851_f42d_4c95_7f2d)
                        .wrapping_add(0x1405_7b7e_f767_814f);
                    (state >> 33) % below
                };
                for round in 0..120u8 {
                    let length = 1 << (6 + draw(13)); // 64 bytes to 256 KiB
                    let count = (SHARE as u64 / length) as u32;
                    let base = (thread * SHARE) as u64;
                    let grid = Grid { base, ..Grid::packed(length, count) };
                    let blocks = shuffled(count, draw(1 << 30));
                    let blocks = &blocks[..1 + draw(u64::from(count)) as usize];
                    let (read, cancelled) = (draw(2) == 0, draw(3) == 0);
                    let (from, to) =
                        if read { (&pair.theirs, &pair.ours) } else { (&pair.ours, &pair.theirs) };
                    from.copy_in(base as usize, &vec![round; SHARE]).unwrap();
                    to.copy_in(base as usize, &vec![0xff; SHARE]).unwrap();
                    let (blocks, list) = (blocks.to_vec(), blocks);
                    let plan = if read {
                        pair.read(grid, blocks.clone(), blocks)
                    } else {
                        pair.write(grid, blocks.clone(), blocks)
                    };
                    let transfer = pair.peer.post(&plan).unwrap();
                    let settled = transfer.settled();
                    if cancelled {
                        (0..draw(2000)).for_each(|_| std::hint::spin_loop());
                        transfer.cancel();
                    }
                    let result = transfer.wait_blocking(CUT_OFF);
                    settled.wait_blocking(CUT_OFF).unwrap();
                    if let Err(error) = &result {
                        assert!(cancelled && error.kind() == ErrorKind::Cancelled, "{error}");
                        // Late bytes of a write have landed when a read of that memory begins.
                        let grid = Grid { base, ..Grid::packed(64, 1) };
                        pair.peer
                            .post(&pair.read(grid, vec![0], vec![0]))
                            .unwrap()
                            .wait_blocking(CUT_OFF)
                            .unwrap();
                        continue;
                    }
                    let mut got = vec![0; SHARE];
                    to.copy_out(base as usize, &mut got).unwrap();
                    let mut wanted = vec![0xff; SHARE];
                    for block in list {
                        let at = *block as usize * length as usize;
                        wanted[at..at + length as usize].fill(round);
                    }
                    assert!(
                        got == wanted,
                        "thread {thread}, round {round}: {length} x {}, read: {read}",
                        list.len()
                    );
                }
            });
        }
    });
    pair.still_works();
}

#[test]
fn a_peer_at_its_connection_limit_is_tried_again_on_the_same_handle() {
    let room_for_one = r#"{"tcp": {"connections": 1, "max_connections": 2}}"#;
    let owner = agent_with("owner", room_for_one, None);
    let first = agent_with("first", room_for_one, None);
    let taken = first.connect(owner.metadata().unwrap()).unwrap();
    until_ready(&taken);
    let late = agent_with("late", room_for_one, None);
    let peer = late.connect(owner.metadata().unwrap()).unwrap();
    let full = peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Exhausted, "{full}");
    assert!(full.to_string().contains("try later"), "{full}");
    drop(taken);
    until_ready(&peer);
    assert!(peer.lost().is_none());
}

/// Connects until a link is up: an owner notices the end of a connection with a delay.
fn until_ready(peer: &kvx_core::Peer) {
    let until = std::time::Instant::now() + CUT_OFF;
    while let Err(error) = peer.ready(CUT_OFF).wait_blocking(CUT_OFF) {
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
        assert!(std::time::Instant::now() < until, "{error}");
        std::thread::yield_now();
    }
}
