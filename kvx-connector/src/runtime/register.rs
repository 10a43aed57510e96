//! Registering an engine's caches, and giving them back.

use std::sync::Arc;

use kvx_core::{Completion, Deadline, DeviceAccess, Error, Kind, Memory, Result, Ticket};

use super::half::Half;
use super::listening::Listening;
use super::rank::Registered;
use super::state::Shared;
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
        let (geometry, settings) = (caches.geometry(), &self.setup.settings);
        let tokens = geometry.block_tokens().saturating_mul(geometry.kernel_per_logical());
        if tokens != settings.block_size {
            return invalid(format!(
                "the caches have logical blocks of {tokens} tokens, the connector was built for {}: call \
                 Builder::block_size({tokens})",
                settings.block_size
            ));
        }
        // Workers register one after the other: the first one makes what they share.
        let side = self.side.lock();
        let closed = || Error::new(Kind::Closed, "the connector was shut down: build another one");
        let side = side.as_ref().ok_or_else(closed)?;
        let pool = PoolBlocks::of(geometry);
        let (agent, others) = {
            let state = self.state.lock();
            let others = state.ranks.iter().any(|(at, other)| *at != rank && other.registered.is_some());
            let Some(held) = state.ranks.get(&rank) else {
                return invalid(format!("there is no worker pp {} tp {}", rank.pp, rank.tp));
            };
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
        let (agent, scratch) = match agent {
            Some(known) => known,
            None => {
                let agent = self.setup.agent(rank, &devices_of(&memory))?;
                let scratch = Arc::new(Scratch::new(&agent)?);
                (agent, scratch)
            }
        };
        let words = |agent: &kvx_core::Agent| {
            let memory = self.state.lock().published.as_ref().map(Published::memory);
            let gone = || Error::new(Kind::Closed, "the caches were given back meanwhile");
            agent.register(WORDS, memory.ok_or_else(gone)?)
        };
        let parts = (agent.clone(), Arc::clone(&scratch));
        let registered = Registered::new(parts, caches, memory, self.digests(), words)?;
        let (generation, own) = match side {
            Listening::Nixl(server) => (Some(server.publish(rank, &self.setup.metadata(&registered)?)), None),
            Listening::Mooncake(_) => (None, Some(self.own_description(rank, &registered)?)),
        };
        let mut state = self.state.lock();
        if state.is_closing() {
            // The shutdown has not seen an agent that is new here: it ends with this.
            drop(state);
            side.withdraw(self, rank);
            return Err(closed());
        }
        // One count of registrations, for the side channel and the scheduler.
        generation.into_iter().for_each(|generation| state.scheduler.registered(generation));
        if let Some(held) = state.ranks.get_mut(&rank) {
            if let (Half::Mooncake(worker), Some(own)) = (&mut held.worker, own) {
                worker.describe(own);
            }
            held.registered = Some(Arc::new(registered));
            if held.agent.replace((agent.clone(), scratch)).is_none() {
                state.unheard.push((rank, agent));
            }
        }
        drop(state);
        self.wake_up.notify_one();
        match side {
            Listening::Nixl(_) => Ok(()),
            Listening::Mooncake(channels) => channels.publish(self, rank),
        }
    }

    pub(super) fn give_back(self: &Arc<Self>, rank: WorkerRank, deadline: Deadline) -> Completion<()> {
        let (done, ticket) = Completion::with_ticket();
        let mut state = self.state.lock();
        if state.is_closing() {
            drop(state);
            self.settle_at_end(ticket);
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
