//! Registering an engine's caches, and giving them back.

use std::sync::Arc;

use kvx_core::backend::Ticket;
use kvx_core::{Agent, Completion, Deadline, DeviceAccess, ErrorKind, Memory, Result};
use kvx_vllm::config::BufferDevice;

use super::caches::RegisteredCaches;
use super::generations::{GenerationState, WordsMemory};
use super::group::{HeadHandle, ReleaseConfirmation};
use super::host_copies::HostCopies;
use super::listening::PeerSockets;
use super::mooncake::{announce, own_request};
use super::ranks::CacheReturn;
use super::ranks::WorkerKind;
use super::scratch::Scratch;
use super::shared::Shared;
use super::state::{State, closed};
use kvx_vllm::engine::{PoolBlocks, WorkerRank};
use kvx_vllm::group::ToHead;
use kvx_vllm::mapping::Caches;
use kvx_vllm::wire::mooncake::PullRequest;
use kvx_vllm::wire::nixl::GENERATIONS_REGION;

/// The recipient of the notification that caches are in use, and the content of the notification.
pub(super) enum RegistrationNotice {
    /// Peers have been notified. Carries the number of the engine's registration, if the side
    /// channel counts them, and the description for decodes of a MooncakeConnector.
    Peers(Option<u64>, Option<Box<PullRequest>>),
    /// The engine of this rank. Carries the metadata, and whether peers see copies on the host. It
    /// is sent under the lock under which the caches are taken into use.
    Engine(Vec<u8>, bool),
}

