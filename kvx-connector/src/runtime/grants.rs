//! Regions that a decode lets a prefill write into, for one request each, and what becomes of them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, Region, Result};
use tokio::sync::{OnceCell, oneshot};

use kvx_vllm::engine::{RequestId, WorkerRank};
use kvx_vllm::wire::PushGrant;

/// A revocation that has not ended is waited for anew after this.
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

    /// Ends when nobody writes by this grant any more. `Err`: that will never be known.
    pub(super) async fn revoked(&self) -> Result<()> {
        // All at once; then each is waited for.
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

/// Whether peers may write for a request.
#[derive(Debug)]
pub(super) enum Grant {
    /// They may, until it is fenced or over.
    Active(Arc<GrantedWrites>),
    /// They may not any more. Kept until the request is over, as another worker may still be about
    /// to register it.
    Fenced(Arc<GrantedWrites>),
    /// A Mooncake agent that is no kvx knows where the memory is: nothing ends its writes.
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
    /// Of requests that are over: to be revoked.
    spent: Vec<Arc<GrantedWrites>>,
    last: u64,
    /// In the engine's process: what all ranks have granted.
    collected: HashMap<RequestId, Arc<OnceCell<GrantsOfRanks>>>,
    /// There too: requests whose grants ranks have asked for.
    wanted: Vec<(WorkerRank, RequestId)>,
    /// In the process of a rank: what the engine was asked for.
    asked: HashMap<RequestId, oneshot::Sender<GrantsOfRanks>>,
}

impl Grants {
    pub(super) fn get(&self, request: &RequestId) -> Option<&Grant> {
        self.by_request.get(request)
    }

    /// The number of the next grant.
    pub(super) fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    pub(super) fn activate(&mut self, request: &RequestId, writes: &Arc<GrantedWrites>) {
        self.by_request.insert(request.clone(), Grant::Active(Arc::clone(writes)));
    }

    /// A foreign agent is about to learn where the blocks of a request are. False: the request is
    /// fenced, and the agent must not learn it.
    pub(super) fn open_to_foreign(&mut self, request: &RequestId) -> bool {
        let before = self.by_request.get(request);
        if matches!(before, Some(Grant::Fenced(_))) {
            return false;
        }
        let writes = before.map_or_else(Arc::default, |grant| Arc::clone(grant.writes()));
        self.by_request.insert(request.clone(), Grant::Foreign(writes));
        true
    }

    /// No peer is granted anything for this request any more. `Err`: a foreign agent may write for
    /// ever.
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

    /// A grant that no peer knows of: to be revoked.
    pub(super) fn discard(&mut self, writes: Arc<GrantedWrites>) {
        self.spent.push(writes);
    }

    /// A load is over: peers write nothing for it any more.
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

    /// The place of what all ranks grant for a request, collected once.
    pub(super) fn collected(&mut self, request: &RequestId) -> Arc<OnceCell<GrantsOfRanks>> {
        Arc::clone(self.collected.entry(request.clone()).or_default())
    }

    /// A rank asks what all ranks grant for a request.
    pub(super) fn want(&mut self, rank: WorkerRank, request: RequestId) {
        self.wanted.push((rank, request));
    }

    /// Takes what ranks want to know, but of loads that not all workers have started.
    pub(super) fn take_wanted(
        &mut self,
        is_pending: impl Fn(&RequestId) -> bool,
    ) -> Vec<(WorkerRank, RequestId)> {
        let wanted = std::mem::take(&mut self.wanted);
        let (early, due) = wanted.into_iter().partition(|(_, request)| is_pending(request));
        self.wanted = early;
        due
    }

    /// Notes a question to the engine, and returns where its answer arrives.
    pub(super) fn ask(&mut self, request: &RequestId) -> oneshot::Receiver<GrantsOfRanks> {
        let (sender, answer) = oneshot::channel();
        self.asked.insert(request.clone(), sender);
        answer
    }

    /// The engine has answered.
    pub(super) fn answer(&mut self, request: &RequestId, grants: GrantsOfRanks) {
        if let Some(asked) = self.asked.remove(request) {
            asked.send(grants).ok(); // the load may be over
        }
    }

    /// The engine of this rank has gone: it answers nothing any more.
    pub(super) fn forget_questions(&mut self) {
        self.asked.clear();
    }
}

/// The error of a grant for a request that was given up.
pub(super) fn given_up() -> Error {
    Error::new(ErrorKind::Revoked, "the request was given up: nothing is to be written for it")
}
