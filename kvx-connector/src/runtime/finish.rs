//! Blocks that were read become what the engine reads: reordered, and cleared where nothing was read.

use std::sync::Arc;

use kvx_core::{Error, ErrorKind, Memory, Result};

use super::rank::Registered;
use super::state::Shared;
use crate::engine::{Connection, MoveLists, RequestId, WorkerRank};
use crate::mapping::{BlockPairs, Finishing, PeerMap};

impl Shared {
    /// Answers [`Action::Finish`](crate::engine::Action::Finish). Blocks: it copies.
    pub(super) fn finish(
        &self,
        rank: WorkerRank,
        request: &RequestId,
        connection: Connection,
        lists: &MoveLists,
    ) {
        let result = self.reorder(rank, connection, lists).map_err(|error| error.to_string());
        self.tell_worker(rank, |worker, now| worker.finished(now, request, result));
    }

    fn reorder(&self, rank: WorkerRank, connection: Connection, lists: &MoveLists) -> Result<()> {
        let own = self.registered(rank).ok_or_else(caches_are_gone)?;
        let link = self.link(rank, connection).ok_or_else(caches_are_gone)?;
        self.with_caches(rank, &own, |own| {
            link.map()
                .finishing()
                .map_or(Ok(()), |finishing| reorder(own, link.map(), finishing, lists))
        })
    }

    /// Works on these caches of a worker if it still has them. Whoever takes them back waits for that; who has taken
    /// them back already has them alone. Blocks.
    pub(super) fn with_caches<T>(
        &self,
        rank: WorkerRank,
        own: &Arc<Registered>,
        work: impl FnOnce(&Registered) -> Result<T>,
    ) -> Result<T> {
        let _finishing = own.finishing.blocking_read();
        if self.still_has(rank, own) { work(own) } else { Err(caches_are_gone()) }
    }

    /// Whether a worker has not given these caches back.
    pub(super) fn still_has(&self, rank: WorkerRank, own: &Arc<Registered>) -> bool {
        self.registered(rank).is_some_and(|now| Arc::ptr_eq(&now, own))
    }
}

pub(super) fn caches_are_gone() -> Error {
    Error::new(ErrorKind::Revoked, "the caches were given back before the blocks were finished")
}

/// Puts what was read into the order of these caches, and clears what was not.
fn reorder(
    own: &Registered,
    map: &PeerMap,
    finishing: &Finishing,
    lists: &MoveLists,
) -> Result<()> {
    let indices = |lists: &crate::engine::BlockLists| {
        lists.groups().iter().cloned().map(Into::into).collect()
    };
    let (local, remote): (Vec<_>, Vec<_>) = (indices(&lists.local), indices(&lists.remote));
    let moves = map.moves(&BlockPairs { local: &local, remote: &remote, tokens: lists.tokens })?;
    let (mut block, mut scratch) = (Vec::new(), Vec::new());
    for covered in
        moves.covered.iter().filter(|covered| finishing.reorders() || !covered.is_complete())
    {
        for region in finishing.regions_of(covered.group) {
            let held = &own.geometry().regions()[region as usize];
            let (memory, offset) = own.place(region)?;
            block.resize(usize::try_from(held.block_len).unwrap_or(usize::MAX), 0);
            for (index, filled) in covered.blocks() {
                let at = offset + held.grid().offset(index);
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                let memory: &Memory = memory.memory();
                memory.copy_out(at, &mut block)?;
                finishing.finish(region, &mut block, filled, &mut scratch)?;
                memory.copy_in(at, &block)?;
            }
        }
    }
    Ok(())
}
