//! Registering an engine's caches, and giving them back.

use std::sync::Arc;

use kvx_config::BufferDevice;
use kvx_core::{
    Agent, Completion, Deadline, DeviceAccess, Error, ErrorKind, Memory, Result, Ticket,
};

use super::group::{Away, HeadHandle, ReleaseConfirmation};
use super::half::WorkerKind;
use super::host_copies::HostCopies;
use super::listening::Listening;
use super::rank::Registered;
use super::state::{RankState, Shared, State};
use super::words::{Published, Scratch, WORDS};
use crate::engine::{PoolBlocks, WorkerRank};
use crate::mapping::Caches;
use crate::wire::group::ToHead;
use crate::wire::mooncake::PullRequest;

/// Caches on their way back to the engine, or of which nobody knows whether they are.
pub(super) struct GivingBack {
    pub(super) registered: Arc<Registered>,
    /// In the process of a rank: whether its engine knows.
    pub(super) knowing: Option<ReleaseConfirmation>,
    pub(super) ending: tokio::task::JoinHandle<()>,
}

/// Who hears of caches that are taken into use.
pub(super) enum AnnouncedTo {
    /// Peers have, as the engine's registration of that number, where the side channel counts them; and what a
    /// MooncakeConnector says of them.
    Peers(Option<u64>, Option<Box<PullRequest>>),
    /// The engine of this rank, in the same moment; and whether peers are told of copies on the host.
    Engine(Vec<u8>, bool),
}

