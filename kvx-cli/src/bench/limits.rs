//! The limits of a backend: the limits that apply to a point, and their rounds.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::access::{fetch, map, share};
use super::bare::{self, BareConnection};
use super::content::ShapeBlocks;
use super::device_limits::DeviceLimit;
use super::points::{BenchOp, Point, Shape};
use super::pools::{PoolKind, PoolLocation, Pools};
use super::rounds::{Round, timed};
use super::target::{Ask, TargetProcess};
use crate::Result;

/// A way to move the same blocks between the same pools without kvx.
pub(crate) struct Limit {
    pub(crate) name: &'static str,
    /// True if kvx cannot be faster; otherwise the limit is only shown next to kvx's figure.
    pub(crate) bounds: bool,
    way: LimitMethod,
    /// The point that the limit moves between both sides' pools; `None` if it has separate memory.
    pub(crate) moves: Option<Point>,
    /// The number of the limit's next transfer.
    next: u64,
    /// The seconds per transfer in the limit's last round.
    seconds_each: f64,
}

enum LimitMethod {
    /// This process copies out of the target's memory.
    Fetch { mapped: Option<u64>, from: PoolLocation, to: u64, blocks: ShapeBlocks },
    /// The target copies out of this process's memory.
    Pull { memory: PoolKind, shape: Shape, from: PoolLocation },
    /// Bare connections.
    Lanes { lanes: Vec<BareConnection>, sends: bool },
    /// The driver of a GPU.
    Driver(DeviceLimit),
}

impl Limit {
    /// Returns the limits of a point: one for each part of the path, none for a backend without a
    /// limit. `data` describes kvx's data connections over TCP.
    pub(crate) fn all(
        point: &Point,
        pools: &Pools,
        target: &mut TargetProcess,
        mapped: &mut Option<u64>,
        data: DataLanes,
    ) -> Result<Vec<Self>> {
        let by_driver = DeviceLimit::all(point)?.into_iter();
        let mut limits: Vec<_> = by_driver
            .map(|(limit, bounds)| Limit {
                bounds,
                ..Limit::new(limit.name, LimitMethod::Driver(limit), None)
            })
            .collect();
        let between_hosts = if limits.is_empty() { Some(*point) } else { point.between_hosts() };
        if let Some(point) = between_hosts {
            limits.extend(Limit::of(&point, pools, target, mapped, data)?);
        }
        Ok(limits)
    }

    fn new(name: &'static str, way: LimitMethod, moves: Option<Point>) -> Self {
        Limit { name, bounds: true, way, moves, next: 0, seconds_each: f64::MAX }
    }

    /// Returns the limit of a point between host memories.
    fn of(
        point: &Point,
        pools: &Pools,
        target: &mut TargetProcess,
        mapped: &mut Option<u64>,
        data: DataLanes,
    ) -> Result<Option<Self>> {
        let Point { op, shape, memory, .. } = *point;
        let (ours, theirs) = (memory.local(), memory.remote());
        let copy = if ours == PoolKind::Kvx { "memcpy" } else { "process_vm_readv" };
        let (name, way) = match (point.backend, op) {
            ("SHM", BenchOp::Read) => {
                let from = target.location(theirs)?;
                let mapped = map(from, mapped)?;
                let to = pools.get(ours)?.address();
                (copy, LimitMethod::Fetch { mapped, from, to, blocks: ShapeBlocks::of(shape) })
            }
            ("SHM", BenchOp::Write) => {
                (copy, LimitMethod::Pull { memory: theirs, shape, from: pools.location(ours)? })
            }
            ("TCP", _) => {
                let lanes = connect(point, pools.get(ours)?.address(), target, data)?;
                let name = if data.sealed { "sealed sockets" } else { "sockets" };
                (name, LimitMethod::Lanes { lanes, sends: op == BenchOp::Write })
            }
            _ => return Ok(None),
        };
        Ok(Some(Limit::new(name, way, Some(*point))))
    }

    /// Moves one list after the other until about `budget` has passed, and at least `least` lists.
    pub(crate) fn round(
        &mut self,
        target: &mut TargetProcess,
        budget: Duration,
        least: u64,
    ) -> Result<Round> {
        let times =
            ((budget.as_secs_f64() / self.seconds_each.max(1e-9)).min(1e6) as u64).max(least);
        let next = self.next;
        let round = match &mut self.way {
            LimitMethod::Fetch { mapped, from, to, blocks } => {
                // SAFETY: both sides' memory has all blocks of the point, and this process holds no
                // references into its own.
                timed(budget, least, |nth, _| unsafe {
                    fetch(*mapped, *from, *to, blocks.list(next + nth))
                })
            }
            LimitMethod::Pull { memory, shape, from } => {
                let ask =
                    Ask::Pull { memory: *memory, shape: *shape, from: *from, first: next, times };
                Ok(Round { times, seconds: target.ask(ask)?, ..Round::default() })
            }
            LimitMethod::Lanes { lanes, sends } if lanes.len() == 1 => {
                timed(budget, least, |_, _| bare::ask(lanes, *sends, 1))
            }
            LimitMethod::Lanes { lanes, sends } => {
                let start = Instant::now();
                bare::ask(lanes, *sends, times)?;
                Ok(Round { times, seconds: start.elapsed().as_secs_f64(), ..Round::default() })
            }
            LimitMethod::Driver(limit) => limit.round(next, budget, least),
        }?;
        self.next += round.times;
        self.seconds_each = round.seconds_each();
        Ok(round)
    }

    /// Moves the first lists of a limit with separate memory, and compares the bytes that arrived.
    pub(crate) fn verify(&mut self, lists: u64) -> Result<()> {
        if let LimitMethod::Driver(limit) = &self.way {
            (self.next, self.seconds_each) = (lists, limit.verify(lists)?);
        }
        Ok(())
    }
}

/// The connections that carry kvx's data over TCP.
#[derive(Clone, Copy)]
pub(crate) struct DataLanes {
    /// The number of connections.
    pub(crate) count: usize,
    /// True if payload is sealed.
    pub(crate) sealed: bool,
}

/// Opens as many connections as kvx has, but none without a block, and has the target accept them.
pub(crate) fn connect(
    point: &Point,
    base: u64,
    target: &mut TargetProcess,
    data: DataLanes,
) -> Result<Vec<BareConnection>> {
    let Point { op, shape, memory, .. } = *point;
    let DataLanes { count, sealed } = data;
    let lanes = count.min(shape.count as usize);
    let blocks = match op {
        BenchOp::Read => shape.to(),
        BenchOp::Write => shape.from(),
    };
    let ours = (0..lanes).map(|lane| {
        share(TcpStream::connect(target.address())?, (base, sealed), shape, &blocks, (lane, lanes))
    });
    let ours = ours.collect::<std::io::Result<Vec<_>>>()?;
    target.ask(Ask::Lanes { op, memory: memory.remote(), shape, lanes, sealed })?;
    Ok(ours)
}
