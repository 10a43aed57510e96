//! Writes on the initiator's side. It sends the target lists of blocks to pull, part by part, and
//! the target answers each part.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use kvx_core::backend::{BoundPlan, Pair, Ticket};
use kvx_core::{Error, ErrorKind, Result, TransferId};

use super::error::error;
use super::messages::{MAX_GRIDS, MAX_INDICES};
use crate::Settlement;
use crate::described::{self, Part};

/// The limit for unanswered parts of one connection.
pub(crate) const WINDOW: usize = 64;
/// The limit for unanswered parts of one write, so that other writes get their share of the window.
const PER_WRITE: usize = 4;

/// The writes of one connection that have not settled.
#[derive(Default)]
pub(crate) struct Writes {
    open: HashMap<u64, Write>,
    /// The writes whose parts are sent next. Contains each open write with parts left and space in
    /// its window once.
    turns: VecDeque<u64>,
    unanswered: usize,
}

struct Write {
    plan: Arc<BoundPlan>,
    parts: PartCutter,
    unanswered: usize,
    queued: bool,
    /// The error with which the write will settle; no further part is sent.
    failed: Option<Error>,
    /// True if a part of the write has been pulled.
    moved: bool,
    done: Ticket,
}

impl Writes {
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(crate) fn start(&mut self, id: TransferId, plan: Arc<BoundPlan>, done: Ticket) {
        let parts = PartCutter::default();
        self.open.insert(
            id.0,
            Write { plan, parts, unanswered: 0, queued: true, failed: None, moved: false, done },
        );
        self.turns.push_back(id.0);
    }

    /// Returns the next part that may be sent, with its write, or a write that settled because it
    /// had no parts left.
    pub(crate) fn next_part(&mut self) -> Option<WriteStep> {
        while self.unanswered < WINDOW {
            let id = self.turns.pop_front()?;
            // Expected: the write settled while it waited for its turn.
            let Some(write) = self.open.get_mut(&id) else { continue };
            write.queued = false;
            let part =
                if write.failed.is_none() { write.parts.next(write.plan.pairs()) } else { None };
            let Some(part) = part else {
                match self.settled(id) {
                    Some(settled) => return Some(WriteStep::Settled(settled)),
                    None => continue,
                }
            };
            write.unanswered += 1;
            self.unanswered += 1;
            let plan = Arc::clone(&write.plan);
            if write.unanswered < PER_WRITE {
                write.queued = true;
                self.turns.push_back(id);
            }
            return Some(WriteStep::Part(id, plan, part));
        }
        None
    }

    /// Takes the answer to a part. Returns `Malformed` if no such part is unanswered.
    pub(crate) fn take_answer(&mut self, id: u64, result: Result<()>) -> Result<()> {
        match self.open.get_mut(&id) {
            Some(write) if write.unanswered > 0 => {
                write.unanswered -= 1;
                self.unanswered -= 1;
                match result {
                    Ok(()) => write.moved = true,
                    Err(refused) => {
                        write.failed.get_or_insert(refused);
                    }
                }
                if !write.queued {
                    write.queued = true;
                    self.turns.push_back(id);
                }
                Ok(())
            }
            _ => Err(error(
                ErrorKind::Malformed,
                "malformed SHM message: an answer to an unknown write",
            )),
        }
    }

    /// Returns the write's ticket, if no part of it is unanswered and none will follow.
    fn settled(&mut self, id: u64) -> Option<Settlement> {
        if self.open.get(&id)?.unanswered > 0 {
            return None;
        }
        let write = self.open.remove(&id)?;
        let result = match write.failed {
            None => Ok(()),
            // `Unsupported` would mean that nothing has moved.
            Some(error) if write.moved && error.kind() == ErrorKind::Unsupported => {
                Err(error.with_kind(ErrorKind::Native))
            }
            Some(error) => Err(error),
        };
        Some((write.done, result))
    }

    /// Fails a write. Returns `None` if it has unanswered parts; it then settles when they are
    /// answered.
    pub(crate) fn fail(&mut self, id: u64, error: Error) -> Option<Settlement> {
        self.open.get_mut(&id)?.failed.get_or_insert(error);
        self.settled(id)
    }

