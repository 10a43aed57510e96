//! Blocks that were loaded into the copies: on to the device, before the engine hears of them.

use std::collections::HashMap;
use std::sync::Arc;

use kvx_core::{Deadline, Error, ErrorKind, Result};

use super::super::rank::Registered;
use super::super::state::{RankState, Shared};
use super::may_go_on;
use crate::engine::{
    BlockLists, ConnectorMeta, FailedLoad, Kept, LoadFailure, RequestId, Time, WorkerOutput,
    WorkerRank,
};

/// Loads of a worker with such copies.
#[derive(Default)]
pub(in crate::runtime) struct Filling {
    /// On their way to the host.
    loads: HashMap<RequestId, FilledBlocks>,
    /// On the host, and to be copied to the device.
    due: Vec<Due>,
    /// The same, copied or not.
    done: Vec<(RequestId, BlockLists, Result<()>)>,
}

/// What a load fills, of the caches that it began with.
struct FilledBlocks {
    own: Arc<Registered>,
    blocks: BlockLists,
}

/// A load whose blocks are on the host.
pub(in crate::runtime) struct Due {
    rank: WorkerRank,
    request: RequestId,
    filled: FilledBlocks,
}

impl RankState {
    /// Has the worker take the message of a step.
    pub(in crate::runtime) fn begin(&mut self, now: Time, meta: ConnectorMeta) {
        if let Some((own, copies)) =
            self.registered.as_ref().and_then(|own| Some((own, own.host_copies.as_ref()?)))
        {
            for order in
                meta.receive.iter().filter(|order| order.awaited && !order.local.is_empty())
            {
                copies.forget(&order.local);
                let filled = FilledBlocks { own: Arc::clone(own), blocks: order.local.clone() };
                self.filling.loads.insert(order.request.clone(), filled);
            }
            for request in &meta.cancel {
                self.filling.loads.remove(request);
            }
        }
        self.worker.start_load_kv(now, meta);
    }

    /// What the worker has to tell, but of loads whose blocks are still to be copied to the device.
    pub(in crate::runtime) fn take_said(&mut self, rank: WorkerRank, now: Time) -> WorkerOutput {
        let mut output = self.worker.get_finished(now);
        let Filling { loads, due, done } = &mut self.filling;
        if !loads.is_empty() {
            for failed in &output.failed_recving {
                loads.remove(&failed.request);
            }
            output.finished_recving.retain(|request| match loads.remove(request) {
                Some(filled) => {
                    due.push(Due { rank, request: request.clone(), filled });
                    false
                }
                None => true,
            });
        }
        for (request, blocks, result) in done.drain(..) {
            if let Err(error) = result {
                if may_go_on(&error) {
                    output.lost.push((request.clone(), Kept::Load));
                }
                let failure = LoadFailure::Transfer(error.to_string());
                let invalid = blocks.ascending();
                output.failed_recving.push(FailedLoad {
                    request: request.clone(),
                    failure,
                    invalid,
                });
            }
            output.finished_recving.push(request);
        }
        output
    }

    /// Loads that are to be copied to the device.
    pub(in crate::runtime) fn take_due(&mut self) -> Vec<Due> {
        std::mem::take(&mut self.filling.due)
    }
}

impl Shared {
    /// Copies loaded blocks to the device, and lets the worker's half say so. Blocks.
    pub(in crate::runtime) fn fill(
        &self,
        Due { rank, request, filled: FilledBlocks { own, blocks } }: Due,
    ) {
        let result = self.with_caches(rank, &own, |own| own.copies()?.fill(&blocks));
        if let Some(held) = self.state.lock().ranks.get_mut(&rank) {
            held.filling.done.push((request, blocks, result));
        }
        self.wake_up.notify_one();
    }

    /// Ends when nothing writes to a worker's copies that was ordered before the loads that it has begun. Errors: not
    /// by the deadline, or perhaps never.
    pub(in crate::runtime) async fn copies_are_idle(
        &self,
        rank: WorkerRank,
        deadline: Deadline,
    ) -> Result<()> {
        let Some(own) = self.registered(rank) else { return Ok(()) };
        let Some(copies) = &own.host_copies else { return Ok(()) };
        match tokio::time::timeout(deadline.left(), copies.copying.lock()).await {
            Ok(_) => copies.check(),
            Err(_) => Err(Error::new(
                ErrorKind::TimedOut,
                "the blocks were still being copied to the host",
            )),
        }
    }
}
