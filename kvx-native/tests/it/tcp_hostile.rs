//! Malformed, slow or hostile peers lose their connection, and others do not notice.

use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::tcp_pair;
use crate::tcp_pair::raw::*;
use crate::tcp_pair::{CUT_OFF, Pair, agent, agent_with, pattern};
use kvx_core::backend::wire::Writer;
use kvx_core::backend::{Invitation, RegionKey};
use kvx_core::{Agent, ErrorKind, Grid};
use kvx_testkit::{connect_from, newcomers_amid, test};

/// Error kinds as END carries them.
const WRONG_KEY: u8 = 1;
const UNREGISTERED: u8 = 2;
const OUT_OF_BOUNDS: u8 = 4;
const CANCELLED: u8 = 6;

/// Returns an agent that seals nothing, so that its peer can write frames directly.
fn bare(name: &str) -> Agent {
    agent_with(name, BARE, None)
}

fn bare_builder(name: &str) -> kvx_core::AgentBuilder {
    Agent::builder(name).options(kvx_core::Options::parse(BARE).unwrap())
}

/// Returns a reader with a bare owner.
fn bare_pair(len: usize) -> Pair {
    Pair::of(bare("owner"), agent("reader"), len)
}

#[test]
fn garbage_costs_a_connection() {
    let pair = Pair::new(4096);
    for seed in 0..50 {
        let mut raw = Raw::connect(address_of(&pair.owner));
        raw.send(&pattern(1 << (seed % 20), seed));
        raw.0.shutdown(std::net::Shutdown::Write).ok();
        assert!(raw.is_closed());
    }
    pair.still_works();
}

#[test]
fn lengths_above_their_limit_cost_a_connection() {
    let pair = bare_pair(4096);
    for kind in [HELLO, CONFIRM, REFUSE, READ, DATA, NOTIFY, 0, 200] {
        let mut raw = Raw::connect(address_of(&pair.owner));
        let mut header = vec![kind, 0, 0, 0];
        header.put_u32(u32::MAX);
        header.put_u64(0);
        raw.send(&header);
        assert!(raw.is_closed());
    }
    for (kind, len) in [
        (READ, 3 << 20),
        (WRITE, u32::MAX),
        (DATA, (1 << 20) + 1),
        (NOTIFY, (64 << 10) + 1),
        (PING, 1),
    ] {
        let mut raw = Raw::lane(&pair.owner);
        let mut header = vec![kind, 0, 0, 0];
        header.put_u32(len);
        header.put_u64(0);
        raw.send(&header);
        assert!(raw.is_closed(), "{kind}");
    }
    pair.still_works();
}

#[test]
fn a_slow_handshake_times_out_and_disturbs_no_other_peer() {
    let pair = Pair::new(4096);
    let mut silent = Raw::connect(address_of(&pair.owner));
    let mut half = Raw::connect(address_of(&pair.owner));
    half.send(&hello(&invitation_of(&pair.owner))[..20]);
    let mut welcomed = Raw::connect(address_of(&pair.owner));
    welcomed.send(&hello(&invitation_of(&pair.owner)));
    assert_eq!(welcomed.frame().unwrap().0, WELCOME);
    pair.still_works();
    for raw in [&mut silent, &mut half, &mut welcomed] {
        assert!(raw.is_closed());
    }
    pair.still_works();
}

