//! Regions that a decode lets a prefill write into, for one request each, and their revocation.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, Region, Result};
use tokio::sync::{OnceCell, oneshot};

use kvx_vllm::engine::{RequestId, WorkerRank};
use kvx_vllm::wire::PushGrant;

/// The delay before another wait for a revocation that has not ended.
const RETRY: Duration = Duration::from_secs(60);

/// The regions that peers may write into for one request, by worker.
#[derive(Debug, Default)]
pub(super) struct GrantedWrites(BTreeMap<WorkerRank, Vec<Region>>);

impl GrantedWrites {
    pub(super) fn new(regions: BTreeMap<WorkerRank, Vec<Region>>) -> Self {
        GrantedWrites(regions)
    }

    /// Returns the grants as the registration of a push carries them.
    pub(super) fn metadata(&self) -> Result<Vec<PushGrant>> {
        let grant = |(rank, regions): (&WorkerRank, &Vec<Region>)| {
            let regions = regions.iter().map(Region::metadata).collect::<Result<_>>()?;
            Ok(PushGrant { pp: rank.pp, tp: rank.tp, regions })
        };
        self.0.iter().map(grant).collect()
    }

    /// Returns the grants of one worker.
    pub(super) fn metadata_of(&self, rank: WorkerRank) -> Result<Vec<Vec<u8>>> {
        self.0.get(&rank).into_iter().flatten().map(Region::metadata).collect()
    }

    pub(super) fn regions(&self) -> impl Iterator<Item = &Region> {
        self.0.values().flatten()
    }

    /// Waits until no peer can write through this grant any more. Errors: the revocation failed for
    /// good.
    pub(super) async fn revoked(&self) -> Result<()> {
        // Starts all revocations, then waits for each.
        let begun: Vec<_> = self.regions().map(|region| region.revoke(RETRY)).collect();
        drop(begun);
        for region in self.regions() {
            loop {
                let since = Instant::now();
                match region.revoke(RETRY).await {
                    Ok(_) => break,
                    Err(error)
                        if error.kind() == ErrorKind::StillShared && since.elapsed() >= RETRY => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

/// The permission of peers to write for a request.
#[derive(Debug)]
pub(super) enum Grant {
    /// Peers may write until the request is fenced or over.
    Active(Arc<GrantedWrites>),
    /// Peers must not write any more. Kept until the request is over, because another worker may
    /// still be about to register it.
    Fenced(Arc<GrantedWrites>),
    /// A plain Mooncake agent knows where the memory is. Its writes cannot be ended.
    Foreign(Arc<GrantedWrites>),
}

impl Grant {
    fn writes(&self) -> &Arc<GrantedWrites> {
        match self {
            Grant::Active(writes) | Grant::Fenced(writes) | Grant::Foreign(writes) => writes,
        }
    }
}

/// The grants of all workers of an engine for a request.
pub(super) type GrantsOfRanks = Result<Vec<PushGrant>>;

/// The grants of one engine, or of the process of one rank.
#[derive(Default)]
pub(super) struct Grants {
    by_request: HashMap<RequestId, Grant>,
    /// Grants of requests that are over, which are to be revoked.
    spent: Vec<Arc<GrantedWrites>>,
    last: u64,
    /// In the engine's process: the grants that all ranks have given.
    collected: HashMap<RequestId, Arc<OnceCell<GrantsOfRanks>>>,
    /// In the engine's process: requests whose grants ranks have asked for.
    wanted: Vec<(WorkerRank, RequestId)>,
    /// In the process of a rank: its questions to the engine.
    asked: HashMap<RequestId, oneshot::Sender<GrantsOfRanks>>,
}

impl Grants {
    pub(super) fn get(&self, request: &RequestId) -> Option<&Grant> {
        self.by_request.get(request)
    }

    /// Returns the number of the next grant.
    pub(super) fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn activate(&mut self, request: &RequestId, writes: &Arc<GrantedWrites>) {
        self.by_request.insert(request.clone(), Grant::Active(Arc::clone(writes)));
    }

    /// Records that a foreign agent is about to learn where the blocks of a request are. Returns
    /// false if the request is fenced: the agent must not learn it then.
    pub(super) fn open_to_foreign(&mut self, request: &RequestId) -> bool {
        let before = self.by_request.get(request);
        if matches!(before, Some(Grant::Fenced(_))) {
            return false;
        }
        let writes = before.map_or_else(Arc::default, |grant| Arc::clone(grant.writes()));
        self.by_request.insert(request.clone(), Grant::Foreign(writes));
        true
    }

    /// Ends all grants for this request. Errors: a foreign agent may write at any later time.
    pub(super) fn fence(
        &mut self,
        request: &RequestId,
    ) -> Result<Arc<GrantedWrites>, Arc<GrantedWrites>> {
        let writes = match self.by_request.get(request) {
            Some(Grant::Foreign(writes)) => return Err(Arc::clone(writes)),
            before => before.map_or_else(Arc::default, |grant| Arc::clone(grant.writes())),
        };
        self.by_request.insert(request.clone(), Grant::Fenced(Arc::clone(&writes)));
        Ok(writes)
    }

    /// Records a grant that no peer knows of, so that it is revoked.
    pub(super) fn discard(&mut self, writes: Arc<GrantedWrites>) {
        self.spent.push(writes);
    }

    /// Ends the grants of a load that is over, so that they are revoked.
    pub(super) fn end(&mut self, request: &RequestId) {
        self.collected.remove(request);
        self.asked.remove(request);
        if let Some(grant) = self.by_request.remove(request) {
            self.spent.push(Arc::clone(grant.writes()));
        }
    }

    pub(super) fn take_spent(&mut self) -> Vec<Arc<GrantedWrites>> {
        std::mem::take(&mut self.spent)
    }

    /// Returns the cell for the grants of all ranks for a request, which are collected once.
    pub(super) fn collected(&mut self, request: &RequestId) -> Arc<OnceCell<GrantsOfRanks>> {
        Arc::clone(self.collected.entry(request.clone()).or_default())
    }

    /// Records that a rank asks for the grants of all ranks.
    pub(super) fn want(&mut self, rank: WorkerRank, request: RequestId) {
        self.wanted.push((rank, request));
    }

    /// Takes the questions of ranks, except those about loads that some worker has not started yet.
    pub(super) fn take_wanted(
        &mut self,
        is_pending: impl Fn(&RequestId) -> bool,
    ) -> Vec<(WorkerRank, RequestId)> {
        let wanted = std::mem::take(&mut self.wanted);
        let (early, due) = wanted.into_iter().partition(|(_, request)| is_pending(request));
        self.wanted = early;
        due
    }

    /// Records a question to the engine. Returns the receiver of the answer.
    pub(super) fn ask(&mut self, request: &RequestId) -> oneshot::Receiver<GrantsOfRanks> {
        let (sender, answer) = oneshot::channel();
        self.asked.insert(request.clone(), sender);
        answer
    }

    /// Delivers the engine's answer.
    pub(super) fn answer(&mut self, request: &RequestId, grants: GrantsOfRanks) {
        if let Some(asked) = self.asked.remove(request) {
            asked.send(grants).ok(); // the load may be over
        }
    }

    /// Drops all questions, because the engine of this rank has ended.
    pub(super) fn forget_questions(&mut self) {
        self.asked.clear();
    }
}

/// Returns the error of a grant for a request that was aborted.
pub(super) fn given_up() -> Error {
    ErrorKind::Revoked.because("the request was aborted, so no peer may write for it")
}
