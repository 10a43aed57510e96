//! One worker of the engine, in the engine's process.

use std::fmt;
use std::sync::Arc;

use kvx_core::{Completion, Deadline, ErrorKind, Memory, Result};

use super::connector::Connector;
use super::register;
use kvx_vllm::engine::{Settings, WorkerRank};
use kvx_vllm::mapping::Caches;

impl Connector {
    /// Returns a worker of this engine, to register its caches.
    ///
    /// # Errors
    /// `Invalid`: the engine has no such worker.
    pub fn rank(&self, rank: WorkerRank) -> Result<Rank> {
        if self.shared().state.lock().ranks.get(rank).is_some() {
            return Ok(Rank { connector: self.clone(), rank });
        }
        let Settings { tp_size, pp_size, .. } = self.settings();
        Err(ErrorKind::Invalid.because(format!(
            "there is no worker pp {} tp {}: the connector was built for {pp_size} x {tp_size}, \
             see ConnectorBuilder::workers",
            rank.pp, rank.tp
        )))
    }
}

/// A worker of the engine, returned by [`Connector::rank`]. Cheap to clone. Dropping it has no
/// effect.
#[derive(Clone)]
pub struct Rank {
    pub(super) connector: Connector,
    pub(super) rank: WorkerRank,
}

impl Rank {
    /// Returns the worker's place in the engine.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Registers the caches of this worker, so that peers can load from them.
    ///
    /// Each region of the caches lies within one piece of `memory`. Call it once, and again after
    /// each [`give_back`](Self::give_back). It may block, because registering can pin pages.
    ///
    /// # Errors
    /// - `Invalid`: caches are registered already; this worker is to join from a process of its
    ///   own; a region lies in no piece of memory; the blocks have another size than the builder
    ///   was given, or their number differs from that of the engine's other workers.
    /// - `Closed`: the connector was shut down.
    /// - Errors of the agent, if it cannot be built
    ///   ([`AgentBuilder::build`](kvx_core::AgentBuilder::build)) or cannot register the memory
    ///   ([`Agent::register`](kvx_core::Agent::register)).
    pub fn register<M: Into<Arc<Memory>>>(
        self,
        caches: Caches,
        memory: impl IntoIterator<Item = M>,
    ) -> Result<Rank> {
        let memory = memory.into_iter().map(Into::into).collect();
        register::register(self.connector.shared(), self.rank, caches, memory)?;
        Ok(self)
    }

    /// Takes the caches out of use, for example before sleep. Peers are refused, and loads in
    /// flight end.
    ///
    /// After `Ok` only this process touches the memory, and caches may be
    /// [registered](Self::register) again. Peers then need a new handshake.
    ///
    /// # Errors
    /// - `StillShared`: it was not proven by the deadline. The memory stays quarantined; call this
    ///   again to wait again.
    /// - `Invalid`: this worker has joined from a process of its own.
    pub fn give_back(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        register::give_back(self.connector.shared(), self.rank, deadline.into())
    }

    /// Starts the loads of the engine's steps so far on this worker. From now on it fills their
    /// blocks.
    pub fn start_load_kv(&self) {
        self.connector.shared().wake_if(|state, now| {
            let Some(held) = state.ranks.get_mut(self.rank) else {
                debug_assert!(false, "Connector::rank returns ranks that exist");
                return false;
            };
            let pending = held.take_pending();
            pending.iter().for_each(|meta| held.begin(now, meta.clone()));
            pending.iter().for_each(|meta| state.trace_orders(now, meta));
            !pending.is_empty()
        });
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank(pp {}, tp {})", self.rank.pp, self.rank.tp)
    }
}
