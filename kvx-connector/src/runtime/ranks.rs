//! The workers of an engine, each with its caches, links and moves.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvx_core::{Agent, Result};
use tokio::sync::Notify;

use super::caches::RegisteredCaches;
use super::generations::StaleBlocks;
use super::group::{ReleaseConfirmation, RemoteRank, Task};
use super::host_copies::may_go_on;
use super::link::PeerLink;
use super::scratch::Scratch;
use kvx_vllm::engine::mooncake::{MooncakeAction, MooncakeWorker};
use kvx_vllm::engine::{
    Action, BlockLists, Connection, ConnectorMeta, FailedLoad, Fresh, Kept, LoadFailure,
    MoveFailure, MoveId, ReceiveOrder, RequestId, Settings, Time, Transferred, Worker,
    WorkerOutput, WorkerRank,
};
use kvx_vllm::wire::mooncake::PullRequest;

/// A worker of any kind, with the calls that all kinds have.
pub(super) enum WorkerKind {
    Nixl(Box<Worker>),
    Mooncake(Box<MooncakeWorker>),
    /// A worker in a process of its own, where it runs NixlConnector's protocol.
    Remote(Box<RemoteRank>),
}

/// A request of a worker to the runtime.
pub(super) enum WorkerAction {
    /// A request that all protocols have.
    Engine(Action),
    /// A request that only the MooncakeConnector has.
    Mooncake(MooncakeAction),
}

/// Calls the same method on either kind of worker in this process.
macro_rules! here {
    ($half:expr, $worker:ident => $call:expr, $remote:pat => $otherwise:expr) => {
        match $half {
            WorkerKind::Nixl($worker) => $call,
            WorkerKind::Mooncake($worker) => $call,
            WorkerKind::Remote($remote) => $otherwise,
        }
    };
}

impl WorkerKind {
    /// Creates a worker of an engine with these settings.
    pub(super) fn new(settings: &Settings, rank: WorkerRank) -> kvx_core::Result<Self> {
        Ok(match &settings.mooncake {
            None => WorkerKind::Nixl(Box::new(Worker::new(settings.clone(), rank))),
            // The worker asks for nothing before its caches are registered.
            Some(_) => {
                let nowhere = PullRequest::new("", 0, settings.tp_size, rank.tp);
                WorkerKind::Mooncake(Box::new(MooncakeWorker::new(
                    settings.clone(),
                    rank,
                    nowhere,
                )?))
            }
        })
    }

    pub(super) fn remote(&self) -> Option<&RemoteRank> {
        if let WorkerKind::Remote(remote) = self { Some(remote) } else { None }
    }

    pub(super) fn remote_mut(&mut self) -> Option<&mut RemoteRank> {
        if let WorkerKind::Remote(remote) = self { Some(remote) } else { None }
    }

    /// Returns whether a worker of this process is loading blocks for a request through
    /// NixlConnector's protocol.
    pub(super) fn is_loading(&self, request: &RequestId) -> bool {
        matches!(self, WorkerKind::Nixl(worker) if worker.is_loading(request))
    }

    /// Hands the message of a step to the worker.
    pub(super) fn start_load_kv(&mut self, now: Time, meta: ConnectorMeta) {
        here!(self, worker => worker.start_load_kv(now, meta), remote => remote.start_load_kv(meta));
    }

    /// Takes the worker's report.
    pub(super) fn get_finished(&mut self, now: Time) -> WorkerOutput {
        here!(self, worker => worker.get_finished(now), remote => remote.take_output())
    }

    /// Returns when [`get_finished`](Self::get_finished) has to be called at the latest.
    pub(super) fn next_deadline(&self) -> Option<Time> {
        here!(self, worker => worker.next_deadline(), _ => None)
    }

    /// Takes the next request of a worker in this process.
    pub(super) fn next_action(&mut self) -> Option<WorkerAction> {
        match self {
            WorkerKind::Nixl(worker) => worker.next_action().map(WorkerAction::Engine),
            WorkerKind::Mooncake(worker) => worker.next_action().map(|action| match action {
                MooncakeAction::Engine(action) => WorkerAction::Engine(action),
                action => WorkerAction::Mooncake(action),
            }),
            WorkerKind::Remote(_) => None,
        }
    }

