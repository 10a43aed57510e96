//! Digests of blocks in the memory of ranks in processes of their own (`kvx_digest`).

use std::sync::Arc;

use kvx_core::Deadline;

use super::super::state::{Shared, State};
use super::SILENT;
use super::away::Task;
use super::joined::EngineChannel;
use crate::engine::{Fresh, WorkerRank};
use crate::wire::group::ToHead;

impl State {
    /// Has all ranks elsewhere write the digests of blocks that are about to be published.
    pub(in crate::runtime) fn digest_elsewhere(&mut self, fresh: &[Fresh]) -> Vec<Task> {
        let away = self.ranks.values_mut().filter_map(|held| held.worker.away_mut());
        away.flat_map(|away| away.digest(fresh)).collect()
    }
}

/// Waits until ranks have written digests. One that is lost meanwhile is not waited for. Blocks without a digest are
/// loaded by nobody.
pub(in crate::runtime) fn await_digests(asked: Vec<Task>) {
    let deadline = Deadline::from(SILENT);
    for done in asked {
        if done.wait(deadline).is_none() {
            tracing::warn!(
                "a rank has not written the digests of published blocks within {SILENT:?}: their loads fail"
            );
        }
    }
}

impl Shared {
    /// Writes the digests that the engine asks for, in the rank's process.
    pub(super) fn digest_here(
        self: &Arc<Self>,
        rank: WorkerRank,
        link: &Arc<EngineChannel>,
        number: u64,
        fresh: Vec<Fresh>,
    ) {
        let (shared, link) = (Arc::clone(self), Arc::clone(link));
        tokio::task::spawn_blocking(move || {
            if let Some(own) = shared.registered(rank) {
                shared.publish_digests(rank, &own, &fresh);
            }
            let done = ToHead::Done { number, failed: None };
            link.up.send(done).ok(); // an engine that has gone needs to hear nothing
        });
    }
}
