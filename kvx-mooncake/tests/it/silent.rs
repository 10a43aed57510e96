//! Tests a peer that is stopped for longer than the engine waits: transfers in flight fail, and
//! move nothing more when the peer continues. The engine waits 30 s, or as long as its variables
//! say, hence a separate process with other values.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Agent, ErrorKind, Grid, Memory, MemoryKind, Options, Peer, Plan, Region};
use kvx_testkit::{Check, is_own_process, run_in_own_process, test};

use crate::adapter;
use crate::python::{Python, content};

/// For operations that take seconds on an idle machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time during which memory that nobody may write is observed.
const LOOKS: Duration = Duration::from_millis(300);
const SMALL: usize = 4096;
/// The maximum length of a piece.
const LARGE: usize = 1 << 20;
const LEN: usize = 8 * LARGE;
/// As many as the engine moves to one peer at a time, none adjacent to another.
const BLOCKS: [u32; 4] = [0, 2, 4, 6];
/// Small blocks between large ones.
const OTHERS: [u32; 4] = [256, 258, 260, 262];

/// The byte that fills the memory after the failure.
const OVER: u8 = 0xBB;

struct Pair {
    agent: Agent,
    region: Region,
    python: Python,
    peer: Peer,
}

impl Pair {
    fn plan(&self, write: bool, block: usize, theirs: [u32; 4]) -> Plan {
        let grid = Grid::packed(block as u64, (LEN / block) as u32);
        let remote =
            self.peer.foreign(self.python.address, LEN as u64, MemoryKind::Host, 0).unwrap();
        let (local, remote) = (self.region.grid(grid).unwrap(), remote.grid(grid).unwrap());
        let (local, remote) = (local.blocks(BLOCKS), remote.blocks(theirs));
        if write { Plan::write(local, remote) } else { Plan::read(local, remote) }.unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.region.copy_out(0, &mut bytes).unwrap();
        bytes
    }

    /// Moves blocks while Python is stopped, until the transfer fails. Then overwrites the local
    /// blocks and lets Python continue.
    fn fails(&mut self, write: bool, block: usize) {
        let plan = self.plan(write, block, BLOCKS);
        self.region.copy_in(0, &vec![0xAA; LEN]).unwrap();
        self.python.stop();
        let transfer = self.peer.transfer(&plan).deadline(PATIENCE).post().unwrap();
        let settled = transfer.settled();
        let why = transfer.wait_blocking(PATIENCE).unwrap_err();
        assert_eq!(why.kind(), ErrorKind::Native, "the engine gave up first: {why}");
        settled.wait_blocking(PATIENCE).unwrap();
        self.region.copy_in(0, &vec![OVER; LEN]).unwrap();
        self.python.go_on();
        let until = Instant::now() + LOOKS;
        while Instant::now() < until {
            assert!(self.bytes().iter().all(|byte| *byte == OVER), "bytes arrived after the end");
            let found = self.python.ask(&format!("find {}", "bb".repeat(SMALL)));
            assert_eq!(found, "-1", "bytes were read after the end");
        }
    }

    /// Waits until the peer responds: on a busy machine it may be silent for a second even if it
    /// runs.
    fn works(&self) {
        let (plan, until) = (self.plan(false, SMALL, OTHERS), Instant::now() + PATIENCE);
        loop {
            let transfer = self.peer.transfer(&plan).deadline(PATIENCE).post().unwrap();
            match transfer.wait_blocking(PATIENCE) {
                Err(why) if why.kind() == ErrorKind::Native && Instant::now() < until => {}
                result => {
                    result.unwrap();
                    break;
                }
            }
        }
        let bytes = self.bytes();
        for (ours, theirs) in BLOCKS.into_iter().zip(OTHERS) {
            let [at, from] = [ours, theirs].map(|block| block as usize * SMALL);
            assert!(
                (0..SMALL).all(|byte| bytes[at + byte] == content(from + byte)),
                "block {ours}"
            );
        }
    }
}

#[test]
fn failed_transfers_move_nothing_when_the_stopped_peer_continues() -> Check {
    const TEST: &str = "silent::failed_transfers_move_nothing_when_the_stopped_peer_continues";
    let Some(adapter) = adapter::or_skip(TEST) else { return Ok(()) };
    if !is_own_process() {
        let variables = [("MC_TCP_STATUS_TIMEOUT_SEC", "1"), ("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")];
        return run_in_own_process(TEST, |command| _ = command.envs(variables));
    }
    let python = Python::start(&adapter, LEN);
    let agent = Agent::builder(format!("patient-{}", std::process::id())).backends(["MOONCAKE"]);
    let agent = agent.options(Options::parse(r#"{"mooncake_protocol": "tcp"}"#).unwrap());
    let agent = agent.registry(adapter::registry("")).build().unwrap();
    let region = agent.register("kv", Arc::new(Memory::owned(vec![0; LEN]))).unwrap();
    let peer = agent.connect_foreign("MOONCAKE", python.name.as_bytes()).unwrap();
    peer.ready(PATIENCE).wait_blocking(PATIENCE).unwrap();
    let mut pair = Pair { agent, region, python, peer };
    pair.works();
    for (write, block) in [(false, SMALL), (true, LARGE)] {
        pair.fails(write, block);
        pair.works();
    }
    pair.agent.shutdown(PATIENCE).wait_blocking(PATIENCE).unwrap();
    Ok(())
}
