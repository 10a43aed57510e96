//! Entries from bootstrap servers: the addresses of prefill workers, and which of them have this
//! worker's layout.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::super::remote::RemoteEngine;
use super::action::QueryId;
use crate::ids::{EngineId, RequestId, WorkerRank};
use crate::time::Time;
use crate::wire::mooncake::Directory;

/// A prefill, as its bootstrap server lists it.
#[derive(Debug)]
pub(super) struct Listed {
    pub(super) tp_size: u32,
    pub(super) pp_size: u32,
    pub(super) is_kvx: bool,
    pub(super) workers: BTreeMap<WorkerRank, Arc<str>>,
    pub(super) used: Time,
}

/// A query in progress, and the requests that wait for it.
#[derive(Debug)]
pub(super) struct Query {
    pub(super) peer: Arc<RemoteEngine>,
    pub(super) waiting: Vec<RequestId>,
}

#[derive(Debug, Default)]
pub(super) struct Listings {
    last: u64,
    engines: BTreeMap<EngineId, Listed>,
    queries: BTreeMap<QueryId, Query>,
    /// Addresses of workers that have this worker's layout.
    pub(super) knowing: BTreeSet<Arc<str>>,
}

impl Listings {
    /// Returns the engine's entry, if it is known.
    pub(super) fn get(&mut self, now: Time, engine: &EngineId) -> Option<&Listed> {
        let listed = self.engines.get_mut(engine)?;
        listed.used = now;
        Some(listed)
    }

    /// Returns whether the engine is one of kvx, according to its server.
    pub(super) fn is_kvx(&self, engine: &EngineId) -> bool {
        self.engines.get(engine).is_some_and(|listed| listed.is_kvx)
    }

    /// Adds a request to the query for its engine. Returns a new query if the caller must send it.
    pub(super) fn wait(&mut self, peer: &Arc<RemoteEngine>, request: RequestId) -> Option<QueryId> {
        if let Some(query) = self.queries.values_mut().find(|query| query.peer == *peer) {
            query.waiting.push(request);
            return None;
        }
        self.last += 1;
        let id = QueryId(self.last);
        self.queries.insert(id, Query { peer: Arc::clone(peer), waiting: vec![request] });
        Some(id)
    }

    /// Adds an engine that needs no query.
    pub(super) fn know(&mut self, engine: &EngineId, listed: Listed) {
        self.engines.insert(engine.clone(), listed);
    }

    pub(super) fn take(&mut self, query: QueryId) -> Option<Query> {
        self.queries.remove(&query)
    }

    /// Stores a server's entry for an engine, and removes entries that were unused for the time
    /// `ttl`.
    ///
    /// # Errors
    ///
    /// Fails if the server does not list the engine, or not all its workers.
    pub(super) fn learn(
        &mut self,
        now: Time,
        peer: &RemoteEngine,
        directory: &Directory,
        ttl: Option<Duration>,
    ) -> Result<(), String> {
        let listed = directory.engine(peer.engine.as_str()).ok_or_else(|| {
            let others: Vec<_> = directory
                .engines
                .values()
                .map(|engine| engine.engine_id.as_str())
                .take(4)
                .collect();
            format!(
                "the bootstrap server at {}:{} lists no engine {}, but {others:?}: the prefill has \
                 restarted, or the router names the wrong engine",
                peer.address.host, peer.address.port, peer.engine
            )
        })?;
        let (tp_size, pp_size) = listed.sizes()?;
        let workers =
            listed.workers.iter().map(|(rank, addr)| (*rank, addr.as_str().into())).collect();
        self.forget_idle(now, ttl);
        let is_kvx = listed.is_kvx;
        self.engines
            .insert(peer.engine.clone(), Listed { tp_size, pp_size, is_kvx, workers, used: now });
        Ok(())
    }

    /// Removes entries that were unused for the time `ttl`.
    pub(super) fn forget_idle(&mut self, now: Time, ttl: Option<Duration>) {
        let idle = |listed: &Listed| ttl.is_some_and(|ttl| now.has_reached(listed.used + ttl));
        let idle = self
            .engines
            .iter()
            .filter(|(_, listed)| idle(listed))
            .map(|(engine, _)| engine.clone());
        for engine in idle.collect::<Vec<_>>() {
            self.forget(&engine);
        }
    }

    /// Removes an entry that is no longer valid. The next request queries the server again.
    pub(super) fn forget(&mut self, engine: &EngineId) {
        if let Some(listed) = self.engines.remove(engine) {
            for address in listed.workers.values() {
                self.knowing.remove(address);
            }
        }
    }

    pub(super) fn forget_all(&mut self) {
        self.engines.clear();
        self.queries.clear();
        self.knowing.clear();
    }
}
