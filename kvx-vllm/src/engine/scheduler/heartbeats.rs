//! Heartbeats: which peers must renew the leases of blocks that this engine still wants.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::super::remote::RemoteEngine;
use super::super::step::Heartbeat;
use crate::ids::{EngineId, RequestId};
use crate::time::Time;

/// The requests of one peer, each with the number of local requests that want it.
#[derive(Clone, Debug)]
struct WantedRequests {
    peer: Arc<RemoteEngine>,
    requests: BTreeMap<RequestId, u32>,
}

#[derive(Clone, Debug)]
pub(super) struct Heartbeats {
    /// The interval; `None`: peers keep blocks for a fixed time and ignore heartbeats.
    every: Option<Duration>,
    last: Option<Time>,
    peers: BTreeMap<EngineId, WantedRequests>,
}

impl Heartbeats {
    pub(super) fn new(every: Option<Duration>) -> Self {
        Heartbeats { every, last: None, peers: BTreeMap::new() }
    }

    pub(super) fn start(&mut self, peer: &Arc<RemoteEngine>, request: &RequestId) {
        if self.every.is_none() {
            return;
        }
        let wanted = self.peers.entry(peer.engine.clone()).or_insert_with(|| WantedRequests {
            peer: Arc::clone(peer),
            requests: BTreeMap::new(),
        });
        // The latest registration counts, even if an engine restarted with a lower one.
        wanted.peer = Arc::clone(peer);
        *wanted.requests.entry(request.clone()).or_default() += 1;
    }

    pub(super) fn stop(&mut self, engine: &EngineId, request: &RequestId) {
        if self.every.is_none() {
            return;
        }
        let Some(wanted) = self.peers.get_mut(engine) else {
            return debug_assert!(false, "heartbeats for a request are started before");
        };
        if let Some(count) = wanted.requests.get_mut(request) {
            *count -= 1;
            if *count == 0 {
                wanted.requests.remove(request);
            }
        }
        if wanted.requests.is_empty() {
            self.peers.remove(engine);
        }
    }

    /// Returns the time at which the next heartbeats are due.
    pub(super) fn next(&self, now: Time) -> Option<Time> {
        let every = self.every.filter(|_| !self.peers.is_empty())?;
        Some(self.last.map_or(now, |last| last + every))
    }

    /// Returns the heartbeats that are due.
    pub(super) fn take(&mut self, now: Time) -> Vec<Heartbeat> {
        if !self.next(now).is_some_and(|due| now.has_reached(due)) {
            return Vec::new();
        }
        self.last = Some(now);
        let heartbeat = |wanted: &WantedRequests| Heartbeat {
            peer: Arc::clone(&wanted.peer),
            requests: wanted.requests.keys().cloned().collect(),
        };
        self.peers.values().map(heartbeat).collect()
    }
}