    /// Shuts down a worker in this process.
    pub(super) fn shutdown(&mut self, now: Time) {
        match self {
            WorkerKind::Nixl(worker) => worker.shutdown(),
            WorkerKind::Mooncake(worker) => worker.shutdown(now),
            WorkerKind::Remote(_) => {}
        }
    }

    /// Records that the worker's caches are given back.
    pub(super) fn give_back(&mut self, now: Time) {
        match self {
            WorkerKind::Nixl(worker) => worker.caches_given_back(now),
            other => other.shutdown(now),
        }
    }

    pub(super) fn move_resolved(
        &mut self,
        now: Time,
        id: MoveId,
        result: Result<Transferred, MoveFailure>,
    ) {
        here!(self, worker => worker.move_resolved(now, id, result), _ => ());
    }

    pub(super) fn move_settled(&mut self, now: Time, id: MoveId) {
        here!(self, worker => worker.move_settled(now, id), _ => ());
    }

    pub(super) fn move_forgotten(&mut self, now: Time, id: MoveId) {
        here!(self, worker => worker.move_forgotten(now, id), _ => ());
    }

    pub(super) fn fenced(&mut self, now: Time, request: &RequestId) {
        here!(self, worker => worker.fenced(now, request), _ => ());
    }
}

/// Caches that are being given back to the engine, or whose return cannot be proven.
pub(super) struct CacheReturn {
    pub(super) registered: Arc<RegisteredCaches>,
    /// In the process of a rank: the engine's confirmation.
    pub(super) confirmation: Option<ReleaseConfirmation>,
    pub(super) task: tokio::task::JoinHandle<()>,
}

/// The blocks that a load fills, and the caches that were registered when it started.
pub(super) struct FilledBlocks {
    pub(super) own: Arc<RegisteredCaches>,
    pub(super) blocks: BlockLists,
}

/// A load whose blocks are on the host, and are to be copied to the device.
pub(super) struct DeviceFill {
    pub(super) rank: WorkerRank,
    pub(super) request: RequestId,
    pub(super) filled: FilledBlocks,
}

/// Loads of a worker whose peers see copies of its caches on the host.
#[derive(Default)]
struct DeviceFills {
    /// Loads whose blocks are still on their way to the host.
    loads: HashMap<RequestId, FilledBlocks>,
    due: Vec<DeviceFill>,
    /// Loads whose copy to the device has ended or failed.
    done: Vec<(RequestId, BlockLists, Result<()>)>,
}

/// One worker of an engine.
pub(super) struct RankState {
    pub(super) worker: WorkerKind,
    /// Steps whose loads the engine has not started on this worker yet.
    pending: Vec<ConnectorMeta>,
    /// The agent, kept from one registration to the next.
    pub(super) agent: Option<(Agent, Arc<Scratch>)>,
    pub(super) registered: Option<Arc<RegisteredCaches>>,
    pub(super) links: HashMap<Connection, Arc<PeerLink>>,
    /// Moves that can be cancelled, with the signals to cancel them.
    pub(super) moves: HashMap<MoveId, Arc<Notify>>,
    /// Caches on their way back. A shutdown waits for them.
    pub(super) returns: Vec<CacheReturn>,
    fills: DeviceFills,
}

impl RankState {
    fn new(worker: WorkerKind) -> Self {
        RankState {
            worker,
            pending: Vec::new(),
            agent: None,
            registered: None,
            links: HashMap::new(),
            moves: HashMap::new(),
            returns: Vec::new(),
            fills: DeviceFills::default(),
        }
    }

    /// Keeps a step for [`take_pending`](Self::take_pending).
    pub(super) fn hold(&mut self, meta: &ConnectorMeta) {
        self.pending.push(meta.clone());
    }

