//! The caches of ranks in processes of their own, in the engine's process: what has been registered, and given back.

use kvx_core::{Error, ErrorKind, Result};

use super::super::listening::Listening;
use super::super::register::closed;
use super::super::state::Shared;
use super::super::words::{CopiedWords, Published};
use super::away::{Away, name, out_of_turn};
use crate::engine::{BlockReference, PoolBlocks, WorkerRank};
use crate::wire::NixlAgentMetadata;
use crate::wire::group::{OwnWords, ToRank};

impl Shared {
    /// Gives a rank the words that it registers beside its caches: a file that is shared with it, or what they are at
    /// first. The first rank with caches says of how many blocks.
    pub(super) fn give_words(&self, rank: WorkerRank, blocks: PoolBlocks) -> Result<()> {
        // Ranks register one after the other: the first one makes what they share.
        let _side = self.side.lock();
        let (first, distant) = {
            let state = self.state.lock();
            let away = state.ranks.get(&rank).and_then(|held| held.worker.away());
            (!state.others_have_words(rank), away.is_some_and(Away::is_distant))
        };
        // Made before the lock is held: they may be large.
        let fresh = first.then(|| Published::new(blocks.most(), self.digests())).transpose()?;
        let most = blocks.most();
        let shared = (!distant).then(|| CopiedWords::new(most)).transpose()?;
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(away) = state.ranks.get_mut(&rank).and_then(|held| held.worker.away_mut()) else {
            return Err(closed());
        };
        let known = state.pool.as_ref().map(PoolBlocks::most).filter(|_| !first);
        if let Some(known) = known.filter(|known| *known != blocks.most()) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} has {} logical blocks, another rank of this engine {known}: give all of them the same",
                    name(rank),
                    blocks.most()
                ),
            ));
        }
        away.has_words_now()?;
        if let Some(fresh) = fresh {
            (state.published, state.pool) = (Some(fresh), Some(blocks));
        }
        let published = state.published.as_mut().ok_or_else(closed)?;
        let (own, file) = match shared {
            Some((copy, file)) => {
                published.share(rank, copy);
                (None, Some(file))
            }
            // What was published before is stale: none of it lies in these caches.
            None => {
                let BlockReference { pool, stamp } = published.reference();
                (Some(OwnWords { pool, stamp, blocks: most }), None)
            }
        };
        // In the order in which blocks are raised, which happens under this lock.
        away.send(ToRank::Words(own), file);
        Ok(())
    }

    /// A rank has registered its caches: with the last, peers hear of all.
    pub(super) fn take_registration(
        &self,
        rank: WorkerRank,
        metadata: &[u8],
        host_copies: bool,
    ) -> Result<()> {
        let metadata = NixlAgentMetadata::decode(metadata, self.setup.settings.dialect)?;
        let listening = self.side.lock();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(away) = state.ranks.get_mut(&rank).and_then(|held| held.worker.away_mut()) else {
            return Ok(());
        };
        away.registered(metadata, host_copies)?;
        let Some(Listening::Nixl(side)) = listening.as_ref().filter(|_| state.missing().is_none())
        else {
            return Ok(());
        };
        for (rank, held) in &state.ranks {
            if let Some(metadata) = held.worker.away().and_then(Away::metadata) {
                let generation = side.publish(*rank, metadata);
                state.scheduler.registered(generation);
            }
        }
        let whole = state.gathered(Ok(()));
        drop((guard, listening));
        whole.settle();
        self.wake_up.notify_one();
        Ok(())
    }

    /// A rank gives its caches back: peers find it no more, and until it has registered others nothing is published or
    /// loaded. Its words stay until then, as peers may still read them. May block.
    pub(super) fn take_back(&self, rank: WorkerRank) -> Result<()> {
        let listening = self.side.lock();
        let mut state = self.state.lock();
        let away = state.ranks.get_mut(&rank).and_then(|held| held.worker.away_mut());
        away.ok_or_else(out_of_turn)?.gave_back()?;
        state.release_all();
        // What was published before goes to the ranks before they register others.
        let now = self.clock.now();
        let ready = state.scheduler.take_ready(now, None);
        state.pass_on(now, ready);
        drop(state);
        if let Some(Listening::Nixl(side)) = &*listening {
            side.withdraw(rank);
        }
        tracing::info!(pp = rank.pp, tp = rank.tp, "a rank gives its caches back");
        Ok(())
    }
}
