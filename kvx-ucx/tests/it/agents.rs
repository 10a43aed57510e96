//! Tests whole agents: their routes on each version, and agents with different versions.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::{Duration, Instant};

use kvx_core::{Agent, ErrorKind, Grid, Memory, Options, Peer, Plan, Region};
use kvx_testkit::{hex, test, unhex};

use crate::registry;
use crate::versions::{self, VERSIONS, Version};

const PATIENCE: Duration = Duration::from_secs(10);
const BLOCK: u64 = 4096;
const BLOCKS: u32 = 64;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// An agent with a region whose blocks hold `content`.
fn agent(name: &str, content: u8) -> Outcome<(Agent, Region)> {
    agent_with(name, "{}", vec![content; BLOCK as usize * BLOCKS as usize])
}

fn agent_with(name: &str, options: &str, memory: Vec<u8>) -> Outcome<(Agent, Region)> {
    let builder = Agent::builder(name).backends(["UCX"]).options(Options::parse(options)?);
    let agent = builder.registry(registry("")).build()?;
    let region = agent.register("kv", Memory::owned(memory))?;
    Ok((agent, region))
}

/// Reads the first half of the peer's region into the first half of the local one, and writes the
/// local second half to the peer's.
fn both_ways(near: &Region, peer: &Peer) -> kvx_core::Result<()> {
    half_each_way(near, peer, Grid::packed(BLOCK, BLOCKS))
}

fn half_each_way(near: &Region, peer: &Peer, grid: Grid) -> kvx_core::Result<()> {
    peer.ready(PATIENCE).wait_blocking(PATIENCE)?;
    let (ours, theirs) = (near.grid(grid)?, peer.region("kv")?.grid(grid)?);
    let (first, second) = (0..BLOCKS / 2, BLOCKS / 2..BLOCKS);
    let read = Plan::read(ours.blocks(first.clone()), theirs.blocks(first))?;
    peer.post(&read)?.wait_blocking(PATIENCE)?;
    let write = Plan::write(ours.blocks(second.clone()), theirs.blocks(second))?;
    peer.post(&write)?.wait_blocking(PATIENCE)?;
    Ok(())
}

/// Returns the first byte of the first and of the last block.
fn ends(region: &Region) -> Outcome<(u8, u8)> {
    let mut bytes = vec![0; BLOCK as usize * BLOCKS as usize];
    region.copy_out(0, &mut bytes)?;
    Ok((bytes[0], bytes[bytes.len() - 1]))
}

#[test]
fn the_route_tells_which_protocols_ucx_has_chosen() {
    versions::on_each("agents::the_route_tells_which_protocols_ucx_has_chosen", |version| {
        let ((near, ours), (far, theirs)) = (agent("near", 1).unwrap(), agent("far", 2).unwrap());
        let peer = near.connect(far.metadata().unwrap()).unwrap();
        peer.ready(PATIENCE).wait_blocking(PATIENCE).unwrap();
        assert!(peer.route().to_string().contains("lanes "), "{}", peer.route());
        both_ways(&ours, &peer).unwrap();
        assert_eq!((ends(&ours).unwrap(), ends(&theirs).unwrap()), ((2, 1), (2, 1)));
        // 1.13 prints no tables of protocols.
        let (gets, puts) = if version.number >= (1, 22) {
            ("gets: 0..inf zero-copy", "puts: 0..inf zero-copy")
        } else {
            ("", "")
        };
        let until = Instant::now() + PATIENCE;
        loop {
            let route = peer.route().to_string();
            if route.contains(gets) && route.contains(puts) {
                break;
            }
            assert!(Instant::now() < until, "{route}");
            std::thread::sleep(Duration::from_millis(1));
        }
        near.shutdown(PATIENCE).wait_blocking(PATIENCE).unwrap();
        far.shutdown(PATIENCE).wait_blocking(PATIENCE).unwrap();
    });
}

/// Returns the number of address ranges that this process has mapped.
fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").expect("Linux lists them").lines().count()
}

#[test]
fn peers_that_were_shut_down_leave_nothing_behind() {
    versions::on_each("agents::peers_that_were_shut_down_leave_nothing_behind", |_| {
        let (stays, _region) = agent("stays", 1).unwrap();
        let mut after = Vec::new();
        for number in 0..12 {
            let (goes, ours) = agent(&format!("goes-{number}"), 2).unwrap();
            let to = stays.connect(goes.metadata().unwrap()).unwrap();
            let from = goes.connect(stays.metadata().unwrap()).unwrap();
            to.ready(PATIENCE).wait_blocking(PATIENCE).unwrap();
            both_ways(&ours, &from).unwrap();
            goes.shutdown(PATIENCE).wait_blocking(PATIENCE).unwrap();
            drop((goes, ours, from));
            // The far side detects the end over this link as well, without sending anything.
            let until = Instant::now() + PATIENCE;
            while to.lost().is_none() {
                assert!(Instant::now() < until, "agent {number} is still connected");
                std::thread::sleep(Duration::from_millis(1));
            }
            after.push(mappings());
        }
        // Over shared memory, UCX maps three ranges for an endpoint.
        let (first, last) = (after[2], after[11]);
        assert!(last <= first + 9, "{after:?}");
    });
}

