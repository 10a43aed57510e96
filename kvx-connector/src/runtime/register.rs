//! Registering an engine's caches, and giving them back.

use std::sync::Arc;

use kvx_core::{Agent, Completion, Deadline, DeviceAccess, Error, Kind, Memory, Result, Ticket};

use super::listening::Listening;
use super::rank::Registered;
use super::state::{RankState, Shared};
use super::words::{Published, Scratch, WORDS};
use crate::engine::{PoolBlocks, WorkerRank};
use crate::mapping::Caches;

impl Shared {
    pub(super) fn register(
        self: &Arc<Self>,
        rank: WorkerRank,
        caches: Caches,
        memory: Vec<Arc<Memory>>,
    ) -> Result<()> {
        let invalid = |sentence: String| Err(Error::new(Kind::Invalid, sentence));
        self.check_block_size(&caches)?;
        // Workers register one after the other: the first one makes what they share.
        let side = self.side.lock();
        let side = side.as_ref().ok_or_else(closed)?;
        let pool = PoolBlocks::of(caches.geometry());
        let (agent, others) = {
            let state = self.state.lock();
            let has_words = |other: &RankState| other.registered.is_some() || other.worker.away().is_some();
            let others = state.ranks.iter().any(|(at, other)| *at != rank && has_words(other));
            let others = others && state.published.is_some();
            let Some(held) = state.ranks.get(&rank) else {
                return invalid(format!("there is no worker pp {} tp {}", rank.pp, rank.tp));
            };
            if held.worker.away().is_some() {
                return invalid(format!(
                    "worker pp {} tp {} is to join from a process of its own (Connector::group): it registers there",
                    rank.pp, rank.tp
                ));
            }
            if held.registered.is_some() {
                return invalid(format!(
                    "worker pp {} tp {} has registered its caches: give them back first (Rank::give_back)",
                    rank.pp, rank.tp
                ));
            }
            if others && state.pool.as_ref().is_some_and(|known| known.most() != pool.most()) {
                return invalid(format!(
                    "worker pp {} tp {} has {} logical blocks, another worker of this engine {}: give all of them the \
                     same",
                    rank.pp,
                    rank.tp,
                    pool.most(),
                    state.pool.as_ref().map_or(0, PoolBlocks::most)
                ));
            }
            (held.agent.clone(), others)
        };
        if !others {
            let published = Published::new(pool.most(), self.digests())?;
            let mut state = self.state.lock();
            (state.pool, state.published) = (Some(pool), Some(published));
        }
        let words = || {
            let memory = self.state.lock().published.as_ref().map(Published::memory);
            memory.ok_or_else(|| Error::new(Kind::Closed, "the caches were given back meanwhile"))
        };
        let registered = self.open(rank, agent, caches, memory, words)?;
        let (generation, own) = match side {
            Listening::Nixl(server) => (Some(server.publish(rank, &self.setup.metadata(&registered)?)), None),
            Listening::Mooncake(_) => (None, Some(self.own_description(rank, &registered)?)),
        };
        // One count of registrations, for the side channel and the scheduler.
        self.take_up(rank, registered, generation, own).inspect_err(|_| side.withdraw(self, rank))?;
        match side {
            Listening::Nixl(_) => Ok(()),
            Listening::Mooncake(channels) => channels.publish(self, rank),
        }
    }

    /// Blocks of the caches are as the connector was told.
    pub(super) fn check_block_size(&self, caches: &Caches) -> Result<()> {
        let geometry = caches.geometry();
        let tokens = geometry.block_tokens().saturating_mul(geometry.kernel_per_logical());
        if tokens == self.setup.settings.block_size {
            return Ok(());
        }
        Err(Error::new(
            Kind::Invalid,
            format!(
                "the caches have logical blocks of {tokens} tokens, the connector was built for {}: call \
                 Builder::block_size({tokens})",
                self.setup.settings.block_size
            ),
        ))
    }

    /// Registers caches with an agent. `words`: of their blocks.
    pub(super) fn open(
        &self,
        rank: WorkerRank,
        agent: Option<(Agent, Arc<Scratch>)>,
        caches: Caches,
        memory: Vec<Arc<Memory>>,
        words: impl FnOnce() -> Result<Arc<Memory>>,
    ) -> Result<Registered> {
        let (agent, scratch) = match agent {
            Some(known) => known,
            None => {
                let agent = self.setup.agent(rank, &devices_of(&memory))?;
                let scratch = Arc::new(Scratch::new(&agent)?);
                (agent, scratch)
            }
        };
        let words = |agent: &Agent| agent.register(WORDS, words()?);
        Registered::new((agent, scratch), caches, memory, self.digests(), words)
    }

    pub(super) fn give_back(self: &Arc<Self>, rank: WorkerRank, deadline: Deadline) -> Completion<()> {
        let (done, ticket) = Completion::with_ticket();
        let mut state = self.state.lock();
        if state.is_closing() {
            drop(state);
            self.settle_at_end(ticket);
            return done;
        }
        if state.ranks.get(&rank).is_some_and(|held| held.worker.away().is_some()) {
            drop(state);
            let why = "the caches of a rank in a process of its own are given back there, when it leaves";
            ticket.settle(Err(Error::new(Kind::Invalid, why)));
            return done;
        }
        let mut unused = Some(ticket);
        if let Some(held) = state.ranks.get_mut(&rank) {
            held.worker.shutdown(self.clock.now());
            held.links.clear();
            held.giving_back.retain(|(_, earlier)| !earlier.is_finished());
            if let Some(registered) = held.registered.take()
                && let Some(ticket) = unused.take()
            {
                let ending = Arc::clone(self).revoke(Arc::clone(&registered), deadline, ticket);
                held.giving_back.push((registered, self.runtime.spawn(ending)));
            }
        }
        drop(state);
        if let Some(ticket) = unused {
            ticket.settle(Ok(()));
        }
        if let Some(side) = &*self.side.lock() {
            side.withdraw(self, rank);
        }
        self.wake_up.notify_one();
        done
    }

    async fn revoke(self: Arc<Self>, registered: Arc<Registered>, deadline: Deadline, ticket: Ticket) {
        match registered.revoke(deadline).await {
            // The agent was shut down meanwhile, and that says whether anything touches the memory.
            Err(error) if error.kind() == Kind::Closed => self.settle_at_end(ticket),
            result => ticket.settle(result),
        }
    }
}

pub(super) fn closed() -> Error {
    Error::new(Kind::Closed, "the connector was shut down: build another one")
}

/// Who copies what of these pools lies on devices, each once: a transport opens memory of devices by them.
fn devices_of(memory: &[Arc<Memory>]) -> Vec<Arc<dyn DeviceAccess>> {
    let mut devices: Vec<Arc<dyn DeviceAccess>> = Vec::new();
    for access in memory.iter().filter_map(|memory| memory.device_access()) {
        if !devices.iter().any(|known| Arc::ptr_eq(known, access)) {
            devices.push(Arc::clone(access));
        }
    }
    devices
}
