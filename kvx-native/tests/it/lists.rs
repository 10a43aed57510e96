//! Regions that are announced one by one, plans over lists of spans, and transfers that the caller
//! drives.

use std::time::{Duration, Instant};

use kvx_core::{
    Agent, ErrorKind, Memory, Op, Peer, PeerRegion, Place as _, Plan, Region, Registry, Report,
    Result, Span, Transfer,
};
use kvx_testkit::test;

const CUT_OFF: Duration = Duration::from_secs(10);
const LEN: usize = 4 << 20;

fn agent(name: &str, backend: &str) -> Agent {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).unwrap().add(kvx_native::Tcp).unwrap();
    Agent::builder(name).backends([backend]).registry(registry.clone()).build().unwrap()
}

/// Returns byte `at` of the owner's region.
fn content(at: u64) -> u8 {
    (at * 31 + at / 251) as u8
}

struct Pair {
    owner: Agent,
    reader: Agent,
    theirs: Region,
    ours: Region,
    peer: Peer,
    remote: PeerRegion,
}

/// A reader that connected before the owner's region existed, and has learnt only about that
/// region.
fn pair(backend: &str) -> Pair {
    let (owner, reader) = (agent("owner", backend), agent("reader", backend));
    let peer = reader.connect(owner.metadata().unwrap()).unwrap();
    let bytes: Vec<u8> = (0..LEN as u64).map(content).collect();
    let theirs = owner.register("late", Memory::owned(bytes)).unwrap();
    let ours = reader.register("cache", Memory::owned(vec![0; LEN])).unwrap();
    let remote = peer.import_region(theirs.metadata().unwrap()).unwrap();
    Pair { owner, reader, theirs, ours, peer, remote }
}

fn driven(mut transfer: Transfer) -> Result<Report> {
    let end = Instant::now() + CUT_OFF;
    loop {
        if let Some(result) = transfer.drive() {
            assert!(transfer.is_settled());
            return result;
        }
        assert!(Instant::now() < end, "the transfer did not end within {CUT_OFF:?}");
    }
}

fn holds(region: &Region, at: u64, len: u64, wanted: impl Fn(u64) -> u8) -> bool {
    let mut got = vec![0; len as usize];
    region.copy_out(at as usize, &mut got).unwrap();
    got.iter().zip(0..).all(|(byte, offset)| *byte == wanted(offset))
}

/// Returns spans of various lengths, offsets and orders: blocks, neighbours, odd ones, one byte,
/// none.
fn spans() -> Vec<Span> {
    let mut spans: Vec<Span> =
        (0..64).map(|i| Span { local: i * 8192, remote: (63 - i) * 4096 + 5, len: 4096 }).collect();
    spans.extend((0..40).map(|i| Span {
        local: (1 << 20) + i * 100,
        remote: (2 << 20) + i * 300,
        len: 1 + i,
    }));
    spans.push(Span { local: (2 << 20) + 1, remote: 3, len: 1 << 20 });
    spans.push(Span { local: (3 << 20) + 1, remote: 3 + (1 << 20), len: 7 });
    spans.push(Span { local: LEN as u64, remote: 0, len: 0 });
    spans
}

fn spans_of_any_lengths_arrive(backend: &str) {
    let Pair { ours, theirs, peer, remote, .. } = &pair(backend);
    let plan = Plan::of_spans(Op::Read, [(ours.clone(), remote.clone(), spans())]).unwrap();
    assert_eq!(plan.size().bytes, spans().iter().map(|span| span.len).sum::<u64>());
    for _ in 0..3 {
        driven(peer.post(&plan).unwrap()).unwrap();
    }
    for Span { local, remote, len } in spans() {
        assert!(
            holds(ours, local, len, |offset| content(remote + offset)),
            "{local} {len} over {backend}"
        );
    }
    // The bytes between them are unchanged.
    assert!(holds(ours, 4096, 4096, |_| 0) && holds(ours, (1 << 20) + 1, 99, |_| 0));

    ours.copy_in(0, &[77; 10_000]).unwrap();
    let back = vec![
        Span { local: 0, remote: 10, len: 3 },
        Span { local: 100, remote: 999_999, len: 8001 },
    ];
    let plan = Plan::of_spans(Op::Write, [(ours.clone(), remote.clone(), back)]).unwrap();
    driven(peer.post(&plan).unwrap()).unwrap();
    assert!(holds(theirs, 10, 3, |_| 77) && holds(theirs, 999_999, 8001, |_| 77));
    assert!(holds(theirs, 13, 1000, |offset| content(13 + offset)));
}

#[test]
fn spans_of_any_lengths_arrive_over_shm() {
    spans_of_any_lengths_arrive("SHM");
}

#[test]
fn spans_of_any_lengths_arrive_over_tcp() {
    spans_of_any_lengths_arrive("TCP");
}

