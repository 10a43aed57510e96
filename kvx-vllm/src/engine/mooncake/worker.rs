//! The worker as a whole: the step's message, deadlines, and reports.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::super::action::{Action, Connection, MoveId};
use super::super::failure::{FailureKind, HandshakeFailure, TransferFailure};
use super::super::peers::{Peers, Reach};
use super::super::plan::PeerPlan;
use super::super::settings::Settings;
use super::super::step::{ConnectorMeta, WorkerOutput};
use super::action::{AskId, MooncakeAction, PullId};
use super::ask::Ask;
use super::directory::Listings;
use super::layouts::{Layouts, Target};
use super::pull::{MooncakeLoad, Pull};
use super::serve::{Serve, ServeId, Write};
use super::settings::Mooncake;
use super::transfers::Transfers;
use crate::engine::deadlines::Deadlines;
use crate::ids::{EngineId, RequestId, WorkerRank};
use crate::time::Time;
use crate::wire::mooncake::PullRequest;

/// The worker's side of a MooncakeConnector.
///
/// Like the methods of [`Worker`](crate::engine::Worker), its methods neither block nor perform
/// I/O. The runtime takes actions from [`next_action`](Self::next_action), carries them out, and
/// reports the results with the methods that the actions name.
#[derive(Debug)]
pub struct MooncakeWorker {
    pub(super) settings: Settings,
    pub(super) mooncake: Mooncake,
    pub(super) rank: WorkerRank,
    /// The description of this worker and its memory, without requests.
    pub(super) own: PullRequest,
    pub(super) peers: Peers,
    pub(super) actions: VecDeque<MooncakeAction>,
    pub(super) output: WorkerOutput,
    // The decode's side.
    pub(super) listings: Listings,
    pub(super) loads: BTreeMap<RequestId, MooncakeLoad>,
    pub(super) load_deadlines: Deadlines<RequestId>,
    pub(super) pulls: BTreeMap<PullId, Pull>,
    pub(super) pull_deadlines: Deadlines<PullId>,
    pub(super) last_pull: u64,
    // The prefill's side.
    pub(super) transfers: Transfers,
    pub(super) layouts: Layouts,
    pub(super) asks: BTreeMap<AskId, Ask>,
    pub(super) serves: BTreeMap<ServeId, Serve>,
    /// The approximate size of `serves` in bytes.
    pub(super) serve_bytes: usize,
    pub(super) last_serve: u64,
    /// Pulled requests by the name of their transfer.
    pub(super) asked_for: BTreeMap<RequestId, Vec<ServeId>>,
    pub(super) serve_deadlines: Deadlines<ServeId>,
    /// Pulled requests that wait for the description of a decode's memory.
    pub(super) connecting: BTreeMap<EngineId, Vec<ServeId>>,
    pub(super) writes: BTreeMap<MoveId, Write>,
    pub(super) last_move: u64,
}

impl MooncakeWorker {
    /// Creates the worker's side for one rank. `own` describes the worker in its pulls: the address
    /// of its Mooncake engine, its rank, its memory layout, and the layout's name (0: none). The
    /// worker adds the requests.
    ///
    /// # Errors
    ///
    /// `Invalid` if the settings are not those of a MooncakeConnector. `Unsupported` if they choose
    /// the protocol before vLLM 0.16 and it does not support the engine's sizes.
    pub fn new(settings: Settings, rank: WorkerRank, own: PullRequest) -> kvx_core::Result<Self> {
        let Some(mooncake) = settings.mooncake.clone() else {
            return Err(kvx_core::ErrorKind::Invalid.because(
                "the settings are for a NixlConnector; set kv_connector to MooncakeConnector",
            ));
        };
        settings.fits_older_mooncake()?;
        Ok(MooncakeWorker {
            rank,
            own,
            peers: Peers::new(settings.engine_ttl),
            actions: VecDeque::new(),
            output: WorkerOutput::default(),
            listings: Listings::default(),
            loads: BTreeMap::new(),
            load_deadlines: Deadlines::default(),
            pulls: BTreeMap::new(),
            pull_deadlines: Deadlines::default(),
            last_pull: 0,
            transfers: Transfers::new(mooncake.wait),
            layouts: Layouts::default(),
            asks: BTreeMap::new(),
            serves: BTreeMap::new(),
            serve_bytes: 0,
            last_serve: 0,
            asked_for: BTreeMap::new(),
            serve_deadlines: Deadlines::default(),
            connecting: BTreeMap::new(),
            writes: BTreeMap::new(),
            last_move: 0,
            mooncake,
            settings,
        })
    }

    /// Returns the worker's rank.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Replaces the worker's description after it has registered other memory. No peer knows the
    /// new layout yet.
    pub fn describe(&mut self, own: PullRequest) {
        self.own = own;
        self.listings.knowing.clear();
    }

