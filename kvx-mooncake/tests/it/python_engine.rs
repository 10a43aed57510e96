//! Tests kvx with Mooncake's own Python engine: each reads and writes the other's memory, and the
//! other may stop or die.

use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Agent, ErrorKind, Grid, Memory, MemoryKind, Options, Peer, Plan, Region};
use kvx_testkit::test;

use crate::adapter;
use crate::python::{Python, content};

const CUT_OFF: Duration = Duration::from_secs(10);
const BLOCK: usize = 4096;
const BLOCKS: usize = 256;
const LEN: usize = BLOCK * BLOCKS;

fn agent(name: &str) -> Agent {
    // One thread for blocking calls, so that a call that a stopped peer blocks would delay all
    // others.
    agent_with(name, r#"{"mooncake": {"num_workers": 1, "mooncake_protocol": "tcp"}}"#)
}

fn agent_with(name: &str, options: &str) -> Agent {
    Agent::builder(format!("{name}-{}", std::process::id()))
        .backends(["MOONCAKE"])
        .options(Options::parse(options).unwrap())
        .registry(adapter::registry(""))
        .build()
        .unwrap()
}

struct Pair {
    agent: Agent,
    region: Region,
    python: Python,
    peer: Peer,
}

/// Returns a kvx agent with zeros, connected to a Python agent.
fn pair(name: &str, adapter: &Path, len: usize) -> Pair {
    pair_of(agent(name), adapter, len)
}

fn pair_of(agent: Agent, adapter: &Path, len: usize) -> Pair {
    let python = Python::start(adapter, len);
    let region = agent.register("kv", Arc::new(Memory::owned(vec![0; len]))).unwrap();
    let peer = agent.connect_foreign("MOONCAKE", python.name.as_bytes()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    Pair { agent, region, python, peer }
}

impl Pair {
    fn grid(&self) -> Grid {
        Grid::packed(BLOCK as u64, (self.region.memory().len() / BLOCK) as u32)
    }

    fn plan(&self, write: bool, local: &[u32], remote: &[u32]) -> Plan {
        let there = self
            .peer
            .foreign(self.python.address, self.region.memory().len() as u64, MemoryKind::Host, 0)
            .unwrap();
        let local = self.region.grid(self.grid()).unwrap().blocks(local.to_vec());
        let remote = there.grid(self.grid()).unwrap().blocks(remote.to_vec());
        if write { Plan::write(local, remote) } else { Plan::read(local, remote) }.unwrap()
    }

    fn run(&self, plan: &Plan, deadline: Duration) -> kvx_core::Result<u64> {
        let transfer = self.peer.transfer(plan).deadline(deadline).post()?;
        transfer.wait_blocking(deadline + CUT_OFF).map(|report| report.bytes)
    }

    fn block(&self, block: u32) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        self.region.copy_out(block as usize * BLOCK, &mut bytes).unwrap();
        bytes
    }
}

fn content_of(block: u32) -> Vec<u8> {
    (block as usize * BLOCK..(block as usize + 1) * BLOCK).map(content).collect()
}

#[test(own_process)]
fn kvx_reads_from_and_writes_to_the_python_engine() {
    let Some(adapter) = adapter::or_skip("kvx_reads_from_and_writes_to_the_python_engine") else {
        return;
    };
    let mut pair = pair("initiator", &adapter, LEN);
    let order: Vec<u32> = (0..BLOCKS as u32).map(|at| at * 101 % BLOCKS as u32).collect();
    let reversed: Vec<u32> = (0..BLOCKS as u32).rev().collect();
    assert_eq!(pair.run(&pair.plan(false, &order, &reversed), CUT_OFF).unwrap(), LEN as u64);
    for (local, remote) in order.iter().zip(&reversed) {
        assert_eq!(pair.block(*local), content_of(*remote), "block {local}");
    }
    pair.region.copy_in(5 * BLOCK, &[0xC3; BLOCK]).unwrap();
    pair.run(&pair.plan(true, &[5], &[9]), CUT_OFF).unwrap();
    assert_eq!(pair.python.get(9 * BLOCK, BLOCK), [0xC3; BLOCK]);
    assert_eq!(pair.python.get(10 * BLOCK, BLOCK), content_of(10));
    let route = format!("{:?}", pair.peer.route());
    assert!(route.contains("MOONCAKE"), "{route}");
}

#[test(own_process)]
fn the_python_engine_reads_from_and_writes_to_kvx() {
    let Some(adapter) = adapter::or_skip("the_python_engine_reads_from_and_writes_to_kvx") else {
        return;
    };
    let mut python = Python::start(&adapter, LEN);
    let agent = agent("target");
    let region = agent.register("kv", Arc::new(Memory::owned(vec![0x5A; LEN]))).unwrap();
    let name = String::from_utf8(agent.foreign_metadata("MOONCAKE").unwrap()).unwrap();
    let address = region.memory().address();
    assert_eq!(python.ask(&format!("read {name} {address} 0 65537")), "0");
    assert_eq!(python.get(0, 65536), vec![0x5A; 65536]);
    assert_eq!(python.ask(&format!("write {name} {} 131072 10000", address + 777)), "0");
    let mut written = vec![0; 10002];
    region.copy_out(776, &mut written).unwrap();
    let wanted: Vec<u8> = (131072..141072).map(content).collect();
    assert_eq!(written[1..10001], wanted);
    assert_eq!([written[0], written[10001]], [0x5A; 2]);
    assert_ne!(
        python.ask(&format!("read {name} {} 0 16", address + LEN as u64)),
        "0",
        "after the end of the region"
    );
    // An agent with its metadata may have started an operation, so the memory is not released.
    let revoked = region.revoke(CUT_OFF).wait_blocking(CUT_OFF);
    assert_eq!(revoked.unwrap_err().kind(), ErrorKind::StillShared);
    assert_ne!(
        python.ask(&format!("read {name} {address} 0 16")),
        "0",
        "but no new operation is admitted"
    );
}

#[test(own_process)]
fn notifications_go_both_ways_and_text_only_toward_python() {
    let Some(adapter) = adapter::or_skip("notifications_go_both_ways_and_text_only_toward_python")
    else {
        return;
    };
    let mut pair = pair("herald", &adapter, LEN);
    pair.peer.notify("grüße".as_bytes(), CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    assert_eq!(pair.python.ask("heard"), format!("{}=grüße", pair.agent.identity().name));
    for bad in [&b"a\0b"[..], &[0xff]] {
        let refused = pair.peer.notify(bad, CUT_OFF).wait_blocking(CUT_OFF);
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
    }
    // The notification arrives after its data.
    pair.region.copy_in(0, &[7; BLOCK]).unwrap();
    let plan = pair.plan(true, &[0], &[3]);
    pair.peer
        .transfer(&plan)
        .deadline(CUT_OFF)
        .notify(*b"written")
        .post()
        .unwrap()
        .wait_blocking(CUT_OFF)
        .unwrap();
    assert!(pair.python.ask("heard").ends_with("=written"));
    assert_eq!(pair.python.get(3 * BLOCK, BLOCK), [7; BLOCK]);

    let name = String::from_utf8(pair.agent.foreign_metadata("MOONCAKE").unwrap()).unwrap();
    let address = pair.region.memory().address();
    assert_eq!(pair.python.ask(&format!("tell {name} {address} decode-7 all of it")), "0");
    let heard = pair.agent.notification(CUT_OFF).join().unwrap();
    assert_eq!((&*heard.from.name, &*heard.bytes), ("decode-7", &b"all of it"[..]));
}

#[test(own_process)]
fn a_hundred_thousand_blocks_move_with_default_settings() {
    let Some(adapter) = adapter::or_skip("a_hundred_thousand_blocks_move_with_default_settings")
    else {
        return;
    };
    const COUNT: u32 = 100_000;
    const SMALL: usize = 512;
    // The protocol is not a setting under test: Python gets the same.
    let agent = agent_with("bulk", r#"{"mooncake_protocol": "tcp"}"#);
    // A multiple of 64 KiB, after which the content repeats.
    let pair = pair_of(agent, &adapter, 800 << 16);
    let grid = Grid::packed(SMALL as u64, COUNT);
    let scattered = |by: u32| -> Vec<u32> {
        (0..COUNT).map(|at| (u64::from(at) * u64::from(by) % u64::from(COUNT)) as u32).collect()
    };
    let (local, remote) = (scattered(7_919), scattered(4_729));
    let there = pair.peer.foreign(pair.python.address, 800 << 16, MemoryKind::Host, 0).unwrap();
    let plan = Plan::read(
        pair.region.grid(grid).unwrap().blocks(local.clone()),
        there.grid(grid).unwrap().blocks(remote.clone()),
    )
    .unwrap();
    assert_eq!(plan.size().segments, u64::from(COUNT), "no blocks can be merged");
    pair.run(&plan, Duration::from_secs(60)).unwrap();
    let mut all = vec![0; COUNT as usize * SMALL];
    pair.region.copy_out(0, &mut all).unwrap();
    for (local, remote) in local.iter().zip(&remote) {
        let (at, from) = (*local as usize * SMALL, *remote as usize * SMALL);
        assert!(
            (0..SMALL).all(|byte| all[at + byte] == content(from + byte)),
            "block {local} is not {remote}"
        );
    }
}

#[test(own_process)]
fn unregistered_memory_fails_with_a_text_and_the_link_stays_usable() {
    const TEST: &str = "unregistered_memory_fails_with_a_text_and_the_link_stays_usable";
    let Some(adapter) = adapter::or_skip(TEST) else { return };
    // The engines of a process share one log, of which the last few lines are kept. This process
    // has no others.
    let pair = pair("prober", &adapter, LEN);
    let beyond = pair
        .peer
        .foreign(pair.python.address + LEN as u64, LEN as u64, MemoryKind::Host, 0)
        .unwrap();
    let plan = Plan::read(
        pair.region.grid(pair.grid()).unwrap().blocks([0, 2, 4]),
        beyond.grid(pair.grid()).unwrap().blocks([0, 2, 4]),
    )
    .unwrap();
    let error = pair.run(&plan, CUT_OFF).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Native, "{error}");
    let native = error.native().unwrap();
    assert!(native.code == 6 && native.text.contains("failed"), "{error}");
    assert!(native.text.contains("rejected"), "the engine's own message: {error}");
    pair.run(&pair.plan(false, &[1], &[2]), CUT_OFF).unwrap();
    assert_eq!(pair.block(1), content_of(2));
    assert_eq!(pair.block(0), vec![0; BLOCK], "the failed transfer moved nothing");
}

#[test(own_process)]
fn a_killed_python_is_lost_at_once() {
    let Some(adapter) = adapter::or_skip("a_killed_python_is_lost_at_once") else { return };
    let mut pair = pair("mourner", &adapter, LEN);
    let plan = pair.plan(false, &[0, 2, 4, 6], &[1, 3, 5, 7]);
    pair.run(&plan, CUT_OFF).unwrap();
    pair.python.kill();
    let begun = Instant::now();
    let error = pair.run(&plan, CUT_OFF).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert!(begun.elapsed() < CUT_OFF / 2, "it took {:?}", begun.elapsed());
    // The transfer's failure is reported first.
    while pair.peer.lost().is_none() {
        assert!(begun.elapsed() < CUT_OFF, "the loss is not detected");
        std::thread::sleep(Duration::from_millis(1));
    }
    let foreign = pair.agent.connect_foreign("MOONCAKE", pair.python.name.as_bytes()).unwrap();
    assert_eq!(
        foreign.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap_err().kind(),
        ErrorKind::PeerLost
    );
}

#[test(own_process)]
fn a_transfer_to_a_stopped_python_ends_by_its_deadline_and_its_memory_stays_until_it_continues() {
    const TEST: &str = "a_transfer_to_a_stopped_python_ends_by_its_deadline_and_its_memory_stays_until_it_continues";
    let Some(adapter) = adapter::or_skip(TEST) else { return };
    const DEADLINE: Duration = Duration::from_millis(300);
    let pair = pair("waiter", &adapter, LEN);
    let plan = pair.plan(false, &[0, 2, 4, 6], &[1, 3, 5, 7]);
    pair.run(&plan, CUT_OFF).unwrap();
    pair.region.copy_in(0, &[0; LEN]).unwrap();
    pair.python.stop();
    let begun = Instant::now();
    let transfer = pair.peer.transfer(&plan).deadline(DEADLINE).post().unwrap();
    let settled = transfer.settled();
    assert_eq!(transfer.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(begun.elapsed() < CUT_OFF / 2, "it took {:?}", begun.elapsed());
    let revoked = pair.region.revoke(DEADLINE).wait_blocking(CUT_OFF);
    assert_eq!(
        revoked.unwrap_err().kind(),
        ErrorKind::StillShared,
        "the engine may still write to it"
    );
    pair.python.go_on();
    settled.wait_blocking(CUT_OFF).unwrap();
    let again = pair.agent.register("again", Arc::new(Memory::owned(vec![0; LEN]))).unwrap();
    let pair = Pair { region: again, ..pair };
    pair.run(&pair.plan(false, &[1], &[2]), CUT_OFF).unwrap();
    assert_eq!(pair.block(1), content_of(2));
}

/// The engine can neither cancel operations nor end while they run. It writes to memory that must
/// not be reused.
#[test(own_process)]
fn memory_of_operations_to_a_stopped_python_is_quarantined_at_a_shutdown() {
    const TEST: &str = "memory_of_operations_to_a_stopped_python_is_quarantined_at_a_shutdown";
    let Some(adapter) = adapter::or_skip(TEST) else { return };
    const DEADLINE: Duration = Duration::from_millis(300);
    let pair = pair("deserter", &adapter, LEN);
    let memory = Arc::downgrade(pair.region.memory());
    let name = String::from_utf8(pair.agent.foreign_metadata("MOONCAKE").unwrap()).unwrap();
    let plan = pair.plan(false, &[0, 2, 4, 6], &[1, 3, 5, 7]);
    pair.run(&plan, CUT_OFF).unwrap();
    pair.region.copy_in(0, &[0; LEN]).unwrap();
    pair.python.stop();
    let transfer = pair.peer.transfer(&plan).deadline(DEADLINE).post().unwrap();
    let settled = transfer.settled();
    assert_eq!(transfer.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::TimedOut);
    let Pair { agent, region, python, peer } = pair;
    agent.shutdown(DEADLINE).wait_blocking(CUT_OFF).ok(); // an error: foreign agents have the region's metadata
    assert_eq!(settled.wait_blocking(CUT_OFF).unwrap_err().kind(), ErrorKind::Forgotten);
    drop((region, peer, plan, agent));
    let memory = memory.upgrade().expect("the engine may write to it");
    assert!(TcpStream::connect(name).is_ok(), "the engine ended while pieces were in flight");
    python.go_on();
    // Bytes that arrive now are written to the requested memory.
    let until = Instant::now() + CUT_OFF;
    for (local, remote) in [(0, 1), (2, 3), (4, 5), (6, 7)] {
        loop {
            let mut bytes = vec![0; BLOCK];
            memory.copy_out(local * BLOCK, &mut bytes).unwrap();
            if bytes == content_of(remote) {
                break;
            }
            assert!(Instant::now() < until, "block {local} did not arrive");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test(own_process)]
fn a_stopped_python_does_not_delay_other_peers() {
    let Some(adapter) = adapter::or_skip("a_stopped_python_does_not_delay_other_peers") else {
        return;
    };
    let pair = pair("diplomat", &adapter, LEN);
    let mut other = Python::start(&adapter, LEN);
    pair.python.stop();
    let held_up = pair.peer.notify(b"are you there?", CUT_OFF);
    let peer = pair.agent.connect_foreign("MOONCAKE", other.name.as_bytes()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    peer.notify(b"and you?", CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    assert!(other.ask("heard").ends_with("=and you?"));
    pair.python.go_on();
    held_up.wait_blocking(CUT_OFF).unwrap();
}

/// The engine's calls cannot be interrupted: one that a stopped peer blocks keeps the engine alive.
/// It serves no memory, and ends when the call returns.
#[test(own_process)]
fn a_stopped_python_keeps_the_engine_for_a_while_but_no_memory() {
    const TEST: &str = "a_stopped_python_keeps_the_engine_for_a_while_but_no_memory";
    let Some(adapter) = adapter::or_skip(TEST) else { return };
    let Pair { agent, region, python, peer } = pair("held", &adapter, LEN);
    let mut other = Python::start(&adapter, LEN);
    let name = String::from_utf8(agent.foreign_metadata("MOONCAKE").unwrap()).unwrap();
    let read = format!("read {name} {} 0 {BLOCK}", region.memory().address());
    assert_eq!(other.ask(&read), "0");
    python.stop();
    let held = peer.notify(b"are you there?", CUT_OFF);
    // There is one thread by default; another starts only because the first is blocked.
    let next = agent.connect_foreign("MOONCAKE", other.name.as_bytes()).unwrap();
    next.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let begun = Instant::now();
    agent.shutdown(CUT_OFF).wait_blocking(CUT_OFF).ok(); // an error: foreign agents have the region's metadata
    assert!(begun.elapsed() < CUT_OFF / 2, "it took {:?}", begun.elapsed());
    drop((region, peer, next, held, agent));
    let listens = || TcpStream::connect(&name).is_ok();
    assert!(listens(), "the engine ended during a call");
    assert_eq!(other.ask(&read), "-1");
    python.go_on();
    let begun = Instant::now();
    while listens() {
        assert!(
            begun.elapsed() < CUT_OFF / 2,
            "the engine stays although its last call has returned"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}