#[test]
fn spans_outside_or_overlapping_are_rejected() {
    let Pair { ours, remote, .. } = &pair("SHM");
    let plan = |spans: &[Span]| Plan::of_spans(Op::Read, [(ours.clone(), remote.clone(), spans)]);
    let len = LEN as u64;
    for span in [
        Span { local: len, remote: 0, len: 1 },
        Span { local: 0, remote: len - 1, len: 2 },
        Span { local: u64::MAX, remote: 0, len: 2 },
    ] {
        assert_eq!(plan(&[span]).unwrap_err().kind(), ErrorKind::OutOfBounds);
    }
    let on_top = [Span { local: 0, remote: 0, len: 100 }, Span { local: 99, remote: 500, len: 7 }];
    assert_eq!(plan(&on_top).unwrap_err().kind(), ErrorKind::Overlap);
    assert_eq!(plan(&[]).unwrap().size().bytes, 0);
}

/// A list with the worst case for its length: every span has another length.
#[test]
fn a_hundred_thousand_spans_of_different_lengths_are_one_transfer() {
    let Pair { ours, peer, remote, .. } = &pair("TCP");
    let (mut spans, mut at) = (Vec::new(), 0);
    for i in 0..100_000u64 {
        let len = 1 + i % 37;
        spans.push(Span { local: at + i, remote: at, len });
        at += len;
    }
    assert!(at + 100_000 < LEN as u64);
    let started = Instant::now();
    let plan = Plan::of_spans(Op::Read, [(ours.clone(), remote.clone(), &spans)]).unwrap();
    assert!(started.elapsed() < CUT_OFF / 2, "{:?} to make the plan", started.elapsed());
    driven(peer.post(&plan).unwrap()).unwrap();
    for Span { local, remote, len } in spans.into_iter().step_by(997) {
        assert!(holds(ours, local, len, |offset| content(remote + offset)));
    }
}

#[test]
fn a_region_of_another_incarnation_or_agent_is_rejected() {
    let Pair { owner, reader, theirs, peer, remote, .. } = &pair("TCP");
    let again = agent("owner", "TCP");
    let other = again.register("late", Memory::owned(vec![0; 10])).unwrap();
    assert_eq!(
        peer.import_region(other.metadata().unwrap()).unwrap_err().kind(),
        ErrorKind::PeerRestarted
    );
    assert_eq!(
        peer.import_region(owner.metadata().unwrap()).unwrap_err().kind(),
        ErrorKind::Malformed
    );
    peer.forget(remote); // it can still be used
    let small = reader.register("small", Memory::owned(vec![0; 16])).unwrap();
    let span = vec![Span { local: 0, remote: 100, len: 16 }];
    let plan = Plan::of_spans(Op::Read, [(small.clone(), remote.clone(), span)]).unwrap();
    driven(peer.post(&plan).unwrap()).unwrap();
    assert!(holds(&small, 0, 16, |offset| content(100 + offset)));
    theirs.revoke(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    assert_eq!(theirs.metadata().unwrap_err().kind(), ErrorKind::Revoked);
    assert!(driven(peer.post(&plan).unwrap()).is_err(), "its owner has revoked it");
}

/// A transfer that is no longer driven is completed by its agent's thread.
#[test]
fn a_transfer_that_is_no_longer_driven_still_completes() {
    let Pair { ours, peer, remote, .. } = &pair("TCP");
    let all = vec![Span { local: 0, remote: 0, len: LEN as u64 }];
    let plan = Plan::of_spans(Op::Read, [(ours.clone(), remote.clone(), all)]).unwrap();
    let mut transfer = peer.post(&plan).unwrap();
    let first = transfer.drive();
    if first.is_none() {
        transfer.settled().wait_blocking(CUT_OFF).unwrap();
        transfer.drive().expect("it has settled").unwrap();
    }
    assert!(transfer.drive().expect("taken").is_err(), "the result is given once");
    assert!(holds(ours, 0, LEN as u64, content));
}

#[test]
fn the_cost_of_a_region_is_independent_of_their_number() {
    for backend in ["SHM", "TCP"] {
        let owner = agent("owner", backend);
        let memory = std::sync::Arc::new(Memory::owned(vec![0; 4096]));
        let mut kept = Vec::new();
        let mut register = |count: usize| {
            let begun = Instant::now();
            for _ in 0..count {
                kept.push(
                    owner
                        .register(&format!("kv.{}", kept.len()), std::sync::Arc::clone(&memory))
                        .unwrap(),
                );
            }
            begun.elapsed()
        };
        let first = register(1000);
        register(8000);
        let last = register(1000);
        assert!(
            last < 4 * first + Duration::from_millis(50),
            "{backend}: 1,000 took {first:?}, after 9,000 {last:?}"
        );
        let metadata = owner.metadata().unwrap();
        assert!(metadata.len() < 600_000, "{} bytes for 10,000 regions", metadata.len());
        let reader = agent("reader", backend);
        let peer = reader.connect(&metadata).unwrap();
        assert_eq!(peer.region("kv.9999").unwrap().len(), 4096);
        peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    }
}