impl Shared {
    pub(super) fn register(
        self: &Arc<Self>,
        rank: WorkerRank,
        caches: Caches,
        memory: Vec<Arc<Memory>>,
    ) -> Result<()> {
        let invalid = |sentence: String| Err(Error::new(ErrorKind::Invalid, sentence));
        self.check_block_size(&caches)?;
        // Workers register one after the other: the first one makes what they share.
        let side = self.side.lock();
        let side = side.as_ref().ok_or_else(closed)?;
        let pool = PoolBlocks::of(caches.geometry());
        let (agent, others) = {
            let state = self.state.lock();
            let others = state.others_have_words(rank);
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
            memory.ok_or_else(|| {
                Error::new(ErrorKind::Closed, "the caches were given back meanwhile")
            })
        };
        let registered = self.open(rank, agent, caches, memory, words)?;
        let (generation, own) = match side {
            Listening::Nixl(server) => {
                (Some(server.publish(rank, &self.setup.metadata(&registered)?)), None)
            }
            Listening::Mooncake(_) => (None, Some(self.own_description(rank, &registered)?)),
        };
        // One count of registrations, for the side channel and the scheduler.
        let told = AnnouncedTo::Peers(generation, own.map(Box::new));
        self.take_up(rank, registered, told).inspect_err(|_| side.withdraw(self, rank))?;
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
            ErrorKind::Invalid,
            format!(
                "the caches have logical blocks of {tokens} tokens, the connector was built for {}: call \
                 ConnectorBuilder::block_size({tokens})",
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
        // A backend that moves memory of devices through small buffers needs no copy of all of it.
        let copied =
            self.setup.config.buffer_device() == BufferDevice::Cpu && !agent.stages_devices();
        let copies = if copied { HostCopies::new(&caches, &memory)? } else { None };
        let (host_copies, caches, memory) = match copies {
            Some((copies, caches, memory)) => (Some(copies), caches, memory),
            None => (None, caches, memory),
        };
        let words = |agent: &Agent| agent.register(WORDS, words()?);
        let mut registered =
            Registered::new((agent, scratch), caches, memory, self.digests(), words)?;
        registered.host_copies = host_copies;
        Ok(registered)
    }

    /// Takes caches that are registered into use. Errors: `Closed`, and they are given up with their agent.
    pub(super) fn take_up(
        &self,
        rank: WorkerRank,
        registered: Registered,
        told: AnnouncedTo,
    ) -> Result<()> {
        let mut state = self.state.lock();
        if state.is_closing() {
            // The shutdown has not seen an agent that is new here: it ends with this.
            return Err(closed());
        }
        let own = match told {
            AnnouncedTo::Peers(generation, own) => {
                generation
                    .into_iter()
                    .for_each(|generation| state.scheduler.registered(generation));
                own
            }
            AnnouncedTo::Engine(metadata, host_copies) => {
                if let Some(head) = &state.head {
                    head.say(ToHead::Registered { metadata, host_copies });
                }
                None
            }
        };
        let (agent, scratch) = (registered.agent.clone(), Arc::clone(&registered.scratch));
        if let Some(held) = state.ranks.get_mut(&rank) {
            if let (WorkerKind::Mooncake(worker), Some(own)) = (&mut held.worker, own) {
                worker.describe(*own);
            }
            if let WorkerKind::Nixl(worker) = &mut held.worker {
                worker.caches_taken_up();
            }
            held.registered = Some(Arc::new(registered));
            if held.agent.replace((agent.clone(), scratch)).is_none() {
                state.unheard.push((rank, agent));
            }
        }
        drop(state);
        self.wake_up.notify_one();
        Ok(())
    }

    pub(super) fn give_back(
        self: &Arc<Self>,
        rank: WorkerRank,
        deadline: Deadline,
    ) -> Completion<()> {
        let (done, ticket) = Completion::with_ticket();
        let mut state = self.state.lock();
        if state.is_closing() {
            drop(state);
            self.settle_at_end(ticket);
            return done;
        }
        if state.ranks.get(&rank).is_some_and(|held| held.worker.away().is_some()) {
            drop(state);
            let why = "a rank in a process of its own gives its caches back there (JoinedRank::give_back)";
            ticket.settle(Err(Error::new(ErrorKind::Invalid, why)));
            return done;
        }
        let mut unused = Some(ticket);
        // What was published before goes to the workers before.
        let now = self.clock.now();
        let ready = state.scheduler.take_ready(now, None);
        state.pass_on(now, ready);
        if state.ranks.get(&rank).is_some_and(|held| held.registered.is_some()) {
            state.release_all();
        }
        let State { ranks, head, .. } = &mut *state;
        if let Some(held) = ranks.get_mut(&rank) {
            held.worker.give_back(now);
            held.links.clear();
            let given = match held.registered.take() {
                Some(registered) => {
                    held.giving_back.retain(|earlier| !earlier.ending.is_finished());
                    // In the order in which caches come and go: the engine hears of both under this lock.
                    Some((registered, head.as_mut().map(HeadHandle::give_back)))
                }
                // Those that nobody knows of yet are asked for once more.
                None => held
                    .giving_back
                    .last()
                    .map(|last| (Arc::clone(&last.registered), last.knowing.clone())),
            };
            if let Some((registered, knowing)) = given
                && let Some(ticket) = unused.take()
            {
                let given_back = Arc::clone(self).revoke(
                    rank,
                    Arc::clone(&registered),
                    knowing.clone(),
                    deadline,
                    ticket,
                );
                held.giving_back.push(GivingBack {
                    registered,
                    knowing,
                    ending: self.runtime.spawn(given_back),
                });
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

    async fn revoke(
        self: Arc<Self>,
        rank: WorkerRank,
        registered: Arc<Registered>,
        knowing: Option<ReleaseConfirmation>,
        deadline: Deadline,
        ticket: Ticket,
    ) {
        let mut result = registered.revoke(deadline).await;
        if let Some(knowing) = knowing.filter(|_| result.is_ok()) {
            result = knowing.known(deadline).await;
        }
        if result.is_ok() {
            self.forget_given_back(rank, &registered);
        }
        drop(registered);
        match result {
            // The agent was shut down meanwhile, and that says whether anything touches the memory.
            Err(error) if error.kind() == ErrorKind::Closed => self.settle_at_end(ticket),
            result => ticket.settle(result),
        }
    }

    /// The memory of caches that are known to be given back goes with the engine's last word of it. For the task that
    /// has found so.
    fn forget_given_back(&self, rank: WorkerRank, registered: &Arc<Registered>) {
        let own = tokio::task::id();
        let mut state = self.state.lock();
        let over = |given: &mut GivingBack| {
            let same = Arc::ptr_eq(&given.registered, registered);
            given.ending.id() == own || same && given.ending.is_finished()
        };
        let held = state.ranks.get_mut(&rank);
        let over: Vec<_> =
            held.into_iter().flat_map(|held| held.giving_back.extract_if(.., over)).collect();
        drop(state);
        drop(over); // memory may go with it
    }
}

impl State {
    /// Whether another rank has caches, or is about to register some: they all have the same words.
    pub(super) fn others_have_words(&self, rank: WorkerRank) -> bool {
        let has_words = |held: &RankState| {
            held.registered.is_some() || held.worker.away().is_some_and(Away::has_words)
        };
        self.published.is_some()
            && self.ranks.iter().any(|(at, held)| *at != rank && has_words(held))
    }
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the connector was shut down: build another one")
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
