//! Tests that driver calls which may wait for all work of a device run on kvx's thread for them:
//! not on the thread of a transport, nor where memory is dropped or a copy is posted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::Ticket;
use kvx_core::{Completion, DeviceAccess as _, Grid, Memory, Plan};
use kvx_gpu::{Device, DevicePtr};
use kvx_testkit::{Child, hex, unhex};

use super::forgery::{agent, agent_over};
use super::roles::{hear, say};
use super::sharing::Owner;
use super::{Bench, LONG, ROLE, Test, all_of, filled, pattern, settled, until};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("a_transport_goes_on_while_a_device_opens_or_closes_a_peers_memory", by_another_thread),
    ("a_transfer_goes_through_the_host_where_no_memory_is_opened", through_the_host),
    ("dropping_memory_does_not_wait_for_the_driver", dropped),
    ("a_pool_takes_the_place_of_one_that_was_dropped", replaced),
    ("the_first_copy_does_not_wait_for_the_context", first_copy),
    ("a_device_that_could_not_be_used_is_tried_again_for_the_next_copy", tried_again),
];

/// The name of kvx's thread for calls that may block.
const THREAD: &str = "kvx-mem";
/// The blocks that a peer lends, and the number of their bytes.
const LENT: Grid = Grid::packed(4096, 16);
const LENT_BYTES: usize = 64 << 10;
/// The time of a slow call of the driver.
const SLOW: Duration = Duration::from_secs(2);

fn make_slow(bench: &Bench<'_>, function: &str) {
    bench.control.command(&format!("slow {function} {}", SLOW.as_micros()));
}

/// Calls `act` and checks that it does not wait for a slow call.
fn at_once<T>(what: &str, act: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = act();
    assert!(begun.elapsed() < SLOW / 2, "{what} took {:?}", begun.elapsed());
    result
}

fn by_another_thread(bench: &Bench<'_>) {
    const HOST: Grid = Grid::packed(4096, 64);
    let names = &bench.maker.names;
    let target = agent("target", Arc::clone(&bench.device) as _);
    let region = target.register("in", filled(&bench.device, &[0; LENT_BYTES])).unwrap();
    let bytes = pattern(51, HOST.count as usize * 4096);
    let _host = target.register("host", Memory::owned(bytes.clone())).unwrap();
    let metadata = target.metadata().unwrap();
    let near = agent("near", Arc::clone(&bench.device) as _);
    let into = near.register("into", Memory::owned(vec![0; bytes.len()])).unwrap();
    let peer = near.connect(&metadata).unwrap();
    let there = peer.region("host").unwrap().grid(HOST).unwrap().blocks(0..HOST.count);
    let plan = Plan::read(into.grid(HOST).unwrap().blocks(0..HOST.count), there).unwrap();
    let read = || peer.transfer(&plan).deadline(LONG).post().unwrap().wait_blocking(LONG).unwrap();
    read(); // the link is up

    let (opened, closed) = (bench.control.calls(names.open), bench.control.calls(names.close));
    make_slow(bench, names.open);
    make_slow(bench, names.close);
    let mut lender = Child::start_self(ROLE, "lender SHM").expect("a process starts");
    lender.say(&hex(&metadata)).unwrap();
    until("the target's device opens the memory", || bench.control.calls(names.open) > opened);
    at_once("a read from the target", read);
    assert_eq!(lender.hear(LONG).expect("the peer reports its write"), "written");
    assert!(all_of(region.memory())[..LENT_BYTES] == [9; LENT_BYTES]);

    lender.say("revoke").unwrap();
    until("the device closes the memory", || bench.control.calls(names.close) > closed);
    at_once("a read from the target", read);
    // Its owner must not free the memory before it is closed: here and where either end shuts down.
    let revoked = time_of(&lender);
    assert!(revoked >= SLOW, "revoked in {revoked:?}");
    let mut lenders = ["shut down", "revoke"].map(|last| (start_lender(&metadata), last));
    let [(leaving, shut_down), (staying, revoke)] = &mut lenders;
    leaving.say(shut_down).unwrap();
    let revoked = time_of(leaving);
    assert!(revoked >= SLOW, "shut down in {revoked:?}");
    for function in [names.open, names.close] {
        assert_eq!(
            bench.control.calls_by(function, THREAD),
            bench.control.calls(function),
            "only {THREAD} calls {function}"
        );
    }
    near.shutdown(LONG).wait_blocking(LONG).unwrap();
    target.shutdown(LONG).wait_blocking(LONG).unwrap();
    staying.say(revoke).unwrap();
    let revoked = time_of(staying);
    assert!(revoked >= SLOW / 2, "revoked in {revoked:?} after the shutdown of the other end");
}