    /// Returns true if a write has not settled.
    pub(crate) fn contains(&self, id: u64) -> bool {
        self.open.contains_key(&id)
    }

    /// Fails all writes. Returns those without unanswered parts, or all if `proven`: the peer holds
    /// no memory any more.
    pub(crate) fn fail_all(&mut self, error: &Error, proven: bool) -> Vec<Settlement> {
        let ids: Vec<u64> = self.open.keys().copied().collect();
        for id in &ids {
            if let Some(write) = self.open.get_mut(id) {
                write.failed.get_or_insert_with(|| error.clone());
                if proven {
                    self.unanswered -= write.unanswered;
                    write.unanswered = 0;
                }
            }
        }
        ids.into_iter().filter_map(|id| self.settled(id)).collect()
    }

    /// Drops the tickets of writes whose memory the peer may still read, which quarantines it.
    pub(crate) fn forget_all(&mut self) -> usize {
        let count = self.open.len();
        self.open.clear();
        count
    }
}

pub(crate) enum WriteStep {
    Part(u64, Arc<BoundPlan>, Part),
    Settled(Settlement),
}

/// Cuts the pairs of a plan into parts, each of which fits into a packet.
#[derive(Debug, Default)]
struct PartCutter {
    pair: usize,
    grid: usize,
    at: usize,
}

impl PartCutter {
    fn next(&mut self, pairs: &[Pair]) -> Option<Part> {
        loop {
            let pair = pairs.get(self.pair)?;
            let (count, grids) = (pair.local_indices.len(), pair.local.len());
            if count == 0 || self.grid >= grids {
                *self = PartCutter { pair: self.pair + 1, grid: 0, at: 0 };
                continue;
            }
            let ranges =
                pair.local_indices.as_range().is_some() && pair.remote_indices.as_range().is_some();
            let most = if ranges { described::MAX_INDICES } else { MAX_INDICES };
            let chosen: Range<usize> = self.grid..grids.min(self.grid + MAX_GRIDS);
            let indices = self.at..count.min(self.at + most);
            self.at = indices.end;
            if self.at == count {
                (self.grid, self.at) = (chosen.end, 0);
            }
            return Some(Part { pair: self.pair, grids: chosen, indices });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use kvx_core::backend::PlacedGrid;
    use kvx_core::{Grid, Indices};

    use super::*;

    fn pair(grids: usize, local: Indices, remote: Indices) -> Pair {
        let grids: Arc<[PlacedGrid]> =
            vec![PlacedGrid { region: 0, grid: Grid::packed(64, 1 << 20) }; grids].into();
        Pair {
            local: Arc::clone(&grids),
            remote: grids,
            local_indices: local,
            remote_indices: remote,
        }
    }

    #[test]
    fn parts_cover_every_block_once_and_fit() {
        let list = |count: u32| Indices::from((0..count).rev().collect::<Vec<_>>());
        let pairs = [
            pair(300, list(13_000), (0..13_000).into()),
            pair(1, list(0), list(0)),
            pair(2, (5..900_000).into(), (6..900_001).into()),
            pair(1, list(1), list(1)),
        ];
        let mut seen = HashSet::new();
        let mut parts = PartCutter::default();
        while let Some(part) = parts.next(&pairs) {
            assert!(part.grids.len() <= MAX_GRIDS && !part.indices.is_empty());
            assert!(
                part.indices.len()
                    <= if part.pair == 2 { described::MAX_INDICES } else { MAX_INDICES }
            );
            for grid in part.grids.clone() {
                for index in part.indices.clone().step_by(100).chain([part.indices.end - 1]) {
                    assert!(seen.insert((part.pair, grid, index)) || index == part.indices.end - 1);
                }
            }
        }
        for (number, pair) in pairs.iter().enumerate() {
            let covered = |grid| {
                let count = pair.local_indices.len();
                count == 0
                    || seen.contains(&(number, grid, count - 1))
                        && seen.contains(&(number, grid, 0))
            };
            assert!((0..pair.local.len()).all(covered), "pair {number}");
        }
    }
}
