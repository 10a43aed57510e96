//! The measured points, and the order of their blocks.

use std::fmt;

use clap::ValueEnum;
use kvx::Grid;
use serde::{Deserialize, Serialize};

use super::pools::{PoolKind, Sizes};
use crate::bytes;

/// The most lists of a point. Each is a plan, and very small blocks fit into a cache in any case.
const MOST_LISTS: u64 = 256;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BenchOp {
    /// From the target's memory into the local memory.
    Read,
    /// From the local memory into the target's memory.
    Write,
}

/// The order of a transfer's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pattern {
    /// Shuffled, differently on each side.
    Scattered,
    /// In ascending order.
    Adjacent,
}

/// The memory of both sides; a single name stands for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Backing {
    /// A pool that kvx allocates.
    Kvx,
    /// Memory that the program allocates: anonymous pages.
    Foreign,
    /// A pool on the first GPU.
    Device,
    /// A pool on the first GPU at the initiator, and a pool of kvx at the target.
    DeviceHost,
    /// A pool of kvx at the initiator, and a pool on the first GPU at the target.
    HostDevice,
}

impl Backing {
    /// Returns the memory of this side.
    pub(crate) fn local(self) -> PoolKind {
        match self {
            Backing::Kvx | Backing::HostDevice => PoolKind::Kvx,
            Backing::Foreign => PoolKind::Foreign,
            Backing::Device | Backing::DeviceHost => PoolKind::Device,
        }
    }

    /// Returns the memory of the target.
    pub(crate) fn remote(self) -> PoolKind {
        match self {
            Backing::Kvx | Backing::DeviceHost => PoolKind::Kvx,
            Backing::Foreign => PoolKind::Foreign,
            Backing::Device | Backing::HostDevice => PoolKind::Device,
        }
    }

    /// Returns the memory of the source, then that of the destination.
    pub(crate) fn source_and_destination(self, op: BenchOp) -> (PoolKind, PoolKind) {
        match op {
            BenchOp::Read => (self.remote(), self.local()),
            BenchOp::Write => (self.local(), self.remote()),
        }
    }
}

/// How the initiator waits for a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Wait {
    /// `Transfer::wait`, which lets this thread drive the link.
    Block,
    /// `.await`: this thread sleeps until it is woken.
    Async,
}

/// The bytes that a point moves: enough to compute the lists of blocks on any side and in any
/// program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// The bytes of a block.
    pub(crate) block: u64,
    /// The number of blocks per transfer.
    pub(crate) count: u32,
    /// The number of transfers until the same blocks are moved again, so that no cache holds them.
    pub(crate) lists: u32,
    pub(crate) pattern: Pattern,
    /// The seed of the shuffle.
    pub(crate) seed: u64,
}

impl Shape {
    /// Returns the bytes of a transfer.
    pub(crate) fn bytes(self) -> u64 {
        self.block * u64::from(self.count)
    }

    /// Returns the bytes of memory on each side.
    pub(crate) fn memory(self) -> u64 {
        self.bytes() * u64::from(self.lists)
    }

    /// Returns all blocks of a side.
    pub(crate) fn grid(self) -> Grid {
        Grid::packed(self.block, self.count * self.lists)
    }

    /// Returns the blocks of the source in the order in which they are moved: `count` in each
    /// transfer.
    pub(crate) fn from(self) -> Vec<u32> {
        self.order(self.seed)
    }

    /// Returns the blocks of the destination: entry `i` receives entry `i` of the source.
    pub(crate) fn to(self) -> Vec<u32> {
        self.order(self.seed + 1)
    }

    /// Returns the part of all blocks that a transfer moves, by its number; parts repeat after
    /// `lists`.
    pub(crate) fn part(self, transfer: u64) -> std::ops::Range<usize> {
        let start = (transfer % u64::from(self.lists)) as usize * self.count as usize;
        start..start + self.count as usize
    }