/// Starts a process that lends a region over shared memory, and waits until its write has ended.
fn start_lender(metadata: &[u8]) -> Child {
    let mut lender = Child::start_self(ROLE, "lender SHM").expect("a process starts");
    lender.say(&hex(metadata)).unwrap();
    assert_eq!(lender.hear(LONG).expect("the peer reports its write"), "written");
    lender
}

/// Returns the time after which a lender may free its region.
fn time_of(lender: &Child) -> Duration {
    let millis = lender.hear(LONG).expect("the peer reports its revocation");
    Duration::from_millis(millis.parse().unwrap())
}

/// The driver refuses to open memory of other processes, as between containers or MIG instances.
fn through_the_host(bench: &Bench<'_>) {
    let open = bench.maker.names.open;
    let both = ["SHM", "TCP"];
    let target = agent_over(&both, "target", Arc::clone(&bench.device) as _);
    let region = target.register("in", filled(&bench.device, &[0; LENT_BYTES])).unwrap();
    bench.control.command(&format!("fail {open} 201 always"));
    let mut lender = Child::start_self(ROLE, "lender SHM TCP").expect("a process starts");
    lender.say(&hex(&target.metadata().unwrap())).unwrap();
    assert_eq!(lender.hear(LONG).expect("the peer reports its write"), "written");
    assert!(all_of(region.memory())[..LENT_BYTES] == [9; LENT_BYTES]);
    assert!(bench.control.calls(open) > 0, "SHM was tried first");
    lender.say("revoke").unwrap();
    lender.hear(LONG).expect("the peer reports its revocation");
    target.shutdown(LONG).wait_blocking(LONG).unwrap();
}

/// For [`super::roles`]: lends a region for a write, and revokes it or shuts down when the parent
/// requests that.
pub(crate) fn lend(bench: &Bench<'_>, backends: &[&str]) {
    let agent = agent_over(backends, "lender", Arc::clone(&bench.device) as _);
    let out = agent.register("out", filled(&bench.device, &[9; LENT_BYTES])).unwrap();
    let peer = agent.connect(unhex(&hear())).unwrap();
    let there = peer.region("in").unwrap().grid(LENT).unwrap().blocks(0..LENT.count);
    let plan = Plan::write(out.grid(LENT).unwrap().blocks(0..LENT.count), there).unwrap();
    peer.transfer(&plan).deadline(LONG).post().unwrap().wait_blocking(LONG).unwrap();
    say("written");
    let revokes = hear() == "revoke";
    drop(plan);
    let begun = Instant::now();
    if revokes {
        out.revoke(LONG).wait_blocking(LONG).unwrap();
    } else {
        agent.shutdown(LONG).wait_blocking(LONG).unwrap();
    }
    say(&begun.elapsed().as_millis().to_string());
    agent.shutdown(LONG).wait_blocking(LONG).unwrap();
}

fn dropped(bench: &Bench<'_>) {
    let names = &bench.maker.names;
    let owner = Owner::start("owner 0");
    let theirs = owner.process.open(&bench.device, owner.device, &owner.handle, 1000).unwrap();
    let (pool, pinned) = (filled(&bench.device, &[1; 64]), bench.device.pinned(64).unwrap());
    for (function, memory) in [(names.close, theirs), (names.free, pool), (names.unpin, pinned)] {
        let before = bench.control.calls(function);
        make_slow(bench, function);
        at_once(function, || drop(memory));
        until("the memory is released", || bench.control.calls(function) > before);
        bench.control.command("well");
        assert_eq!(bench.control.calls_by(function, THREAD), bench.control.calls(function));
    }
}

/// Releases are queued, so a later pool must wait for them rather than find too little memory.
fn replaced(bench: &Bench<'_>) {
    bench.control.command(&format!("memory {}", 96 << 20));
    make_slow(bench, bench.maker.names.free);
    for _ in 0..2 {
        drop(bench.device.pool(64 << 20).build().unwrap());
    }
}

fn first_copy(bench: &Bench<'_>) {
    let device = (bench.maker.devices)().unwrap().remove(1);
    make_slow(bench, bench.maker.names.create_stream);
    let (completion, ticket) = Completion::with_ticket();
    at_once("the first copy", || copy_nothing(&device, ticket));
    bench.control.command("well");
    completion.wait_blocking(LONG).unwrap();
}

fn copy_nothing(device: &Device, done: Ticket) {
    // SAFETY: the call copies no bytes.
    unsafe { device.gather(DevicePtr(0), &[], &[0].into(), done) };
}

fn tried_again(bench: &Bench<'_>) {
    let device = (bench.maker.devices)().unwrap().remove(1);
    bench.control.command(&format!("fail {} 2 always", bench.maker.names.create_stream));
    for _ in 0..2 {
        settled(|done| copy_nothing(&device, done)).unwrap_err();
    }
    // The thread does not try without a copy, and so has no older error for the next one.
    std::thread::sleep(Duration::from_millis(50));
    bench.control.command("well");
    settled(|done| copy_nothing(&device, done)).unwrap();
}
