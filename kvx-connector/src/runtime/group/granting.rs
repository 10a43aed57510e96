//! Push into ranks in processes of their own.
//!
//! A registration tells a prefill what it may write into on all ranks. So a rank that registers asks its engine, which
//! asks every rank once for each request, when all of them have started the load.

use std::collections::HashMap;
use std::sync::Arc;

use kvx_core::{Error, ErrorKind, Result};
use tokio::sync::{OnceCell, oneshot};
use tokio::time::timeout;

use super::super::push::over;
use super::super::register::closed;
use super::super::state::{Shared, State};
use super::PATIENCE;
use super::away::name;
use super::joined::EngineChannel;
use crate::engine::{RequestId, WorkerRank};
use crate::wire::PushGrant;
use crate::wire::group::{ToHead, ToRank};

type GrantsOfRanks = Result<Vec<PushGrant>>;

/// What is asked for and told of all ranks.
#[derive(Default)]
pub(in crate::runtime) struct Granting {
    /// In the engine's process: what all ranks have told, by request.
    told: HashMap<RequestId, Arc<OnceCell<GrantsOfRanks>>>,
    /// There too: asked for by ranks.
    wanted: Vec<(WorkerRank, RequestId)>,
    /// In the process of a rank: what the engine was asked for.
    asked: HashMap<RequestId, oneshot::Sender<GrantsOfRanks>>,
}

impl Granting {
    /// A load is over, or its engine has gone: nobody is told any more.
    pub(in crate::runtime) fn forget(&mut self, request: &RequestId) {
        self.told.remove(request);
        self.asked.remove(request);
    }

    /// The engine of this rank has gone: nothing that it was asked for is told any more.
    pub(super) fn forget_all(&mut self) {
        self.asked.clear();
    }
}

impl State {
    /// Whether a load is under way that is still wanted; in the process of a rank, on that.
    pub(in crate::runtime) fn is_loading(&self, request: &RequestId) -> bool {
        match self.head {
            None => self.scheduler.is_loading(request),
            Some(_) => self.ranks.values().any(|held| held.worker.is_loading(request)),
        }
    }

    /// Peers write nothing any more for a load that is over.
    pub(in crate::runtime) fn end_grants(&mut self, request: &RequestId) {
        self.granting.forget(request);
        if let Some(grant) = self.grants.remove(request) {
            self.spent.push(Arc::clone(grant.granted()));
        }
    }

    /// Takes what ranks want to know of loads that all workers have started.
    pub(in crate::runtime) fn take_wanted(&mut self) -> Vec<(WorkerRank, RequestId)> {
        let wanted = std::mem::take(&mut self.granting.wanted);
        let (early, due) = wanted.into_iter().partition(|(_, request)| self.is_pending(request));
        self.granting.wanted = early;
        due
    }
}

impl Shared {
    /// What all workers of this engine let peers write into for a request, wherever they are.
    pub(in crate::runtime) async fn granted_by_all(
        self: &Arc<Self>,
        request: &RequestId,
    ) -> GrantsOfRanks {
        let asked = {
            let mut state = self.state.lock();
            let State { head, granting, .. } = &mut *state;
            head.as_ref().map(|head| {
                let (sender, answer) = oneshot::channel();
                granting.asked.insert(request.clone(), sender);
                head.say(ToHead::GrantsOfAll(request.clone())); // an engine that has gone answers nothing
                answer
            })
        };
        match asked {
            // Until the load's deadline: then nothing is asked for any more, and the answer is that.
            Some(answer) => answer.await.unwrap_or_else(|_| Err(over())),
            None => self.ask_all(request).await,
        }
    }

    /// Asks all workers, once.
    async fn ask_all(self: &Arc<Self>, request: &RequestId) -> GrantsOfRanks {
        let cell = {
            let mut state = self.state.lock();
            if !state.scheduler.is_loading(request) {
                return Err(over());
            }
            Arc::clone(state.granting.told.entry(request.clone()).or_default())
        };
        cell.get_or_init(|| self.collect_grants(request)).await.clone()
    }

    async fn collect_grants(self: &Arc<Self>, request: &RequestId) -> GrantsOfRanks {
        let asked: Vec<_> = {
            let mut state = self.state.lock();
            let away = state
                .ranks
                .iter_mut()
                .filter_map(|(rank, held)| Some((*rank, held.worker.away_mut()?)));
            away.map(|(rank, away)| (rank, away.grant(request))).collect()
        };
        let mut all = self.granted_here(request).await?;
        for (rank, answer) in asked {
            let WorkerRank { pp, tp } = rank;
            let regions = match timeout(PATIENCE, answer).await {
                Ok(Ok(regions)) => regions?,
                Ok(Err(_)) => {
                    return Err(Error::new(
                        ErrorKind::PeerLost,
                        format!("{} is not there", name(rank)),
                    ));
                }
                Err(_) => {
                    let why = format!("{} has granted nothing within {PATIENCE:?}", name(rank));
                    return Err(Error::new(ErrorKind::TimedOut, why));
                }
            };
            all.push(PushGrant { pp, tp, regions });
        }
        Ok(all)
    }

    /// What the workers of this process let peers write into.
    async fn granted_here(self: &Arc<Self>, request: &RequestId) -> GrantsOfRanks {
        let (shared, request) = (Arc::clone(self), request.clone());
        let granting = self.runtime.spawn_blocking(move || shared.grant(&request)?.told());
        granting.await.unwrap_or_else(|_| Err(closed()))
    }

    /// A rank asks, in the engine's process.
    pub(super) fn want_grants(&self, rank: WorkerRank, request: RequestId) {
        self.state.lock().granting.wanted.push((rank, request));
        self.wake_up.notify_one();
    }

    /// Answers a rank.
    pub(in crate::runtime) async fn tell_grants(
        self: Arc<Self>,
        rank: WorkerRank,
        request: RequestId,
    ) {
        let told = self.ask_all(&request).await.map_err(|error| error.sentence().to_owned());
        self.tell_rank(rank, ToRank::Grants { request, told }, None);
    }

    /// The engine asks, in the process of a rank.
    pub(super) async fn grant_to_engine(
        self: Arc<Self>,
        link: Arc<EngineChannel>,
        request: RequestId,
    ) {
        let told = self.granted_here(&request).await.map_err(|error| error.sentence().to_owned());
        let regions =
            told.map(|grants| grants.into_iter().flat_map(|grant| grant.regions).collect());
        link.up.send(ToHead::Granted { request, told: regions }).ok(); // it may have gone
    }

    /// The engine has answered, in the process of a rank.
    pub(super) fn take_grants(&self, request: &RequestId, told: Result<Vec<PushGrant>, String>) {
        if let Some(asked) = self.state.lock().granting.asked.remove(request) {
            asked.send(told.map_err(refused)).ok(); // the load may be over
        }
    }
}

/// What a peer of the same engine refuses.
pub(super) fn refused(why: String) -> Error {
    Error::new(ErrorKind::Invalid, why)
}