    fn order(self, seed: u64) -> Vec<u32> {
        match self.pattern {
            Pattern::Scattered => shuffled(self.grid().count, seed),
            Pattern::Adjacent => (0..self.grid().count).collect(),
        }
    }
}

/// Returns the numbers below `count` in an order that depends only on `seed`, as `BESIDE.md`
/// specifies.
pub(crate) fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    let mut numbers: Vec<u32> = (0..count).collect();
    for at in (1..numbers.len()).rev() {
        numbers.swap(at, (random.next() % (at as u64 + 1)) as usize);
    }
    numbers
}

/// Pseudorandom numbers that depend only on their seed: SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }
}

/// A measured point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) backend: &'static str,
    pub(crate) op: BenchOp,
    pub(crate) shape: Shape,
    pub(crate) memory: Backing,
    pub(crate) wait: Wait,
}

impl Point {
    /// Returns the part between the hosts, for device memory that passes through sockets.
    pub(crate) fn between_hosts(&self) -> Option<Point> {
        let on_device = [self.memory.local(), self.memory.remote()].contains(&PoolKind::Device);
        (on_device && self.backend == "TCP").then_some(Point { memory: Backing::Kvx, ..*self })
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { block, count, pattern, .. } = self.shape;
        let (block, op) = (bytes::show(block), name(self.op));
        let (pattern, memory, wait) = (name(pattern), name(self.memory), name(self.wait));
        write!(f, "{} {op} {block} x{count} {pattern} {memory} {wait}", self.backend)
    }
}

/// Returns the memory that the points and their limits need, on this side and at the target.
pub(crate) fn memory(points: &[Point]) -> (Sizes, Sizes) {
    let (mut ours, mut theirs) = (Sizes::default(), Sizes::default());
    let needed = points.iter().flat_map(|point| [Some(*point), point.between_hosts()]);
    for point in needed.flatten() {
        ours.need(point.memory.local(), point.shape.memory());
        theirs.need(point.memory.remote(), point.shape.memory());
    }
    (ours, theirs)
}

/// Returns the name of a value on the command line.
pub(crate) fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Returns the number of transfers of `count` blocks that a pool of this size holds.
pub(crate) fn lists(block: u64, count: u32, pool: u64) -> u32 {
    let fit = pool / (block * u64::from(count));
    fit.min(u64::from(u32::MAX / count)).clamp(1, MOST_LISTS) as u32
}

#[cfg(test)]
impl Point {
    /// Returns the point whose line `BESIDE.md` has.
    pub(crate) fn of_the_document() -> Self {
        let shape =
            Shape { block: 4096, count: 1024, lists: 64, pattern: Pattern::Scattered, seed: 1 };
        let (op, memory, wait) = (BenchOp::Read, Backing::Kvx, Wait::Block);
        Point { backend: "SHM", op, shape, memory, wait }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `BESIDE.md` has these numbers, so that other programs can be checked against them.
    #[test]
    fn the_order_is_the_documented_one() {
        let document = include_str!("../../BESIDE.md");
        for (count, seed) in [(8, 1), (8, 2)] {
            let line = format!("shuffled({count}, {seed}) = {:?}", shuffled(count, seed));
            assert!(document.contains(&line), "{line}");
        }
    }

    #[test]
    fn both_sides_have_every_block_once() {
        let shape = Shape { block: 8, count: 25, lists: 4, pattern: Pattern::Scattered, seed: 3 };
        let (mut from, mut to) = (shape.from(), shape.to());
        assert_ne!(from, to);
        from.sort_unstable();
        to.sort_unstable();
        assert_eq!(from, (0..100).collect::<Vec<_>>());
        assert_eq!(from, to);
        let adjacent = Shape { pattern: Pattern::Adjacent, ..shape };
        assert_eq!(adjacent.from(), adjacent.to());
        assert_eq!((shape.bytes(), shape.memory()), (200, 800));
        assert_eq!([lists(10, 10, 1000), lists(8, 250, 1000), lists(1, 1, 1000)], [10, 1, 256]);
    }
}
