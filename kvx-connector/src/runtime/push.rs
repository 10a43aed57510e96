//! Push: what a decode lets a prefill write into, for one request, and the end of that; and the writes themselves.
//!
//! A decode registers its caches once more for each request, under a key of its own, and tells the prefill that key. So
//! a fence is a revocation: once that is through, nobody writes for this request any more, whatever a prefill that was
//! stopped, or a byte on its way, still tries.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, GridSet, Peer, PeerRegion, Region, Result};

use super::connect::{Grids, LinkedWorker, PeerLink};
use super::rank::{PeerRegions, Registered};
use super::state::Shared;
use crate::engine::{Connection, Move, Part, RequestId, WorkerRank};
use crate::mapping::Source;
use crate::wire::{EngineNotification, PushGrant, PushRegistration};

/// How long a registration may take on its way.
const LIMIT: Duration = Duration::from_secs(10);
/// A revocation that has not come through is waited for anew.
const AGAIN: Duration = Duration::from_secs(60);

/// What peers may write into for one request, by worker.
#[derive(Debug, Default)]
pub(super) struct GrantedWrites(BTreeMap<WorkerRank, Vec<Region>>);

/// Whether peers may write for a request.
#[derive(Debug)]
pub(super) enum Grant {
    /// Until it is fenced, or over.
    Given(Arc<GrantedWrites>),
    /// No more. Kept until the request is over, as another worker may still be about to register it.
    Fenced(Arc<GrantedWrites>),
    /// A Mooncake agent that is no kvx was told where the memory is: nothing ends its writes.
    Abroad(Arc<GrantedWrites>),
}

impl Grant {
    pub(super) fn granted(&self) -> &Arc<GrantedWrites> {
        match self {
            Grant::Given(granted) | Grant::Fenced(granted) | Grant::Abroad(granted) => granted,
        }
    }
}

impl GrantedWrites {
    /// Of these workers, each under a name of its own.
    fn new(request: u64, ranks: &[(WorkerRank, Arc<Registered>)]) -> Result<Self> {
        let each = ranks.iter().map(|(rank, registered)| Ok((*rank, registered.grant(request)?)));
        each.collect::<Result<_>>().map(GrantedWrites)
    }

    pub(super) fn told(&self) -> Result<Vec<PushGrant>> {
        let grant = |(rank, regions): (&WorkerRank, &Vec<Region>)| {
            let regions = regions.iter().map(Region::metadata).collect::<Result<_>>()?;
            Ok(PushGrant { pp: rank.pp, tp: rank.tp, regions })
        };
        self.0.iter().map(grant).collect()
    }

    pub(super) fn regions(&self) -> impl Iterator<Item = &Region> {
        self.0.values().flatten()
    }

