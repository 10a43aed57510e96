//! The limit beside a backend's figures: which one it is, and its rounds.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::ANSWER_PATIENCE;
use super::content::{self, Blocks};
use super::limit::{self, Lane, List};
use super::points::{Backing, Op, Point, Shape};
use super::pools::{Place, Pools};
use super::rounds::Round;
use super::target::{Ask, Target};
use crate::Result;

/// How the same blocks are moved between the same pools without kvx.
pub(crate) struct Limit {
    pub(crate) name: &'static str,
    way: Way,
    /// The number of its next transfer.
    next: u64,
}

enum Way {
    /// This process copies out of the target's memory.
    Fetch { mapped: Option<u64>, from: Place, to: u64, blocks: Blocks },
    /// The target copies out of this process's memory.
    Pull { memory: Backing, shape: Shape, from: Place },
    /// Bare connections.
    Lanes { lanes: Vec<Lane>, sends: bool },
}

/// The target's pool as it is mapped here, once it is.
pub(crate) type MappedPool = Option<u64>;

impl Limit {
    /// That of a point; none for a backend that has none. `connections`: how many kvx uses for its data over TCP.
    pub(crate) fn of(
        point: &Point,
        pools: &Pools,
        target: &mut Target,
        mapped: &mut MappedPool,
        connections: usize,
    ) -> Result<Option<Self>> {
        let Point { op, shape, memory, .. } = *point;
        let bare = match memory {
            Backing::Kvx => "memcpy",
            Backing::Foreign => "process_vm_readv",
        };
        Ok(match (point.backend, op) {
            ("SHM", Op::Read) => {
                let from = target.place(memory)?;
                if let (Some(file), None) = (from.file, &mapped) {
                    *mapped = Some(limit::map(from.process, file, from.len)?);
                }
                let mapped = from.file.and(*mapped);
                let to = pools.get(memory)?.address();
                Some(Limit {
                    name: bare,
                    way: Way::Fetch { mapped, from, to, blocks: Blocks::of(shape) },
                    next: 0,
                })
            }
            ("SHM", Op::Write) => Some(Limit {
                name: bare,
                way: Way::Pull { memory, shape, from: pools.place(memory)? },
                next: 0,
            }),
            ("TCP", _) => {
                let lanes = connect(point, pools.get(memory)?.address(), target, connections)?;
                Some(Limit { name: "sockets", way: Way::Lanes { lanes, sends: op == Op::Write }, next: 0 })
            }
            _ => None,
        })
    }

    /// Moves list after list until about `budget` has passed, and at least `least`; `pace` is how many seconds one
    /// took when it was last seen.
    pub(crate) fn round(
        &mut self,
        target: &mut Target,
        budget: Duration,
        pace: f64,
        least: u64,
    ) -> Result<Round> {
        let times = ((budget.as_secs_f64() / pace.max(1e-9)).min(1e6) as u64).max(least);
        let next = self.next;
        let round = match &mut self.way {
            Way::Fetch { mapped, from, to, blocks } => {
                // SAFETY: both sides' memory has all blocks of the point, and none of this process is lent out.
                timed(budget, least, |nth| unsafe { once(*mapped, *from, *to, blocks.list(next + nth)) })
            }
            Way::Pull { memory, shape, from } => {
                let ask = Ask::Pull { memory: *memory, shape: *shape, from: *from, first: next, times };
                Ok(Round { times, seconds: target.ask(ask)?, ..Round::default() })
            }
            Way::Lanes { lanes, sends } if lanes.len() == 1 => {
                timed(budget, least, |_| limit::ask(lanes, *sends, 1))
            }
            Way::Lanes { lanes, sends } => {
                let start = Instant::now();
                limit::ask(lanes, *sends, times)?;
                Ok(Round { times, seconds: start.elapsed().as_secs_f64(), ..Round::default() })
            }
        }?;
        self.next += round.times;
        Ok(round)
    }
}

/// As many connections as kvx has, but none without a block, and the target's ends of them.
pub(crate) fn connect(
    point: &Point,
    base: u64,
    target: &mut Target,
    connections: usize,
) -> Result<Vec<Lane>> {
    let Point { op, shape, memory, .. } = *point;
    let lanes = connections.min(shape.count as usize);
    let blocks = match op {
        Op::Read => shape.to(),
        Op::Write => shape.from(),
    };
    let ours = (0..lanes)
        .map(|lane| share(TcpStream::connect(target.address())?, base, shape, &blocks, (lane, lanes)));
    let ours = ours.collect::<Result<Vec<_>>>()?;
    target.ask(Ask::Lanes { op, memory, shape, lanes })?;
    Ok(ours)
}

/// Moves a list once out of memory of another process: by copying where it is mapped here, else by the kernel.
///
/// # Safety
/// The memory has all blocks of the list; nobody holds references into the destination.
pub(crate) unsafe fn once(mapped: Option<u64>, from: Place, to: u64, list: List<'_>) -> std::io::Result<()> {
    match mapped {
        Some(mapped) => {
            // SAFETY: the caller's promise; a mapping stays for the life of this process.
            unsafe { limit::copy(mapped, to, list) };
            Ok(())
        }
        // SAFETY: the caller's promise.
        None => unsafe { limit::read(from.process, from.base, to, list) },
    }
}

/// One end of a bare connection, with its share of each list: `of` is which lane, and of how many.
pub(crate) fn share(
    socket: TcpStream,
    base: u64,
    shape: Shape,
    blocks: &[u32],
    of: (usize, usize),
) -> Result<Lane> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(ANSWER_PATIENCE))?;
    socket.set_write_timeout(Some(ANSWER_PATIENCE))?;
    let lists = (0..u64::from(shape.lists)).map(|transfer| {
        let list = &blocks[content::part(shape, transfer)];
        list[list.len() * of.0 / of.1..list.len() * (of.0 + 1) / of.1].to_vec()
    });
    Ok(Lane { socket, base, length: shape.block as usize, lists: lists.collect(), next: 0 })
}

/// Does something again and again until `budget` has passed, and at least `least` times; it is told which time it is.
pub(crate) fn timed(
    budget: Duration,
    least: u64,
    mut act: impl FnMut(u64) -> std::io::Result<()>,
) -> Result<Round> {
    let mut round = Round::default();
    let start = Instant::now();
    let mut now = start;
    while round.times < least || now - start < budget {
        act(round.times)?;
        let done = Instant::now();
        round.each.push((done - now).as_secs_f64());
        round.times += 1;
        now = done;
    }
    round.seconds = (now - start).as_secs_f64();
    Ok(round)
}
