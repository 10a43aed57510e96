//! The flags of `kvx bench`, and the points that they select.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvx::Registry;

use super::compare::CompareArguments;
use super::figures::{self, Output};
use super::points::{self, Backing, BenchOp, Pattern, Point, Shape, Wait};
use super::sweep::SweepArguments;
use crate::{Result, bytes};

/// The flags of `bench`.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, after_help = HELP)]
pub(crate) struct Arguments {
    /// Another measurement, or a comparison.
    #[command(subcommand)]
    pub(crate) command: Option<BenchCommand>,
    /// The backends to measure.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "SHM,TCP")]
    pub(crate) backend: Vec<String>,
    /// Read from the target, or write to it.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "read,write")]
    pub(crate) op: Vec<BenchOp>,
    /// Block sizes.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = bytes::parse, default_value = "4K,64K,1M")]
    pub(crate) block: Vec<u64>,
    /// Blocks per transfer.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,64,1024,8192")]
    pub(crate) count: Vec<u32>,
    /// The order of a transfer's blocks: shuffled on both sides, or adjacent.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "scattered")]
    pub(crate) pattern: Vec<Pattern>,
    /// Pools that kvx allocates, memory of the program, or memory of the first GPU: on both sides, or
    /// with a pool of kvx at the target (device-host) or at the initiator (host-device).
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "kvx")]
    pub(crate) memory: Vec<Backing>,
    /// Block this thread, which then helps the link, or wait as `.await` does.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "block")]
    pub(crate) wait: Vec<Wait>,
    /// Rounds per point. Ratios of fewer than 11 rounds are printed with that number.
    #[arg(long, value_name = "N", default_value_t = figures::ENOUGH_ROUNDS)]
    pub(crate) rounds: usize,
    /// The approximate time per point, over all rounds and parties.
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    pub(crate) seconds: f64,
    /// Print JSON lines, also on a terminal. They have the rates of all rounds, for `kvx bench
    /// compare`.
    #[arg(long)]
    pub(crate) json: bool,
    /// Also write a report: a page with plots (.html), or the plots alone (.svg). It needs no
    /// network. May be repeated.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["beside_bulk", "notices_beside", "readers", "idle", "kernels"])]
    pub(crate) report: Vec<PathBuf>,
    /// Skip points that move more bytes per transfer.
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, default_value = "1G")]
    pub(crate) max_total: u64,
    /// Memory per side, unless one transfer needs more. Consecutive transfers move different blocks
    /// of it, so that caches do not hold them.
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, default_value = "256M")]
    pub(crate) pool: u64,
    /// A companion program that moves the same blocks in alternating rounds (BESIDE.md).
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) beside: Option<String>,
    /// Options of both agents, as the JSON object kv_connector_extra_config.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    pub(crate) options: String,
    /// The seed of the shuffles.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Instead of points: measure small reads alone, and during a transfer of this size on the same
    /// link.
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, conflicts_with_all = ["beside", "readers", "idle"])]
    pub(crate) beside_bulk: Option<u64>,
    /// Instead of points: measure notifications when idle, and during transfers of this size between
    /// the same two agents.
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, conflicts_with_all = ["beside", "beside_bulk", "readers", "idle", "op", "pattern", "memory"])]
    pub(crate) notices_beside: Option<u64>,
    /// Instead of points: let this many agents read from the target at once.
    #[arg(long, value_name = "N", conflicts_with_all = ["beside", "idle"])]
    pub(crate) readers: Option<u32>,
    /// Instead of points: measure the CPU time of both processes while they are connected and idle
    /// for this many seconds.
    #[arg(long, value_name = "S", conflicts_with = "beside")]
    pub(crate) idle: Option<u64>,
    /// Instead of points: measure the kernels of the first GPU that gather and scatter blocks, next
    /// to one copy of as many bytes.
    #[arg(long, conflicts_with_all = ["beside", "beside_bulk", "notices_beside", "readers", "idle", "backend", "op", "pattern", "memory", "wait"])]
    pub(crate) kernels: bool,
}

/// The other commands of `bench`.
#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// Compare the points of two runs: before and after a change, or on two machines.
    Compare(CompareArguments),
    /// Measure the KV cache of real models: GB/s, tokens per second, seconds per prompt.
    Sweep(SweepArguments),
}

const HELP: &str = "\
GB/s are 1e9 bytes per second, also in the JSON field gbps; sizes are KiB, MiB and GiB, and 4K is 4 KiB.
The limit moves the same blocks between the same two processes without kvx: with memcpy or
process_vm_readv next to SHM, over bare sockets next to TCP, by the driver's copies for a GPU. Other
backends have no limit here: name a program of yours with --beside. RATIO is kvx's GB/s divided by
the limit's in the same round, and the median over the rounds: 1.00 is as fast as without kvx, 0.50
takes twice the time.

Examples:
  kvx bench --report bench.html                 # all points, as a page with plots
  kvx bench --json > before.json                # then change something, and measure after.json
  kvx bench compare before.json after.json --fail-if-slower 10
  kvx bench sweep --model Llama-3.1-8B";

/// The settings and the output of every mode.
pub(crate) struct Bench<'a> {
    pub(crate) arguments: &'a Arguments,
    pub(crate) registry: &'a Registry,
    pub(crate) output: Output<'a>,
}

impl Arguments {
    /// Checks the values that clap does not check.
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(block) =
            self.block.iter().find(|block| **block == 0 || **block > 1 << 30 || **block % 8 != 0)
        {
            return Err(format!("--block {block}: write a multiple of 8, at most 1 GiB").into());
        }
        if self.count.contains(&0) || self.readers == Some(0) {
            return Err("--count and --readers must be at least 1".into());
        }
        Ok(())
    }

    /// Returns the selected points, in order, and those that exceed --max-total.
    pub(crate) fn sweep(&self, backends: &[&'static str]) -> (Vec<Point>, Vec<Point>) {
        let mut points = Vec::new();
        for backend in backends.iter().copied() {
            for memory in self.memory.iter().copied() {
                for op in self.op.iter().copied() {
                    for wait in self.wait.iter().copied() {
                        for pattern in self.pattern.iter().copied() {
                            let shape = |block, count| {
                                let lists = points::lists(block, count, self.pool);
                                Shape { block, count, lists, pattern, seed: self.seed }
                            };
                            let counts =
                                |block| self.count.iter().map(move |count| shape(block, *count));
                            let shapes = self.block.iter().flat_map(|block| counts(*block));
                            points.extend(shapes.map(|shape| Point {
                                backend,
                                op,
                                shape,
                                memory,
                                wait,
                            }));
                        }
                    }
                }
            }
        }
        points.into_iter().partition(|point| point.shape.bytes() <= self.max_total)
    }
}