    /// Ends when nobody writes by it any more. `Err`: that will never be known.
    pub(super) async fn revoked(&self) -> Result<()> {
        let regions = || self.regions();
        // All at once; then each is waited for.
        let begun: Vec<_> = regions().map(|region| region.revoke(AGAIN)).collect();
        drop(begun);
        for region in regions() {
            loop {
                let since = Instant::now();
                match region.revoke(AGAIN).await {
                    Ok(_) => break,
                    Err(error)
                        if error.kind() == ErrorKind::StillShared && since.elapsed() >= AGAIN => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

impl Shared {
    /// Answers [`Action::Register`](crate::engine::Action::Register).
    pub(super) async fn register_push(
        self: Arc<Self>,
        rank: WorkerRank,
        request: RequestId,
        (connection, ranks): (Connection, Vec<WorkerRank>),
        mut registration: Box<PushRegistration>,
    ) {
        let sent = async {
            // Before anything is granted: as long as a plain NIXL agent is there, no grant is known to have ended.
            let link = self.writers(rank, connection, &ranks)?;
            let told = self.granted_by_all(&request).await;
            registration.kvx_grants =
                told.map_err(|error| (ranks.first().copied().unwrap_or_default(), error))?;
            send_push(&link, &ranks, &EngineNotification::Registration(registration)).await
        };
        if let Err((at, error)) = sent.await {
            self.tell_worker(rank, |worker, now| {
                worker.notification_failed(now, Some(&request), at, error.to_string());
            });
        }
    }

    /// The way to workers of a prefill, all of which write by grants.
    fn writers(
        &self,
        rank: WorkerRank,
        connection: Connection,
        ranks: &[WorkerRank],
    ) -> Result<Arc<PeerLink>, (WorkerRank, Error)> {
        let first = ranks.first().copied().unwrap_or_default();
        let link = self.linked_to(rank, connection).map_err(|error| (first, error))?;
        for at in ranks {
            let worker = super::moves::worker(&link, *at).map_err(|error| (*at, error))?;
            if worker.as_nixl.is_some() {
                let why = "a prefill that is a plain NIXL agent writes by no grant, and its writes cannot be ended: \
                           let it be read from (kv_connector NixlConnector on both sides)";
                return Err((*at, Error::new(ErrorKind::Unsupported, why)));
            }
        }
        Ok(link)
    }

    /// What peers may write into for a request, made once for all workers in this process. May block.
    pub(super) fn grant(&self, request: &RequestId) -> Result<Arc<GrantedWrites>> {
        let _one_at_a_time = self.granting.lock();
        let (number, ranks) = {
            let mut state = self.state.lock();
            match state.grants.get(request) {
                Some(Grant::Given(granted)) => return Ok(Arc::clone(granted)),
                Some(Grant::Fenced(_) | Grant::Abroad(_)) => return Err(over()),
                None => {}
            }
            state.last_grant += 1;
            let registered = |rank: &WorkerRank, registered: &Option<Arc<Registered>>| {
                registered.clone().map(|registered| (*rank, registered)).ok_or_else(|| {
                    let WorkerRank { pp, tp } = rank;
                    let why = format!(
                        "worker pp {pp} tp {tp} has no caches registered: call Rank::register"
                    );
                    Error::new(ErrorKind::Invalid, why)
                })
            };
            let here = state.ranks.iter().filter(|(_, held)| held.worker.away().is_none());
            let ranks = here.map(|(rank, held)| registered(rank, &held.registered));
            (state.last_grant, ranks.collect::<Result<Vec<_>>>()?)
        };
        let granted = Arc::new(GrantedWrites::new(number, &ranks)?);
        let mut state = self.state.lock();
        let still_has = |(rank, own): &(WorkerRank, Arc<Registered>)| {
            let now = state.ranks.get(rank).and_then(|held| held.registered.as_ref());
            now.is_some_and(|now| Arc::ptr_eq(now, own))
        };
        let all_there = ranks.iter().all(still_has);
        if !all_there || !state.is_loading(request) || state.grants.contains_key(request) {
            // It has ended meanwhile, or its caches were given back, and nobody was told of this.
            state.spent.push(granted);
            drop(state);
            self.wake_up.notify_one();
            return Err(over());
        }
        ranks.iter().for_each(|(_, own)| own.has_granted(&granted));
        state.grants.insert(request.clone(), Grant::Given(Arc::clone(&granted)));
        Ok(granted)
    }

    /// What one worker of this engine lets peers write into for a request, as its agent tells it. May block.
    pub(super) fn granted(&self, rank: WorkerRank, request: &RequestId) -> Result<Vec<Vec<u8>>> {
        let granted = self.grant(request)?;
        granted.0.get(&rank).into_iter().flatten().map(Region::metadata).collect()
    }

    /// Answers [`Action::Fence`](crate::engine::Action::Fence): ends what was granted for a request, of all workers.
    pub(super) async fn fence(self: Arc<Self>, rank: WorkerRank, request: RequestId) {
        let granted = {
            let mut state = self.state.lock();
            match state.grants.remove(&request) {
                Some(Grant::Abroad(told)) => {
                    state.grants.insert(request.clone(), Grant::Abroad(Arc::clone(&told)));
                    Err(told)
                }
                before => {
                    let granted =
                        before.map_or_else(Arc::default, |grant| Arc::clone(grant.granted()));
                    state.grants.insert(request.clone(), Grant::Fenced(Arc::clone(&granted)));
                    Ok(granted)
                }
            }
        };
        let granted = match granted {
            Ok(granted) => granted,
            Err(told) => return self.lose_after_a_while(rank, &request, &told).await,
        };
        match granted.revoked().await {
            Ok(()) => self.tell_half(rank, |half, now| half.fenced(now, &request)),
            // Its blocks stay held; a shutdown says what becomes of them.
            Err(error) => {
                tracing::warn!(%request, %error, "blocks of a push stay held: writes to them cannot be ended")
            }
        }
    }
}

/// Why nothing is granted any more.
pub(super) fn over() -> Error {
    Error::new(ErrorKind::Revoked, "the request was given up: nothing is to be written for it")
}

async fn send_push(
    link: &PeerLink,
    ranks: &[WorkerRank],
    registration: &EngineNotification,
) -> Result<(), (WorkerRank, Error)> {
    let bytes = registration.encode();
    for at in ranks {
        let failed = |error| (*at, error);
        let worker = super::moves::worker(link, *at).map_err(failed)?;
        super::moves::send(&worker.peer, &bytes, LIMIT).await.map_err(failed)?;
    }
    Ok(())
}

/// Regions that a decode has granted to a write, until this is dropped.
pub(super) struct Learned {
    peer: Peer,
    pub(super) regions: Vec<PeerRegion>,
}

impl Learned {
    /// Of the worker that a write goes to. `None`: the decode grants nothing, as one that is no kvx.
    pub(super) fn of(order: &Move, peer: &Peer) -> Result<Option<Self>> {
        let Part { rank, .. } = order.part;
        let Some(grant) =
            order.grants.iter().find(|grant| (grant.pp, grant.tp) == (rank.pp, rank.tp))
        else {
            return match order.grants.is_empty() {
                true => Ok(None),
                false => Err(Error::new(
                    ErrorKind::Malformed,
                    "the decode's registration grants nothing of this worker",
                )),
            };
        };
        let mut learned =
            Learned { peer: peer.clone(), regions: Vec::with_capacity(grant.regions.len()) };
        for bytes in &grant.regions {
            learned.regions.push(peer.import_region(bytes)?);
        }
        Ok(Some(learned))
    }
}

impl Drop for Learned {
    fn drop(&mut self) {
        self.regions.iter().for_each(|region| self.peer.forget(region));
    }
}

/// What a decode has granted to a write, as grids.
pub(super) struct WriteGrant {
    pub(super) learned: Learned,
    pub(super) sets: Vec<Option<Grids<PeerRegion>>>,
}

impl WriteGrant {
    /// For one part of a write. `None`: the decode grants nothing, as one that is no kvx.
    pub(super) fn of(order: &Move, worker: &LinkedWorker, source: &Source) -> Result<Option<Self>> {
        let Some(learned) = Learned::of(order, &worker.peer)? else { return Ok(None) };
        let regions = PeerRegions::granted(&learned.regions)?;
        let grids = |set: usize| -> Result<Option<Grids<PeerRegion>>> {
            let (_, theirs): (Vec<_>, Vec<_>) = source.grids(set).unzip();
            let made = |grids: GridSet<PeerRegion>| Some(Grids(grids));
            if theirs.is_empty() {
                Ok(None)
            } else {
                regions.grids(&worker.geometry, theirs.into_iter()).map(made)
            }
        };
        let sets = (0..source.sets().len()).map(grids).collect::<Result<_>>()?;
        Ok(Some(WriteGrant { learned, sets }))
    }
}