    /// Takes the steps that the engine starts now.
    pub(super) fn take_pending(&mut self) -> Vec<ConnectorMeta> {
        std::mem::take(&mut self.pending)
    }

    /// Gives the worker the message of a step. A load that is cancelled before the engine has
    /// started it here does not start.
    fn pass_on(&mut self, now: Time, mut meta: ConnectorMeta) {
        for pending in self.pending.iter_mut().filter(|_| !meta.cancel.is_empty()) {
            let cancelled = |order: &mut ReceiveOrder| meta.cancel.contains(&order.request);
            meta.receive.extend(pending.receive.extract_if(.., cancelled));
        }
        self.begin(now, meta);
    }

    /// Lets the worker start the loads of a step.
    pub(super) fn begin(&mut self, now: Time, meta: ConnectorMeta) {
        if let Some((own, copies)) =
            self.registered.as_ref().and_then(|own| Some((own, own.host_copies.as_ref()?)))
        {
            for order in
                meta.receive.iter().filter(|order| order.awaited && !order.local.is_empty())
            {
                copies.forget(&order.local);
                let filled = FilledBlocks { own: Arc::clone(own), blocks: order.local.clone() };
                self.fills.loads.insert(order.request.clone(), filled);
            }
            for request in &meta.cancel {
                self.fills.loads.remove(request);
            }
        }
        self.worker.start_load_kv(now, meta);
    }

    /// Takes the worker's report, without the loads whose blocks are still to be copied to the
    /// device.
    fn take_output(&mut self, rank: WorkerRank, now: Time) -> WorkerOutput {
        let mut output = self.worker.get_finished(now);
        let DeviceFills { loads, due, done } = &mut self.fills;
        if !loads.is_empty() {
            for failed in &output.failed_recving {
                loads.remove(&failed.request);
            }
            output.finished_recving.retain(|request| match loads.remove(request) {
                Some(filled) => {
                    due.push(DeviceFill { rank, request: request.clone(), filled });
                    false
                }
                None => true,
            });
        }
        for (request, blocks, result) in done.drain(..) {
            if let Err(error) = result {
                if may_go_on(&error) {
                    output.lost.push((request.clone(), Kept::Load));
                }
                output.failed_recving.push(FailedLoad {
                    request: request.clone(),
                    failure: LoadFailure::Transfer(error.to_string()),
                    invalid: blocks.ascending(),
                });
            }
            output.finished_recving.push(request);
        }
        output
    }

    /// Takes the loads that are to be copied to the device.
    pub(super) fn take_fills(&mut self) -> Vec<DeviceFill> {
        std::mem::take(&mut self.fills.due)
    }

    /// Records that a load was copied to the device, or that the copy failed.
    pub(super) fn filled(&mut self, request: RequestId, blocks: BlockLists, result: Result<()>) {
        self.fills.done.push((request, blocks, result));
    }

    /// Takes the next request of the worker. A move in it can be cancelled from now on.
    pub(super) fn next_action(&mut self) -> Option<WorkerAction> {
        let action = self.worker.next_action()?;
        match &action {
            WorkerAction::Engine(Action::Read(order) | Action::Write(order))
            | WorkerAction::Mooncake(MooncakeAction::Write { what: order, .. }) => {
                self.moves.insert(order.id, Arc::default());
            }
            _ => {}
        }
        Some(action)
    }
}

/// All workers of an engine. In the process of a rank, that rank only.
pub(super) struct Ranks(BTreeMap<WorkerRank, RankState>);

impl Ranks {
    /// Creates these workers, with nothing registered.
    pub(super) fn new(
        settings: &Settings,
        ranks: impl IntoIterator<Item = WorkerRank>,
    ) -> Result<Self> {
        let rank = |rank| Ok((rank, RankState::new(WorkerKind::new(settings, rank)?)));
        ranks.into_iter().map(rank).collect::<Result<_>>().map(Ranks)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, rank: WorkerRank) -> Option<&RankState> {
        self.0.get(&rank)
    }