pub(super) fn register(
    shared: &Arc<Shared>,
    rank: WorkerRank,
    caches: Caches,
    memory: Vec<Arc<Memory>>,
) -> Result<()> {
    let invalid = |sentence: String| Err(ErrorKind::Invalid.because(sentence));
    check_block_size(shared, &caches)?;
    // Workers register one after the other. The first one creates what they share.
    let listening = shared.listening.lock();
    let listening = listening.as_ref().ok_or_else(closed)?;
    let pool = PoolBlocks::of(caches.geometry());
    let (agent, others) = {
        let state = shared.state.lock();
        let others = state.others_have_caches(rank);
        let Some(held) = state.ranks.get(rank) else {
            return invalid(format!("there is no worker pp {} tp {}", rank.pp, rank.tp));
        };
        if held.worker.remote().is_some() {
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
        if others
            && state.publication.pool.as_ref().is_some_and(|known| known.most() != pool.most())
        {
            return invalid(format!(
                "worker pp {} tp {} has {} logical blocks, another worker of this engine {}: give all of them the \
                 same",
                rank.pp,
                rank.tp,
                pool.most(),
                state.publication.pool.as_ref().map_or(0, PoolBlocks::most)
            ));
        }
        (held.agent.clone(), others)
    };
    if !others {
        let published = GenerationState::new(pool.most(), shared.digests())?;
        let mut state = shared.state.lock();
        (state.publication.pool, state.publication.published) = (Some(pool), Some(published));
    }
    let words = || {
        let memory =
            shared.state.lock().publication.published.as_ref().map(GenerationState::memory);
        memory.ok_or_else(|| ErrorKind::Closed.because("the caches were given back meanwhile"))
    };
    let registered = open(shared, rank, agent, caches, memory, words)?;
    let (generation, own) = match listening {
        PeerSockets::Nixl(server) => {
            (Some(server.publish(rank, &shared.setup.metadata(&registered)?)), None)
        }
        PeerSockets::Mooncake(_) => (None, Some(own_request(shared, rank, &registered)?)),
    };
    // The side channel and the scheduler use the same count of registrations.
    let told = RegistrationNotice::Peers(generation, own.map(Box::new));
    take_up(shared, rank, registered, told).inspect_err(|_| listening.withdraw(rank))?;
    match listening {
        PeerSockets::Nixl(_) => Ok(()),
        PeerSockets::Mooncake(channels) => announce(channels, shared, rank),
    }
}

/// Checks that the caches have blocks of the size that the connector was built with.
pub(super) fn check_block_size(shared: &Shared, caches: &Caches) -> Result<()> {
    let geometry = caches.geometry();
    let tokens = geometry.block_tokens().saturating_mul(geometry.kernel_per_logical());
    if tokens == shared.setup.settings.block_size {
        return Ok(());
    }
    Err(ErrorKind::Invalid.because(format!(
        "the caches have logical blocks of {tokens} tokens, the connector was built for {}: call \
         ConnectorBuilder::block_size({tokens})",
        shared.setup.settings.block_size
    )))
}

/// Registers caches with an agent. `words` allocates the generation counters of their blocks.
pub(super) fn open(
    shared: &Shared,
    rank: WorkerRank,
    agent: Option<(Agent, Arc<Scratch>)>,
    caches: Caches,
    memory: Vec<Arc<Memory>>,
    words: impl FnOnce() -> Result<WordsMemory>,
) -> Result<RegisteredCaches> {
    let (agent, scratch) = match agent {
        Some(known) => known,
        None => {
            let agent = shared.setup.agent(rank, &devices_of(&memory))?;
            let scratch = Arc::new(Scratch::new(&agent)?);
            (agent, scratch)
        }
    };
    // A backend that moves device memory through small buffers needs no copy of all of it.
    let copied =
        shared.setup.config.buffer_device() == BufferDevice::Cpu && !agent.stages_devices();
    let copies = if copied { HostCopies::new(&caches, &memory)? } else { None };
    let (host_copies, caches, memory) = match copies {
        Some((copies, caches, memory)) => (Some(copies), caches, memory),
        None => (None, caches, memory),
    };
    let words = |agent: &Agent| {
        let WordsMemory { memory, leases } = words()?;
        Ok((agent.register(GENERATIONS_REGION, memory)?, leases))
    };
    let mut registered =
        RegisteredCaches::new((agent, scratch), caches, memory, shared.digests(), words)?;
    registered.host_copies = host_copies;
    Ok(registered)
}

/// Takes registered caches into use. Errors: `Closed`. The caches and a new agent are then dropped.
pub(super) fn take_up(
    shared: &Shared,
    rank: WorkerRank,
    registered: RegisteredCaches,
    told: RegistrationNotice,
) -> Result<()> {
    let mut state = shared.state.lock();
    if state.is_closing() {
        // The shutdown has not seen an agent that is new here. Dropping it ends it.
        return Err(closed());
    }
    let own = match told {
        RegistrationNotice::Peers(generation, own) => {
            generation.into_iter().for_each(|generation| state.scheduler.registered(generation));
            own
        }
        RegistrationNotice::Engine(metadata, host_copies) => {
            if let Some(head) = &state.head {
                head.send(ToHead::Registered { metadata, host_copies });
            }
            None
        }
    };
    let (agent, scratch) = (registered.agent.clone(), Arc::clone(&registered.scratch));
    let has_own_process = state.head.is_some();
    if let Some(held) = state.ranks.get_mut(rank) {
        if let (WorkerKind::Mooncake(worker), Some(own)) = (&mut held.worker, own) {
            worker.describe(*own);
        }
        if let WorkerKind::Nixl(worker) = &mut held.worker {
            worker.caches_taken_up();
            if has_own_process {
                worker.accept_early_completions();
            }
        }
        held.registered = Some(Arc::new(registered));
        if held.agent.replace((agent.clone(), scratch)).is_none() {
            state.new_agents.push((rank, agent));
        }
    }
    drop(state);
    shared.wake_up.notify_one();
    Ok(())
}

pub(super) fn give_back(
    shared: &Arc<Shared>,
    rank: WorkerRank,
    deadline: Deadline,
) -> Completion<()> {
    let (done, ticket) = Completion::with_ticket();
    let mut state = shared.state.lock();
    if state.is_closing() {
        drop(state);
        shared.settle_at_end(ticket);
        return done;
    }
    if state.ranks.remote_at(rank).is_some() {
        drop(state);
        let why =
            "a rank in a process of its own gives its caches back there (JoinedRank::give_back)";
        ticket.settle(Err(ErrorKind::Invalid.because(why)));
        return done;
    }
    let mut unused = Some(ticket);
    // Workers have to learn of all blocks that were published before.
    let now = shared.clock.now();
    state.pass_on_ready(now, None);
    let State { ranks, publication, head, .. } = &mut *state;
    if ranks.registered(rank).is_some() {
        publication.release_all(ranks);
    }
    if let Some(held) = ranks.get_mut(rank) {
        held.worker.give_back(now);
        held.links.clear();
        let given = match held.registered.take() {
            Some(registered) => {
                held.returns.retain(|earlier| !earlier.task.is_finished());
                // The engine learns of registrations and returns in their order, because both are
                // sent under this lock.
                Some((registered, head.as_mut().map(HeadHandle::give_back)))
            }
            // Waits once more for a return that is not proven yet.
            None => held
                .returns
                .last()
                .map(|last| (Arc::clone(&last.registered), last.confirmation.clone())),
        };
        if let Some((registered, confirmation)) = given
            && let Some(ticket) = unused.take()
        {
            let given_back = revoke(
                Arc::clone(shared),
                rank,
                Arc::clone(&registered),
                confirmation.clone(),
                (deadline, ticket),
            );
            let task = shared.runtime.spawn(given_back);
            held.returns.push(CacheReturn { registered, confirmation, task });
        }
    }
    drop(state);
    if let Some(ticket) = unused {
        ticket.settle(Ok(()));
    }
    if let Some(listening) = &*shared.listening.lock() {
        listening.withdraw(rank);
    }
    shared.wake_up.notify_one();
    done
}

async fn revoke(
    shared: Arc<Shared>,
    rank: WorkerRank,
    registered: Arc<RegisteredCaches>,
    confirmation: Option<ReleaseConfirmation>,
    (deadline, ticket): (Deadline, Ticket),
) {
    let mut result = registered.revoke(deadline).await;
    if let Some(confirmation) = confirmation.filter(|_| result.is_ok()) {
        result = confirmation.known(deadline).await;
    }
    if result.is_ok() {
        forget_return(&shared, rank, &registered);
    }
    drop(registered);
    match result {
        // The agent was shut down in the meantime. The shutdown decides whether anything touches
        // the memory.
        Err(error) if error.kind() == ErrorKind::Closed => shared.settle_at_end(ticket),
        result => ticket.settle(result),
    }
}

/// Drops the memory of caches whose return is proven. Called by the task that has proved it.
fn forget_return(shared: &Shared, rank: WorkerRank, registered: &Arc<RegisteredCaches>) {
    let own = tokio::task::id();
    let mut state = shared.state.lock();
    let over = |given: &mut CacheReturn| {
        let same = Arc::ptr_eq(&given.registered, registered);
        given.task.id() == own || same && given.task.is_finished()
    };
    let held = state.ranks.get_mut(rank);
    let over: Vec<_> =
        held.into_iter().flat_map(|held| held.returns.extract_if(.., over)).collect();
    drop(state);
    drop(over); // this may free memory
}

/// Returns the devices of these pools, each once. Transports open device memory through them.
fn devices_of(memory: &[Arc<Memory>]) -> Vec<Arc<dyn DeviceAccess>> {
    let mut devices: Vec<Arc<dyn DeviceAccess>> = Vec::new();
    for access in memory.iter().filter_map(|memory| memory.device_access()) {
        if !devices.iter().any(|known| Arc::ptr_eq(known, access)) {
            devices.push(Arc::clone(access));
        }
    }
    devices
}