#[test]
fn half_open_connections_are_bounded_and_exclude_no_other_peer() {
    let pair = Pair::new(4096);
    let mut first = Raw::connect(address_of(&pair.owner));
    // Less than the time limit of a handshake.
    first.0.set_read_timeout(Some(std::time::Duration::from_secs(3))).unwrap();
    let _crowd: Vec<_> = (0..600)
        .map(|_| {
            let mut raw = Raw::connect(address_of(&pair.owner));
            raw.send(&hello(&invitation_of(&pair.owner))[..10]);
            raw
        })
        .collect();
    assert!(first.is_closed(), "the oldest connection is closed");
    Pair::of(agent("another owner"), agent("another reader"), 4096).still_works();
    let late = agent("late");
    let peer = late.connect(pair.owner.metadata().unwrap()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}

#[test]
fn half_open_connections_of_one_address_are_closed_before_those_of_others() {
    let pair = Pair::new(4096);
    let address = address_of(&pair.owner);
    // The oldest connection, and silent: if it came from the crowd's address, it would be closed
    // first.
    let mut elsewhere = Raw::connect(address);
    let crowd: Vec<_> = (0..600)
        .map(|_| {
            let mut raw = Raw::of(
                connect_from(Ipv4Addr::new(127, 0, 0, 2), address, Duration::from_secs(10))
                    .unwrap(),
            );
            raw.send(&hello(&invitation_of(&pair.owner))[..10]);
            raw
        })
        .collect();
    at_most_are_open(&crowd, 511);
    elsewhere.send(&hello(&invitation_of(&pair.owner)));
    assert_eq!(elsewhere.frame().unwrap().0, WELCOME);
    pair.still_works();
}

#[test]
fn connections_above_the_limit_are_refused_with_the_name_of_the_option() {
    let owner = agent_with("owner", r#"{"tcp": {"max_connections": 4}}"#, None);
    let pair = Pair::of(owner, agent("reader"), 4096);
    let late = agent("late");
    let peer = late.connect(pair.owner.metadata().unwrap()).unwrap();
    let error = peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err();
    assert!(error.to_string().contains("tcp.max_connections"), "{error}");
    pair.still_works();
}

#[test]
fn handshakes_at_once_do_not_exceed_the_limit_for_connections() {
    let options = r#"{"tcp": {"max_connections": 4, "seal": "none"}}"#;
    // The reader's link takes three of the four.
    let pair = Pair::of(agent_with("owner", options, None), agent("reader"), 4096);
    let begun: Vec<_> = (0..8).map(|_| Raw::welcomed(&pair.owner)).collect();
    let mut entered = Vec::new();
    for (mut raw, confirm) in begun {
        if confirm.is_some_and(|confirm| raw.send(&confirm))
            && raw.frame().is_some_and(|(kind, ..)| kind == ENTERED)
        {
            entered.push(raw);
        }
    }
    assert_eq!(entered.len(), 1, "connections beside the reader's three");
    // A handshake that ends early frees its place.
    drop(entered);
    let until = std::time::Instant::now() + CUT_OFF;
    while Raw::welcomed(&pair.owner).1.is_none() {
        assert!(std::time::Instant::now() < until, "the place is not free again");
    }
    pair.still_works();
}

#[test]
fn an_unauthenticated_peer_learns_and_touches_nothing_and_gets_one_answer() {
    for secret in [None, Some(3)] {
        let pair =
            Pair::of(agent_with("owner", "{}", secret), agent_with("reader", "{}", secret), 4096);
        let mut strangers = vec![
            hello(&Invitation::from_bytes([9; 32])),
            frame(HELLO, 0, b"kvx-tcp\n\x03\0\x03\0?"),
        ];
        if secret.is_some() {
            // A peer with the metadata but without the secret.
            strangers.push(hello(&invitation_of(&pair.owner)));
        }
        let mut answers = Vec::new();
        for stranger in strangers {
            let mut raw = Raw::connect(address_of(&pair.owner));
            raw.send(&stranger);
            let (kind, _, answer) = raw.frame().unwrap();
            assert_eq!(kind, REFUSE);
            answers.push(answer);
            raw.send(&frame(NOTIFY, 1, b"done"));
            assert!(raw.is_closed());
        }
        let life = pair.owner.identity().incarnation.0;
        assert!(answers.iter().all(|one| *one == answers[0]));
        assert!(!answers[0].windows(5).any(|word| word == b"owner"));
        assert!(!answers[0].windows(16).any(|word| word == life));
        // A request without a handshake.
        let (region, key) = key_of(&pair.owner, "kv");
        let mut raw = Raw::connect(address_of(&pair.owner));
        raw.send(&frame(READ, 1, &blocks(region, key, 64, 64, &[0])));
        assert!(raw.is_closed());
        assert!(pair.owner.try_notification().is_none());
        pair.still_works();
    }
}

#[test]
fn an_owner_sends_nothing_that_allows_guessing_the_key_offline() {
    let pair =
        Pair::of(agent_with("owner", "{}", Some(3)), agent_with("reader", "{}", Some(3)), 4096);
    // Whatever is sent without the key, the answer is always the same and depends on no key.
    let mut first = None;
    for seed in 0..20 {
        let mut raw = Raw::connect(address_of(&pair.owner));
        raw.send(&hello(&Invitation::from_bytes([seed; 32])));
        let answer = raw.frame().unwrap();
        assert_eq!(*first.get_or_insert_with(|| answer.clone()), answer);
    }
    // A peer that only connects receives nothing before it has sent something.
    let mut silent = Raw::connect(address_of(&pair.owner));
    assert!(silent.frame().is_none());
}

#[test]
fn a_recorded_session_cannot_be_replayed() {
    for (secret, seal) in [(Some(3), "all"), (Some(3), "none"), (None, "control")] {
        let relay = tcp_pair::relay::Relay::new();
        let owner = agent_with("owner", &relay.options(&format!(r#""seal": "{seal}""#)), secret);
        let pair = Pair::of(owner, agent_with("reader", BARE, secret), 4096);
        pair.ours.copy_in(0, &[0xaa; 4096]).unwrap();
        let plan = pair.write(Grid::packed(4096, 1), vec![0], vec![0]);
        pair.peer.post(&plan).unwrap().wait_blocking(CUT_OFF).unwrap();
        assert!(Pair::all(&pair.theirs).iter().all(|byte| *byte == 0xaa));
        pair.theirs.copy_in(0, &[0; 4096]).unwrap();
        for recorded in relay.recorded() {
            let mut raw = Raw::connect(relay.target());
            raw.send(&recorded);
            // The peer has the key, or a recording from such a peer: it gets an answer that it
            // cannot decrypt.
            assert_eq!(raw.frame().map(|(kind, ..)| kind), Some(WELCOME));
            assert!(raw.frame().is_none());
        }
        assert!(Pair::all(&pair.theirs).iter().all(|byte| *byte == 0), "the replay wrote bytes");
        pair.still_works();
    }
}

#[test]
fn requests_for_other_memory_than_granted_are_refused_and_write_nothing() {
    let pair = bare_pair(4096);
    let (region, key) = key_of(&pair.owner, "kv");
    let wrong = RegionKey([0; 16]);
    let mut raw = Raw::lane(&pair.owner);
    let unknown = kvx_core::RegionId(region.0 + 1000);
    let refused = [
        (blocks(unknown, key, 64, 64, &[0]), UNREGISTERED),
        (blocks(region, wrong, 64, 64, &[0]), WRONG_KEY),
        (blocks(region, key, 64, 65, &[64]), OUT_OF_BOUNDS),
        (blocks(region, key, 4097, 1, &[0]), OUT_OF_BOUNDS),
        (blocks(region, key, 1 << 40, 2, &[1]), OUT_OF_BOUNDS),
    ];
    for (id, (request, kind)) in (0..).step_by(2).zip(&refused) {
        raw.send(&frame(READ, id, request));
        assert_eq!(raw.answer(id), Err(*kind));
        raw.send(&frame(WRITE, id + 1, request));
        assert_eq!(raw.answer(id + 1), Err(*kind));
        raw.send(&frame(DATA, id + 1, &[0xee; 64]));
        raw.send(&frame(STOP, id + 1, &[]));
    }
    assert!(Pair::all(&pair.theirs) == pair.bytes);
    // The connection still works.
    raw.send(&frame(READ, 77, &blocks(region, key, 64, 64, &[2])));
    assert_eq!(raw.answer(77).unwrap(), pair.bytes[128..192]);
    raw.send(&frame(WRITE, 78, &blocks(region, key, 64, 64, &[2])));
    raw.send(&frame(DATA, 78, &[0xcc; 60]));
    raw.send(&frame(DATA, 78, &[0xdd; 4]));
    assert!(raw.answer(78).is_ok());
    assert_eq!(Pair::all(&pair.theirs)[180..192], [[0xcc; 4], [0xcc; 4], [0xdd; 4]].concat());
    raw.send(&frame(PING, 5, &[]));
    assert_eq!(raw.frame().unwrap().0, ALIVE);
    pair.still_works();
}

#[test]
fn frames_out_of_order_cost_a_connection() {
    let pair = bare_pair(4096);
    let (region, key) = key_of(&pair.owner, "kv");
    let good = blocks(region, key, 64, 64, &[0]);
    let bad: Vec<Vec<u8>> = vec![
        frame(DATA, 9, &[1; 10]),                                    // no such write
        [frame(WRITE, 9, &good), frame(DATA, 9, &[1; 65])].concat(), // more than requested
        [frame(WRITE, 9, &good), frame(READ, 9, &good)].concat(),    // the same id twice
        frame(DATA, 9, &[]),                                         // no bytes
        frame(END, 9, &[]),                                          // an owner's frame
        frame(ACK, 9, &[]),                                          // an owner's frame
        hello(&invitation_of(&pair.owner)),                          // a second hello
        frame(READ, 9, &good[..good.len() - 1]),                     // too short
        frame(READ, 9, &[&good[..], &[0]].concat()),                 // too long
        frame(READ, 9, &blocks(region, key, 64, 64, &[64])),         // beyond its own grid
        frame(READ, 9, &blocks(region, key, 64, 64, &[])),           // no blocks
        frame(READ, 9, &blocks(region, key, 0, 64, &[0])),           // no bytes
        vec![PING, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],     // reserved bits
    ];
    for (case, bytes) in bad.iter().enumerate() {
        let mut raw = Raw::lane(&pair.owner);
        raw.send(bytes);
        assert!(raw.is_closed(), "case {case}");
    }
    assert!(Pair::all(&pair.theirs)[64..] == pair.bytes[64..]);
    pair.still_works();
}

#[test]
fn mutated_requests_never_access_memory_outside_the_region() {
    let pair = bare_pair(4096);
    let (region, key) = key_of(&pair.owner, "kv");
    let stream = [
        frame(READ, 1, &blocks(region, key, 64, 64, &[1, 2, 3])),
        frame(NOTIFY, 2, b"hello"),
        frame(WRITE, 3, &blocks(region, key, 64, 1, &[0])),
        frame(DATA, 3, &[1; 64]),
        frame(CANCEL, 1, &[1]),
        frame(STOP, 3, &[]),
        frame(PING, 0, &[]),
    ]
    .concat();
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) as usize % below
    };
    for _ in 0..400 {
        let mut mutated = stream.clone();
        for _ in 0..1 + draw(4) {
            match draw(3) {
                0 => {
                    let at = draw(mutated.len() * 8);
                    mutated[at / 8] ^= 1 << (at % 8);
                }
                1 => mutated.truncate(1 + draw(mutated.len())),
                _ => {
                    let at = draw(mutated.len());
                    mutated[at] = draw(256) as u8;
                }
            }
        }
        let mut raw = Raw::lane(&pair.owner);
        raw.send(&mutated);
        raw.0.shutdown(std::net::Shutdown::Write).ok();
        assert!(raw.is_closed());
        while pair.owner.try_notification().is_some() {}
    }
    pair.still_works();
}

#[test]
fn reading_stops_from_a_peer_that_never_reads_its_answers() {
    let pair = bare_pair(1 << 20);
    let (region, key) = key_of(&pair.owner, "kv");
    let request = blocks(region, key, 1 << 20, 1, &[0]);
    let reads: Vec<u8> = (0..100_000).flat_map(|id| frame(READ, id, &request)).collect();
    let pings = frame(PING, 1, &[]).repeat(100_000);
    for crowd in [reads, pings] {
        let mut raw = Raw::lane(&pair.owner);
        raw.0.set_nonblocking(true).unwrap();
        // The kernel's buffers and the owner's queue take some bytes, but not 256 MiB.
        let (mut taken, mut stuck) = (0usize, 0);
        while stuck < 100 {
            assert!(taken < 256 << 20, "the owner does not stop reading");
            match raw.0.write(&crowd[taken % crowd.len()..]) {
                Ok(count) => (taken, stuck) = (taken + count, 0),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    pair.still_works(); // takes a moment, and shows that others are served
                    stuck += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    pair.still_works();
}

#[test]
fn unfinished_requests_of_one_peer_are_bounded_over_all_its_lanes() {
    const LANES: usize = 60;
    let pair = bare_pair(4096);
    let mut part = vec![READ, 0, 0, 0];
    part.put_u32(2 << 20);
    part.put_u64(1);
    part.resize(2 << 20, 0); // all but the last bytes
    let mut crowd: Vec<_> = (0..LANES).map(|_| Raw::lane(&pair.owner)).collect();
    for raw in &mut crowd {
        raw.send(&part);
    }
    let begun = Instant::now();
    pair.still_works();
    assert!(begun.elapsed() < CUT_OFF / 2, "another reader waits too long");
    // 64 MiB for one peer: at most 32 of these.
    at_most_are_open(&crowd, 32);
    pair.still_works();
}

#[test]
fn descriptions_of_unfinished_writes_count_as_held_for_their_peer() {
    const LANES: usize = 60;
    const BLOCKS: u32 = 500_000;
    let pair = bare_pair(1 << 20);
    let (region, key) = key_of(&pair.owner, "kv");
    let indices: Vec<u32> = (0..BLOCKS).rev().collect();
    let write = frame(WRITE, 1, &blocks(region, key, 1, BLOCKS, &indices));
    let mut crowd: Vec<_> = (0..LANES).map(|_| Raw::lane(&pair.owner)).collect();
    for raw in &mut crowd {
        raw.send(&write);
    }
    // 64 MiB for one peer, in steps of 64 KiB: at most 34 of these.
    at_most_are_open(&crowd, 34);
    pair.still_works();
}

#[test]
fn a_flood_of_unauthenticated_connections_delays_no_other_peer() {
    let pair = Pair::new(64 << 10);
    let address = address_of(&pair.owner);
    newcomers_amid(
        || agent("late"),
        &pair.owner.metadata().unwrap(),
        || {
            let begun = Instant::now();
            let mut crowd = std::collections::VecDeque::new();
            while begun.elapsed() < Duration::from_secs(3) {
                if let Ok(stream) = std::net::TcpStream::connect(address) {
                    crowd.push_back(Raw::of(stream));
                }
                if crowd.len() > 700 {
                    crowd.pop_front();
                }
            }
        },
    );
    pair.still_works();
}

#[test]
fn a_cancel_overtakes_the_payload_and_even_the_request() {
    let pair = bare_pair(4096);
    let (region, key) = key_of(&pair.owner, "kv");
    let link = fresh();
    let (mut small, mut bulk) =
        (Raw::lane_of(&pair.owner, link, 0), Raw::lane_of(&pair.owner, link, 1));
    let request = blocks(region, key, 64, 64, &[0]);
    // In the middle of a payload: bytes that have arrived are written, later ones are not.
    bulk.send(&frame(WRITE, 1, &request));
    bulk.send(&frame(DATA, 1, &[1; 64])[..16 + 10]);
    while Pair::all(&pair.theirs)[9] != 1 {
        std::thread::yield_now();
    }
    small.send(&frame(CANCEL, 1, &[1]));
    assert_eq!(bulk.answer(1), Err(CANCELLED));
    bulk.send(&[1; 54]);
    bulk.send(&frame(STOP, 1, &[]));
    // Before the request arrives.
    small.send(&frame(CANCEL, 7, &[1]));
    small.send(&frame(PING, 0, &[]));
    assert_eq!(small.frame().unwrap().0, ALIVE);
    bulk.send(&frame(WRITE, 7, &request));
    bulk.send(&frame(DATA, 7, &[2; 64]));
    assert_eq!(bulk.answer(7), Err(CANCELLED));
    // After its end, and for lanes and links that do not exist: no effect.
    small.send(&[frame(CANCEL, 7, &[1]), frame(CANCEL, 7, &[9])].concat());
    Raw::lane_of(&pair.owner, fresh(), 0).send(&frame(CANCEL, 8, &[1]));
    bulk.send(&frame(READ, 8, &blocks(region, key, 64, 64, &[1])));
    assert_eq!(bulk.answer(8).unwrap(), pair.bytes[64..128]);
    let now = Pair::all(&pair.theirs);
    assert_eq!(now[..10], [1; 10]);
    assert!(now[10..] == pair.bytes[10..]);
    // The number of early cancels is bounded.
    for id in 100..5000 {
        small.send(&frame(CANCEL, id, &[1]));
    }
    assert!(bulk.is_closed());
    pair.still_works();
}

#[test]
fn a_lane_opened_twice_costs_the_second_connection() {
    let pair = bare_pair(4096);
    let link = fresh();
    let mut first = Raw::lane_of(&pair.owner, link, 1);
    assert!(Raw::lane_of(&pair.owner, link, 1).is_closed());
    first.send(&frame(PING, 0, &[]));
    assert_eq!(first.frame().unwrap().0, ALIVE);
}

/// Returns a pair whose owner keeps one notification.
fn pair_with_a_small_inbox() -> Pair {
    let owner = bare_builder("owner").notifications(1, 64 << 10);
    Pair::of(owner.registry(tcp_pair::registry()).build().unwrap(), agent("reader"), 4096)
}

#[test]
fn too_many_notifications_at_once_cost_a_connection() {
    let pair = pair_with_a_small_inbox();
    let mut raw = Raw::lane(&pair.owner);
    for id in 0..1000 {
        raw.send(&frame(NOTIFY, id, b"again"));
    }
    assert!(raw.is_closed());
    pair.still_works();
}

#[test]
fn parked_notifications_count_as_held_for_their_peer() {
    const LANES: usize = 80;
    let pair = pair_with_a_small_inbox();
    // Each lane parks as much as its window allows: 1 MiB.
    let notice = vec![7; 64 << 10];
    let window: Vec<_> = (0..16).flat_map(|id| frame(NOTIFY, id, &notice)).collect();
    let mut crowd: Vec<_> = (0..LANES).map(|_| Raw::lane(&pair.owner)).collect();
    for raw in &mut crowd {
        raw.send(&window);
    }
    pair.still_works();
    // 64 MiB for one peer: at most 64 of these.
    at_most_are_open(&crowd, 64);
    pair.still_works();
}

/// Waits until the owner has closed all but `most` connections of the crowd.
fn at_most_are_open(crowd: &[Raw], most: usize) {
    let is_open = |raw: &Raw| {
        raw.0.set_nonblocking(true).unwrap();
        let mut byte = [0];
        match raw.0.peek(&mut byte) {
            Ok(count) => count > 0, // earlier bytes precede the end of the stream
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    };
    let until = std::time::Instant::now() + CUT_OFF;
    loop {
        let open = crowd.iter().filter(|raw| is_open(raw)).count();
        if open <= most {
            return;
        }
        assert!(std::time::Instant::now() < until, "{open} connections are open");
        std::thread::yield_now();
    }
}

/// Runs a reader that is connected to `owner`, which acts after the handshakes of all lanes.
fn with_owner<T>(owner: impl FnOnce(Vec<Raw>) + Send, reader: impl FnOnce(&Pair) -> T) -> T {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let advertising =
        agent_with("owner", &format!(r#"{{"tcp": {{"advertise": "{address}"}}}}"#), None);
    let invitation = invitation_of(&advertising);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let lanes = (0..3).map(|_| {
                let mut lane = Raw::of(listener.accept().unwrap().0);
                lane.welcome(&invitation);
                lane
            });
            owner(lanes.collect());
        });
        reader(&Pair::of(advertising, bare("reader"), 256 << 10))
    })
}

fn read_one(pair: &Pair) -> kvx_core::Result<kvx_core::Report> {
    pair.peer
        .post(&pair.read(Grid::packed(1024, 4), vec![0], vec![2]))
        .unwrap()
        .wait_blocking(CUT_OFF)
}

#[test]
fn an_owner_with_invalid_answers_is_disconnected_and_writes_nowhere_else() {
    let answers: [fn(u64) -> Vec<u8>; 7] = [
        |id| frame(DATA, id, &[7; 1025]),           // more than requested
        |id| frame(DATA, id + 1, &[7; 1024]),       // not requested
        |id| frame(DATA, id | 1 << 40, &[7; 1024]), // an old id
        |id| [frame(DATA, id, &[7; 1000]), frame(END, id, &[])].concat(), // less than requested
        |id| [frame(DATA, id, &[7; 1024]), frame(DATA, id, &[7; 1])].concat(), // one byte too many
        |id| frame(READ, id, &[]),                  // an initiator's frame
        |id| frame(END, id, &[0xff; 1000]),         // no valid text
    ];
    for (case, answer) in answers.into_iter().enumerate() {
        let owner = move |mut lanes: Vec<Raw>| {
            let (kind, id, _) = lanes[0].frame().unwrap();
            assert_eq!(kind, READ);
            lanes[0].send(&answer(id));
            assert!(lanes.iter_mut().all(Raw::is_closed));
        };
        with_owner(owner, |pair| {
            let error = read_one(pair).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed, "case {case}: {error}");
            let got = Pair::all(&pair.ours);
            assert!(got[..2048].iter().chain(&got[3072..]).all(|byte| *byte == 0), "case {case}");
            let good = agent("good");
            pair.reader
                .connect(good.metadata().unwrap())
                .unwrap()
                .ready(CUT_OFF)
                .wait_blocking(CUT_OFF)
                .unwrap();
        });
    }
}

#[test]
fn a_refusal_reaches_the_initiator_with_its_kind_and_the_link_stays_up() {
    let owner = |mut lanes: Vec<Raw>| {
        let (_, id, _) = lanes[0].frame().unwrap();
        lanes[0].send(&frame(END, id, b"\x03\x0a\0\0\0taken\nback"));
        let (_, id, _) = lanes[0].frame().unwrap();
        lanes[0].send(&[frame(DATA, id, &[7; 1024]), frame(END, id, &[])].concat());
        assert!(lanes.iter_mut().all(Raw::is_closed));
    };
    with_owner(owner, |pair| {
        let error = read_one(pair).unwrap_err();
        assert_eq!((error.kind(), error.sentence()), (ErrorKind::Revoked, "taken back"));
        assert_eq!((error.backend(), error.peer()), (Some("TCP"), Some("owner")));
        read_one(pair).unwrap();
        pair.reader.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    });
}

#[test]
fn no_request_begins_while_a_cancelled_write_may_still_arrive() {
    let (seen, wait_until_seen) = channel();
    let (posted, wait_until_posted) = channel();
    let owner = move |mut lanes: Vec<Raw>| {
        let (bulk, id) = loop {
            match (1..3).find_map(|lane| lanes[lane].peeked(WRITE).map(|id| (lane, id))) {
                Some(found) => break found,
                None => std::thread::yield_now(),
            }
        };
        seen.send(()).unwrap();
        let (kind, cancelled, lane) = lanes[0].frame().unwrap();
        assert_eq!((kind, cancelled, usize::from(lane[0])), (CANCEL, id, bulk));
        wait_until_posted.recv().unwrap();
        for _ in 0..1000 {
            assert!(
                lanes[0].peeked(READ).is_none(),
                "a read begins before the cancelled write has ended"
            );
            std::thread::yield_now();
        }
        lanes[bulk].send(&frame(END, id, &[CANCELLED, 0, 0, 0, 0]));
        // A ping may arrive before, if that took long.
        let (kind, id) = std::iter::from_fn(|| lanes[0].frame())
            .map(|(kind, id, _)| (kind, id))
            .find(|(kind, _)| *kind != PING)
            .unwrap();
        assert_eq!(kind, READ);
        lanes[0].send(&[frame(DATA, id, &[7; 1024]), frame(END, id, &[])].concat());
        assert!(lanes.iter_mut().all(Raw::is_closed));
    };
    with_owner(owner, |pair| {
        let all: Vec<u32> = (0..256).collect();
        let write = pair.peer.post(&pair.write(Grid::packed(1024, 256), all.clone(), all)).unwrap();
        let settled = write.settled();
        wait_until_seen.recv_timeout(CUT_OFF).unwrap();
        write.cancel();
        settled.wait_blocking(CUT_OFF).unwrap();
        let read = pair.peer.post(&pair.read(Grid::packed(1024, 4), vec![0], vec![2])).unwrap();
        posted.send(()).unwrap();
        read.wait_blocking(CUT_OFF).unwrap();
        pair.reader.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    });
}
