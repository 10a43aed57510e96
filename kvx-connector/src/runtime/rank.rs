//! One worker of the engine, as the engine's process sees it.

use std::fmt;
use std::sync::Arc;

use kvx_core::{Completion, Deadline, Error, ErrorKind, Memory, Result};

use super::connector::Connector;
use super::register;
use kvx_vllm::engine::{Settings, WorkerRank};
use kvx_vllm::mapping::Caches;

impl Connector {
    /// A worker of this engine, to register its caches. Errors: `Invalid` for one that it does not
    /// have.
    pub fn rank(&self, rank: WorkerRank) -> Result<Rank> {
        if self.shared().state.lock().ranks.get(rank).is_some() {
            return Ok(Rank { connector: self.clone(), rank });
        }
        let Settings { tp_size, pp_size, .. } = self.settings();
        Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "there is no worker pp {} tp {}: the connector was built for {pp_size} x {tp_size}, see \
                 ConnectorBuilder::workers",
                rank.pp, rank.tp
            ),
        ))
    }
}

/// A worker of the engine: [`Connector::rank`] returns it. Cheap to clone; dropping it ends
/// nothing.
#[derive(Clone)]
pub struct Rank {
    connector: Connector,
    rank: WorkerRank,
}

impl Rank {
    /// Its place in the engine.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Registers the caches of this worker: `memory` holds all their regions, each in one piece of
    /// it. From now on peers may load from them. The first time, and after
    /// [`give_back`](Self::give_back). May block: registering can pin pages.
    ///
    /// # Errors
    /// `Invalid`: caches are registered already; memory that lacks a region; blocks of another size
    /// than the builder was given, or another number of them than the engine's other workers have.
    /// The errors of the agent for the memory, and of the version for the caches.
    pub fn register<M: Into<Arc<Memory>>>(
        self,
        caches: Caches,
        memory: impl IntoIterator<Item = M>,
    ) -> Result<Rank> {
        let memory = memory.into_iter().map(Into::into).collect();
        register::register(self.connector.shared(), self.rank, caches, memory)?;
        Ok(self)
    }

    /// Gives the caches back, before sleep for example: peers are refused, and loads in flight end.
    /// When the completion is `Ok`, nobody else touches the memory any more, and caches may be
    /// [registered](Self::register) anew: peers then need a new handshake.
    ///
    /// # Errors
    /// `StillShared`: that could not be known by the deadline, and the memory stays quarantined.
    pub fn give_back(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        register::give_back(self.connector.shared(), self.rank, deadline.into())
    }

    /// Starts the loads of the engine's steps so far on this worker: from now on their blocks are
    /// written.
    pub fn start_load_kv(&self) {
        self.connector.shared().with_state(|state, now| {
            let Some(held) = state.ranks.get_mut(self.rank) else {
                debug_assert!(false, "Connector::rank gives ranks that are there");
                return;
            };
            let pending = held.take_pending();
            pending.iter().for_each(|meta| held.begin(now, meta.clone()));
            pending.iter().for_each(|meta| state.trace_orders(now, meta));
        });
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank(pp {}, tp {})", self.rank.pp, self.rank.tp)
    }
}