/// Returns the number of progress threads of an agent. Each sets its name when it first runs.
fn threads_of(agent: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("kvx-ucx") && name.trim_end().ends_with(agent)).count()
}

#[test]
fn as_many_threads_make_progress_as_were_asked_for_whatever_the_peer_has() {
    const NAME: &str =
        "agents::as_many_threads_make_progress_as_were_asked_for_whatever_the_peer_has";
    /// Large enough that each thread moves a part of every transfer.
    const LARGE: usize = 64 << 10;
    let content = |first: u8| (0..BLOCKS as u8).flat_map(|block| [first + block; LARGE]).collect();
    let with = |threads: usize| format!(r#"{{"num_threads": {threads}}}"#);
    versions::on_each(NAME, |_| {
        for (ours, theirs) in [(3, 1), (1, 3), (3, 2)] {
            let (near, local) = agent_with("near", &with(ours), content(0)).unwrap();
            let (far, remote) = agent_with("far", &with(theirs), content(100)).unwrap();
            let until = Instant::now() + PATIENCE;
            while (threads_of("near"), threads_of("far")) != (ours, theirs) {
                assert!(Instant::now() < until, "{} and {}", threads_of("near"), threads_of("far"));
                std::thread::sleep(Duration::from_millis(1));
            }
            let peer = near.connect(far.metadata().unwrap()).unwrap();
            half_each_way(&local, &peer, Grid::packed(LARGE as u64, BLOCKS)).unwrap();
            let mut block = [0; LARGE];
            for number in 0..BLOCKS as u8 {
                let (region, first) =
                    if number < BLOCKS as u8 / 2 { (&local, 100) } else { (&remote, 0) };
                region.copy_out(usize::from(number) * LARGE, &mut block).unwrap();
                assert!(
                    block.iter().all(|byte| *byte == first + number),
                    "{ours} to {theirs}: block {number}"
                );
            }
            near.shutdown(PATIENCE).wait_blocking(PATIENCE).unwrap();
            far.shutdown(PATIENCE).wait_blocking(PATIENCE).unwrap();
        }
    });
}

/// Set in a child: the owner's metadata in the reader; empty in the owner.
const OWNER: &str = "KVX_UCX_TEST_OWNER";

/// Runs the owner or the reader if this process was started for that.
pub(crate) fn play_if_asked() {
    let Ok(owner) = std::env::var(OWNER) else { return };
    match owner.as_str() {
        "" => own(),
        metadata => reach(metadata),
    }
    .unwrap();
    std::process::exit(0);
}

#[test]
fn versions_with_different_keys_are_refused_both_ways() {
    const NAME: &str = "versions_with_different_keys_are_refused_both_ways";
    for (owner, reader) in [("UCX-1.22", "UCX-1.13"), ("UCX-1.13", "UCX-1.22")] {
        let command = |label| {
            let version =
                VERSIONS.iter().find(|version: &&Version| version.label == label).unwrap();
            version.command()
        };
        let (mut owner, mut reader) = match (command(owner), command(reader)) {
            (Ok(owner), Ok(reader)) => (owner, reader),
            (Err((reason, cure)), _) | (_, Err((reason, cure))) => {
                return kvx_testkit::skip(NAME, &reason, cure);
            }
        };
        // UCX logs on standard output by default, also into the middle of the owner's lines.
        let owner = owner.env(OWNER, "").env("UCX_LOG_FILE", "stderr");
        let owner = owner.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut owner = owner.spawn().unwrap();
        kvx_testkit::kill_after(&owner, 5 * PATIENCE);
        let mut lines = BufReader::new(owner.stdout.take().unwrap()).lines().map_while(Result::ok);
        let metadata =
            lines.find_map(|line| line.strip_prefix("metadata ").map(str::to_owned)).unwrap();
        let output = kvx_testkit::output(reader.env(OWNER, metadata), 3 * PATIENCE);
        drop(owner.stdin.take()); // the owner checks its memory and ends
        let told: Vec<String> = lines.collect();
        let (read, wrong) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{read}\n{wrong}");
        assert!(owner.wait().unwrap().success(), "{told:?}");
    }
}

/// Serves its region until its standard input is closed.
fn own() -> Outcome {
    let (agent, region) = agent("owner", 2)?;
    println!("metadata {}", hex(&agent.metadata()?));
    std::io::stdin().read_to_end(&mut Vec::new())?;
    assert_eq!(ends(&region)?, (2, 2));
    agent.shutdown(PATIENCE).wait_blocking(PATIENCE)?;
    Ok(())
}

fn reach(metadata: &str) -> Outcome {
    let (agent, region) = agent("reader", 1)?;
    let peer = agent.connect(unhex(metadata))?;
    let why = both_ways(&region, &peer).expect_err("the keys of these versions differ");
    assert_eq!(why.kind(), ErrorKind::Incompatible);
    assert!(why.to_string().contains("install one version"), "{why}");
    assert_eq!(ends(&region)?, (1, 1));
    agent.shutdown(PATIENCE).wait_blocking(PATIENCE)?;
    Ok(())
}