    pub(super) fn get_mut(&mut self, rank: WorkerRank) -> Option<&mut RankState> {
        self.0.get_mut(&rank)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (WorkerRank, &RankState)> {
        self.0.iter().map(|(rank, held)| (*rank, held))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (WorkerRank, &mut RankState)> {
        self.0.iter_mut().map(|(rank, held)| (*rank, held))
    }

    /// Returns the caches of a worker in this process.
    pub(super) fn registered(&self, rank: WorkerRank) -> Option<&Arc<RegisteredCaches>> {
        self.get(rank)?.registered.as_ref()
    }

    /// Yields the ranks in processes of their own.
    pub(super) fn remote(&self) -> impl Iterator<Item = (WorkerRank, &RemoteRank)> + Clone {
        self.0.iter().filter_map(|(rank, held)| Some((*rank, held.worker.remote()?)))
    }

    pub(super) fn remote_mut(&mut self) -> impl Iterator<Item = (WorkerRank, &mut RemoteRank)> {
        self.0.iter_mut().filter_map(|(rank, held)| Some((*rank, held.worker.remote_mut()?)))
    }

    /// Returns a rank in a process of its own.
    pub(super) fn remote_at(&mut self, rank: WorkerRank) -> Option<&mut RemoteRank> {
        self.get_mut(rank)?.worker.remote_mut()
    }

    /// Returns whether ranks may be on other hosts.
    pub(super) fn has_distant(&self) -> bool {
        self.remote().any(|(_, remote)| remote.is_distant())
    }

    /// Returns why an engine with ranks in processes of their own cannot load or publish, if so.
    pub(super) fn missing(&self) -> Option<String> {
        self.remote().find_map(|(_, remote)| remote.missing())
    }

    /// Returns whether another rank has caches or is about to register some. All ranks share the
    /// same generations.
    pub(super) fn others_have_caches(&self, rank: WorkerRank) -> bool {
        let has_caches = |held: &RankState| {
            held.registered.is_some() || held.worker.remote().is_some_and(RemoteRank::has_words)
        };
        self.iter().any(|(at, held)| at != rank && has_caches(held))
    }

    /// Returns whether some worker has not started a load yet.
    pub(super) fn is_pending(&self, request: &RequestId) -> bool {
        let pending = self.0.values().flat_map(|held| &held.pending);
        pending.flat_map(|meta| &meta.receive).any(|order| order.request == *request)
    }

    /// Returns whether a worker of this process is loading blocks for a request.
    pub(super) fn is_loading(&self, request: &RequestId) -> bool {
        self.0.values().any(|held| held.worker.is_loading(request))
    }

    /// Returns whether peers see host copies of the caches of any worker.
    pub(super) fn have_host_copies(&self) -> bool {
        self.0.values().any(|held| match held.worker.remote() {
            Some(remote) => remote.has_host_copies(),
            None => held.registered.as_ref().is_some_and(|own| own.host_copies.is_some()),
        })
    }

    /// Gives all workers the message of a step.
    pub(super) fn pass_on(&mut self, now: Time, meta: &ConnectorMeta) {
        self.0.values_mut().for_each(|held| held.pass_on(now, meta.clone()));
    }

    /// Takes the workers' reports, each with the worker's number in the engine.
    pub(super) fn take_outputs(&mut self, now: Time) -> Vec<(usize, WorkerOutput)> {
        let outputs = self.0.iter_mut().enumerate();
        let outputs = outputs.map(|(at, (rank, held))| (at, held.take_output(*rank, now)));
        outputs.filter(|(_, output)| !output.is_empty()).collect()
    }

    /// Lets ranks on other hosts raise the generations of blocks that no peer may read any more.
    pub(super) fn raise(&mut self, raised: &StaleBlocks) {
        self.remote_mut().for_each(|(_, remote)| remote.raise(raised));
    }

    /// Lets ranks in processes of their own write the digests of blocks that are about to be
    /// published.
    pub(super) fn digest(&mut self, fresh: &[Fresh]) -> Vec<Task> {
        self.remote_mut().flat_map(|(_, remote)| remote.digest(fresh)).collect()
    }
}
