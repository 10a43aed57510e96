//! An engine in this process, and its ranks in others.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvx_connector::{Connector, ConnectorBuilder, Decode, Fetch, Lease, Prefill};
use kvx_core::{Completion, Result};
use kvx_testkit::{Child, Hosts, free_port};
use kvx_vllm::params::TransferParams;

use super::rank::VARIABLE;
use crate::runtime::rig::{BLOCKS, LIMIT, builder, host, lists};

/// An engine whose ranks are processes.
pub(crate) struct Fleet {
    pub(crate) connector: Connector,
    pub(crate) ranks: Vec<Child>,
    pub(crate) path: PathBuf,
    pub(crate) tp: u32,
}

pub(crate) fn extra(backend: &str) -> String {
    format!(r#"{{"backends": ["{backend}"], "kv_lease_duration": 5}}"#)
}

/// Starts the process of a rank that registers `blocks` blocks. With 0 it only joins.
pub(crate) fn rank_of(path: &Path, rank: u32, tp: u32, blocks: u32) -> Child {
    rank_with(path, rank, tp, blocks, |_| {})
}

/// Starts the process of a rank in its own environment. With two hosts, every second rank runs on
/// the other one, and so does a single one.
pub(crate) fn rank_with(
    path: &Path,
    rank: u32,
    tp: u32,
    blocks: u32,
    surround: impl FnOnce(&mut Command),
) -> Child {
    let program = std::env::current_exe().unwrap();
    let mut command = match Hosts::way_to_far().filter(|_| rank % 2 == 1 || tp == 1) {
        None => Command::new(program),
        Some(way) => {
            let mut command = Command::new(&way[0]);
            command.args(&way[1..]).arg(program);
            command
        }
    };
    command.env(VARIABLE, spec(path, rank, tp, blocks));
    surround(&mut command);
    Child::start(command).unwrap()
}

/// Returns the specification that such a process gets.
pub(crate) fn spec(path: &Path, rank: u32, tp: u32, blocks: u32) -> String {
    format!("{} {rank} {tp} {blocks}", path.display())
}

pub(crate) fn rank(path: &Path, at: u32, tp: u32) -> Child {
    rank_of(path, at, tp, BLOCKS)
}

pub(crate) fn heard(rank: &Child) -> String {
    rank.hear(LIMIT).unwrap_or_else(|why| panic!("{why}"))
}

/// The prefix of a path that is a TCP address.
pub(crate) const OVER_TCP: &str = "tcp:";

/// Returns a path for a socket that no other test has. On two hosts it is an address.
pub(crate) fn path(engine: &str) -> PathBuf {
    if Hosts::way_to_far().is_some() {
        return format!("{OVER_TCP}{}:{}", host(), free_port(0).unwrap()).into();
    }
    static LAST: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = LAST.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    std::env::temp_dir().join(format!("kvx-ranks-{}-{engine}-{number}", std::process::id()))
}

/// Lets ranks join at a path or address.
pub(crate) fn group(connector: &Connector, path: &Path, deadline: Duration) -> Completion<()> {
    match path.to_str().and_then(|path| path.strip_prefix(OVER_TCP)) {
        Some(address) => connector.group_over_tcp(address.parse().unwrap(), deadline),
        None => connector.group(path, deadline),
    }
}

impl Fleet {
    /// Starts an engine of `tp` ranks, and waits until all have joined.
    pub(crate) fn new(engine: &str, backend: &str, tp: u32) -> Self {
        Fleet::of(builder(engine, &extra(backend)), engine, tp)
    }

    /// Starts an engine from a builder.
    pub(crate) fn of(builder: ConnectorBuilder, engine: &str, tp: u32) -> Self {
        Fleet::of_ranks(builder, engine, tp, rank)
    }

    /// Starts an engine whose ranks are started by `start`.
    pub(crate) fn of_ranks(
        builder: ConnectorBuilder,
        engine: &str,
        tp: u32,
        start: fn(&Path, u32, u32) -> Child,
    ) -> Self {
        let (mut fleet, whole) = Fleet::awaited(builder, engine, tp, LIMIT);
        fleet.ranks = (0..tp).map(|at| start(&fleet.path, at, tp)).collect();
        whole.wait_blocking(LIMIT).unwrap();
        for rank in &fleet.ranks {
            assert_eq!(heard(rank), "ready");
        }
        fleet
    }

    /// Starts an engine whose ranks have not joined yet.
    pub(crate) fn awaiting(
        engine: &str,
        backend: &str,
        tp: u32,
        deadline: Duration,
    ) -> (Self, Completion<()>) {
        Fleet::awaited(builder(engine, &extra(backend)), engine, tp, deadline)
    }

    pub(crate) fn awaited(
        builder: ConnectorBuilder,
        engine: &str,
        tp: u32,
        deadline: Duration,
    ) -> (Self, Completion<()>) {
        let connector = builder.workers(tp, 1).build_blocking().unwrap();
        let path = path(engine);
        let whole = group(&connector, &path, deadline);
        (Fleet { connector, ranks: Vec::new(), path, tp }, whole)
    }

    pub(crate) fn ask(&mut self, line: &str) -> Vec<String> {
        let ask = |rank: &mut Child| {
            rank.say(line).unwrap_or_else(|why| panic!("{why}"));
            heard(rank)
        };
        self.ranks.iter_mut().map(ask).collect()
    }

    /// Asks one of its ranks.
    pub(crate) fn ask_one(&mut self, rank: usize, line: &str) -> String {
        self.ranks[rank].say(line).unwrap_or_else(|why| panic!("{why}"));
        heard(&self.ranks[rank])
    }

    /// Computes tokens of a request into these blocks, on all ranks.
    pub(crate) fn compute(&mut self, request: u16, blocks: &[u32], tokens: u32) {
        let done = self.ask(&format!("compute {request} {} {tokens}", joined(blocks)));
        assert!(done.iter().all(|answer| answer == "done"), "{done:?}");
    }

    /// Computes tokens of a request on one of its ranks.
    pub(crate) fn compute_on(&mut self, rank: usize, request: u16, blocks: &[u32], tokens: u32) {
        let line = format!("compute {request} {} {tokens}", joined(blocks));
        self.ranks[rank].say(&line).unwrap_or_else(|why| panic!("{why}"));
        assert_eq!(heard(&self.ranks[rank]), "done");
    }

    /// Counts the tokens in these blocks that do not belong to the request, on all ranks.
    pub(crate) fn wrong(
        &mut self,
        request: u16,
        blocks: &[u32],
        tokens: std::ops::Range<u32>,
    ) -> usize {
        let line = format!("wrong {request} {} {} {}", joined(blocks), tokens.start, tokens.end);
        self.ask(&line).iter().map(|count| count.parse::<usize>().unwrap()).sum()
    }

    pub(crate) fn publish(
        &self,
        request: &str,
        blocks: &[u32],
        tokens: u32,
    ) -> Result<(Lease, TransferParams)> {
        Fleet::publish_by(&self.connector, request, blocks, tokens)
    }

    /// Publishes blocks while another command is sent to the ranks.
    pub(crate) fn publish_by(
        connector: &Connector,
        request: &str,
        blocks: &[u32],
        tokens: u32,
    ) -> Result<(Lease, TransferParams)> {
        Prefill::new(connector).publish(request, lists(blocks), tokens)
    }

    pub(crate) fn fetch(
        &self,
        request: &str,
        params: &TransferParams,
        blocks: &[u32],
        by: Duration,
    ) -> Fetch {
        Decode::new(&self.connector).fetch(request, params, 0, lists(blocks), by)
    }

    /// Ends the engine. Its ranks confirm that nothing touches their memory any more.
    pub(crate) fn end(mut self) {
        self.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
        let ended = self.ask("ended");
        assert!(ended.iter().all(|answer| answer == "ended"), "{ended:?}");
        assert!(!self.path.exists(), "the socket is left behind");
    }
}

fn joined(blocks: &[u32]) -> String {
    blocks.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}
