//! Requests in an engine's queue, with the calls of a step loop: they arrive, and get their blocks
//! later.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvx::Result;
use kvx::connector::{
    Allocation, Arrival, BlockLists, Connector, Ending, Kept, Loaded, Outcome, Released, RequestId,
    TransferParams, WorkerRank,
};

use crate::engines::engine::{Failed, Holder, refused};

/// The outcomes of queued requests.
#[derive(Default)]
pub(crate) struct Queue {
    ended: HashMap<RequestId, std::result::Result<Loaded, Failed>>,
    released: HashMap<RequestId, Released>,
}

/// Adds a request.
pub(crate) fn arrive(
    connector: &Connector,
    request: &RequestId,
    prompt_tokens: u32,
    params: &TransferParams,
    within: Duration,
) -> Result<()> {
    let deadline = Some(connector.time(within));
    let arrival = Arrival { request, prompt_tokens, params: Some(params), deadline };
    connector.on_new_request(arrival).map_err(refused)
}

/// Gives a request these blocks, unless it has ended or there is nothing to load. Returns whether
/// it uses them.
pub(crate) fn admit(
    connector: &Connector,
    ranks: impl Iterator<Item = WorkerRank>,
    request: &RequestId,
    blocks: &[u32],
) -> Result<bool> {
    let external = connector.get_num_new_matched_tokens(request, 0).tokens;
    if external == 0 {
        return Ok(false);
    }
    let allocation = Allocation { fill: BlockLists::single(blocks), computed: 0, external };
    connector.update_state_after_alloc(request, allocation)?;
    connector.step();
    for rank in ranks {
        connector.rank(rank)?.start_load_kv();
    }
    Ok(true)
}

/// Ends a request that has finished or is no longer wanted. Returns whether its blocks are still
/// held.
pub(crate) fn finish(connector: &Connector, request: &RequestId) -> bool {
    connector.request_finished(request, Ending::aborted()).delay_free
}

impl Queue {
    /// Returns how a load has ended, or `None` if it does not end in time.
    pub(crate) fn end(
        &mut self,
        connector: &Connector,
        request: &RequestId,
        patience: Duration,
    ) -> Option<std::result::Result<Loaded, Failed>> {
        let until = Instant::now() + patience;
        loop {
            self.hear(connector);
            if let Some(end) = self.ended.remove(request) {
                finish(connector, request);
                return Some(end);
            }
            if !connector.outcomes_ready_blocking(until.saturating_duration_since(Instant::now())) {
                return None;
            }
        }
    }

    /// Returns how the blocks that a load held were released, if they were.
    pub(crate) fn released(
        &mut self,
        connector: &Connector,
        request: &RequestId,
    ) -> Option<Released> {
        self.hear(connector);
        self.released.remove(request)
    }

    fn hear(&mut self, connector: &Connector) {
        for outcome in connector.outcomes() {
            match outcome {
                Outcome::Loaded { request, computed } => {
                    self.ended.insert(request, Ok(Loaded { tokens: 0..computed }));
                }
                Outcome::Failed { request, failure, then, invalid, held } => {
                    let holder = (!held.is_empty()).then(|| Holder::Queued(request.clone()));
                    self.ended.insert(
                        request,
                        Err(Failed { why: failure.to_string(), then, invalid, holder }),
                    );
                }
                Outcome::Free { request, kept: Kept::Load } => {
                    self.released.insert(request, Released::Free);
                }
                Outcome::Lost { request, kept: Kept::Load } => {
                    self.released.insert(request, Released::Lost);
                }
                // The holder of the lease observes these.
                Outcome::Free { .. } | Outcome::Lost { .. } => {}
            }
        }
    }
}
