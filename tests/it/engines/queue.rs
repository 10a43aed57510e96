//! Requests in an engine's own queue, by the calls of a step loop: they arrive, and get their blocks later.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvx::Result;
use kvx::connector::{
    Allocation, Arrival, BlockLists, Connector, Ending, Kept, Loaded, Outcome, Released, RequestId,
    TransferParams, WorkerRank,
};

use crate::engines::engine::{Failed, Holder, refused};

/// What has become of them.
#[derive(Default)]
pub(crate) struct Queue {
    ended: HashMap<RequestId, std::result::Result<Loaded, Failed>>,
    released: HashMap<RequestId, Released>,
}

/// A request arrives.
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

/// It gets these blocks, if there is something to load for it: not if it is over. Says whether it has got them.
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

/// It is over, or nobody wants it any more. Says whether its blocks are still held.
pub(crate) fn finish(connector: &Connector, request: &RequestId) -> bool {
    connector.request_finished(request, Ending::aborted()).delay_free
}

impl Queue {
    /// How a load has ended; `None`: not in time.
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

    /// What has become of blocks that a load held.
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
                Outcome::Free { .. } | Outcome::Lost { .. } => {} // somebody has a lease, and hears of it there
            }
        }
    }
}