    /// Returns the next action, in order.
    pub fn next_action(&mut self) -> Option<MooncakeAction> {
        self.actions.pop_front()
    }

    /// Takes the message of a step. Never waits for a peer.
    pub fn start_load_kv(&mut self, now: Time, meta: ConnectorMeta) {
        let built_at = meta.built_at;
        let ours = |time: Time| time.rebased(built_at, now);
        for (request, name) in meta.named {
            self.named(request, name);
        }
        for request in meta.dropped.iter().chain(&meta.withdrawn) {
            self.dropped(now, request);
        }
        for order in meta.send {
            self.ready(now, order.request, order.push.unwrap_or_default(), ours(order.expires));
        }
        let orders = meta.receive.into_iter().map(|mut order| {
            order.deadline = ours(order.deadline);
            order
        });
        self.receive(now, orders.collect());
        for request in meta.cancel {
            self.cancel(now, &request);
        }
    }

    /// Handles the deadlines that have passed, and returns the worker's report.
    pub fn get_finished(&mut self, now: Time) -> WorkerOutput {
        while let Some(request) = self.load_deadlines.take_reached(now) {
            self.load_timed_out(now, &request);
        }
        while let Some(pull) = self.pull_deadlines.take_reached(now) {
            self.pull_timed_out(now, pull);
        }
        while let Some(serve) = self.serve_deadlines.take_reached(now) {
            self.fail_serve(now, serve, "Timeout waiting for P side ready.");
        }
        while let Some(name) = self.transfers.take_expired(now) {
            self.expired(now, &name);
        }
        self.output.at = now;
        std::mem::take(&mut self.output)
    }

    /// Returns the next time at which [`get_finished`](Self::get_finished) is due, even without
    /// other events.
    pub fn next_deadline(&self) -> Option<Time> {
        let each = [
            self.load_deadlines.next(),
            self.pull_deadlines.next(),
            self.serve_deadlines.next(),
            self.transfers.next_deadline(),
        ];
        each.into_iter().flatten().min()
    }

    /// Fails all pulled requests, and closes pulls and connections. May be called repeatedly.
    pub fn shutdown(&mut self, now: Time) {
        for serve in self.serves.keys().copied().collect::<Vec<_>>() {
            self.fail_serve(now, serve, "the prefill was shut down");
        }
        for pull in std::mem::take(&mut self.pulls).into_keys() {
            self.actions.push_back(MooncakeAction::Hangup { pull });
        }
        self.pull_deadlines = Deadlines::default();
        self.listings.forget_all();
        self.with_peers(|peers, actions| peers.forget_all(actions));
    }

    /// Returns the number of loads, pulls, kept blocks, writes and connections that the worker
    /// still knows.
    pub fn len(&self) -> usize {
        self.loads.len()
            + self.pulls.len()
            + self.transfers.len()
            + self.serves.len()
            + self.asks.len()
            + self.writes.len()
            + self.peers.connections()
    }

    /// Returns whether the worker knows none of these.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Handles the description of a decode worker's memory, or its failure.
    pub fn connected(
        &mut self,
        now: Time,
        connection: Connection,
        result: Result<PeerPlan, HandshakeFailure>,
    ) {
        let ended =
            self.with_peers(|peers, actions| peers.connected(now, connection, result, actions));
        // Expected race: another connection has replaced this one, or the worker was shut down.
        let Some((peer, failure)) = ended else { return };
        let waiting = self.connecting.remove(&peer.engine).unwrap_or_default();
        if let Some(HandshakeFailure { error, .. }) = &failure {
            let mut said = TransferFailure::new(FailureKind::SendFailed, &**error);
            said.address = Some(peer.address.clone());
            self.record(said);
        }
        for serve in waiting {
            match &failure {
                Some(failure) => self.fail_serve(now, serve, &failure.error),
                None => self.begin(now, serve),
            }
        }
    }

    /// Returns the connection to a decode's memory, or starts to describe the memory.
    pub(super) fn reach(&mut self, now: Time, target: &Arc<Target>) -> Reach {
        let mut asked = VecDeque::new();
        let reach = self.peers.reach(now, &target.peer, || Ok(vec![target.rank()]), &mut asked);
        self.actions.extend(asked.into_iter().map(|action| match action {
            Action::Handshake { connection, .. } => {
                MooncakeAction::Connect { connection, target: Arc::clone(target) }
            }
            other => MooncakeAction::Engine(other),
        }));
        reach
    }

    pub(super) fn with_peers<T>(
        &mut self,
        call: impl FnOnce(&mut Peers, &mut VecDeque<Action>) -> T,
    ) -> T {
        let mut asked = VecDeque::new();
        let result = call(&mut self.peers, &mut asked);
        self.actions.extend(asked.into_iter().map(MooncakeAction::Engine));
        result
    }

    pub(super) fn record(&mut self, failure: TransferFailure) {
        self.output.stats.record_failure(failure.kind);
        self.output.failures.push(failure);
    }
}
