//! The worker's side: one per tensor- and pipeline-parallel rank, next to the memory that moves.

mod early;
mod ending;
mod events;
mod load;
mod push;
mod receive;
mod send;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use self::load::{MoveState, Receive};
use self::push::Pushes;
use self::send::Sends;
use super::action::{Action, Connection, MoveId};
use super::failure::{FailureKind, TransferFailure};
use super::peers::{Peers, Reach};
use super::remote::RemoteEngine;
use super::settings::Settings;
use super::step::{ConnectorMeta, Heartbeat, WorkerOutput};
use crate::engine::deadlines::Deadlines;
use crate::ids::{EngineId, MAX_RANKS, RequestId, WorkerRank};
use crate::mapping::{Tp, handshake_ranks};
use crate::params::TransferMode;
use crate::time::Time;

/// The worker's side of a connector.
///
/// Its methods neither block nor perform I/O. The runtime takes actions from
/// [`next_action`](Self::next_action), carries them out, and reports the results with the methods
/// that the actions name. The methods for the step loop have the names of vLLM's
/// `KVConnectorBase_V1`. All times are on the worker's own clock.
#[derive(Clone, Debug)]
pub struct Worker {
    settings: Settings,
    rank: WorkerRank,
    peers: Peers,
    receives: BTreeMap<RequestId, Receive>,
    /// Requests that wait for a handshake.
    waiting: BTreeMap<EngineId, Vec<Waiting>>,
    moves: BTreeMap<MoveId, MoveState>,
    last_move: u64,
    deadlines: Deadlines<RequestId>,
    sends: Sends,
    pushes: Pushes,
    /// Heartbeats that wait for a handshake.
    heartbeats: BTreeMap<EngineId, Heartbeat>,
    /// True if the caches were released and no others are registered yet.
    gave_back: bool,
    /// The number of times that the engine had registered its memory again, as of the last step.
    registration: u64,
    actions: VecDeque<Action>,
    output: WorkerOutput,
}

/// A task that waits for a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Waiting {
    /// A load, or a notification that the blocks are not needed.
    Receive(RequestId),
    /// Blocks to be pushed.
    Push(RequestId),
}

impl Worker {
    /// Creates the worker's side for one rank.
    pub fn new(settings: Settings, rank: WorkerRank) -> Self {
        Worker {
            rank,
            peers: Peers::new(settings.engine_ttl),
            receives: BTreeMap::new(),
            waiting: BTreeMap::new(),
            moves: BTreeMap::new(),
            last_move: 0,
            deadlines: Deadlines::default(),
            sends: Sends::new(settings.lease(), settings.consumers, settings.tp_size),
            pushes: Pushes::new(settings.push_timeout),
            heartbeats: BTreeMap::new(),
            gave_back: false,
            registration: 0,
            actions: VecDeque::new(),
            output: WorkerOutput::default(),
            settings,
        }
    }

    /// Returns the worker's rank.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Returns the next action, in order.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns whether the worker is filling blocks for a request that is still wanted.
    pub fn is_loading(&self, request: &RequestId) -> bool {
        let wanted = |receive: &Receive| {
            receive.order.awaited && !receive.cancelled && receive.failure.is_none()
        };
        self.receives.get(request).is_some_and(wanted)
    }

    /// Accepts completions that arrive before the requests that they are for. For workers that run
    /// in another process than their engine.
    pub fn accept_early_completions(&mut self) {
        self.sends.accept_early();
    }

    /// Takes the message of a step. Never waits for a peer.
    pub fn start_load_kv(&mut self, now: Time, meta: ConnectorMeta) {
        let built_at = meta.built_at;
        self.registration = meta.registration;
        let ours = |time: Time| time.rebased(built_at, now);
        // Revoke first: the names may since belong to other requests.
        for request in meta.withdrawn {
            self.sends.dropped(&request);
            match self.settings.mode {
                TransferMode::Pull => self.sends.remove(request.as_str()),
                TransferMode::Push => self.take_back(now, &request),
            }
        }
        for request in meta.prefilling {
            self.sends.prefilling(now, request);
        }
        for request in meta.dropped {
            self.sends.dropped(&request);
        }
        for order in meta.send {
            let request = order.request;
            if self.gave_back && order.push.is_some() {
                // The request was published before the release: newly registered memory holds other
                // data.
                self.sends.dropped(&request);
                self.output.finished_sending.push(request);
                continue;
            }
            if self.sends.keep(now, request.clone(), ours(order.expires)) {
                self.output.finished_sending.push(request);
            } else if let Some(blocks) = order.push {
                self.push_ready(now, request, blocks);
            }
        }
        for mut order in meta.receive {
            order.deadline = ours(order.deadline);
            match meta.cancel.contains(&order.request) {
                true => self.receive_cancelled(now, order),
                false => self.receive(now, order),
            }
        }
        for request in meta.cancel {
            self.cancel(now, &request);
        }
        for heartbeat in meta.heartbeats {
            self.heartbeat(now, heartbeat);
        }
    }

    /// Handles the deadlines that have passed, and returns the worker's report.
    pub fn get_finished(&mut self, now: Time) -> WorkerOutput {
        while let Some(request) = self.deadlines.take_reached(now) {
            self.receive_timed_out(now, &request);
        }
        self.expire_sends(now);
        self.pushes.forget_late(now);
        while let Some(request) = self.pushes.again.take_reached(now) {
            self.find_decode(now, &request);
        }
        self.output.at = now;
        std::mem::take(&mut self.output)
    }

    /// Returns the next time at which [`get_finished`](Self::get_finished) is due, even without
    /// other events.
    pub fn next_deadline(&self) -> Option<Time> {
        [self.deadlines.next(), self.sends.next_deadline(), self.pushes.next_deadline()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Cancels all moves, and closes connections: those without a transfer at once, the others with
    /// their last transfer. May be called repeatedly.
    pub fn shutdown(&mut self) {
        for (id, state) in &self.moves {
            if state.is_running() {
                self.actions.push_back(Action::Cancel { id: *id });
            }
        }
        self.peers.forget_all(&mut self.actions);
        self.waiting.clear();
        self.heartbeats.clear();
    }

    /// Handles the release of the caches: shuts down as in [`shutdown`](Self::shutdown), and stops
    /// writing to peers.
    pub fn caches_given_back(&mut self, now: Time) {
        self.shutdown();
        self.gave_back = true;
        if self.settings.mode == TransferMode::Push {
            let kept: Vec<_> = self.sends.all().chain(self.pushes.all()).cloned().collect();
            kept.into_iter().for_each(|request| self.take_back(now, &request));
        }
    }

    /// Records that the worker has caches again.
    pub fn caches_taken_up(&mut self) {
        self.gave_back = false;
    }

    /// Returns the number of loads, moves, kept blocks and connections that the worker still knows.
    pub fn len(&self) -> usize {
        self.receives.len()
            + self.moves.len()
            + self.sends.len()
            + self.pushes.len()
            + self.peers.connections()
    }

    /// Returns whether the worker knows none of these.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the connection to a peer, or starts a handshake with it.
    fn reach(&mut self, now: Time, peer: &Arc<RemoteEngine>) -> Reach {
        let (settings, rank) = (&self.settings, self.rank);
        self.peers.reach(now, peer, || ranks_to_ask(settings, rank, peer), &mut self.actions)
    }

    fn wait_for(&mut self, engine: &EngineId, waiting: Waiting) {
        let queue = self.waiting.entry(engine.clone()).or_default();
        if !queue.contains(&waiting) {
            queue.push(waiting);
        }
    }

    /// Sends a notification to all workers of a connected peer.
    fn tell_all(&mut self, connection: Connection, request: Option<&RequestId>, bytes: &Arc<[u8]>) {
        let Some(plan) = self.peers.plan(connection) else {
            return debug_assert!(false, "a connection in use has a plan");
        };
        for rank in plan.ranks() {
            self.actions.push_back(Action::Notify {
                connection,
                rank,
                request: request.cloned(),
                bytes: Arc::clone(bytes),
            });
        }
    }

    fn heartbeat(&mut self, now: Time, heartbeat: Heartbeat) {
        match self.reach(now, &heartbeat.peer) {
            Reach::Ready(connection, _) => self.send_heartbeat(connection, &heartbeat),
            Reach::Wait => {
                self.heartbeats.insert(heartbeat.peer.engine.clone(), heartbeat);
            }
            Reach::Refused(..) => {}
        }
    }

    fn record(&mut self, failure: TransferFailure) {
        self.output.stats.record_failure(failure.kind);
        self.output.failures.push(failure);
    }

    /// Returns the kind of failure for a failed handshake that these tasks waited for.
    fn handshake_failure_kind(&self, waiting: &[Waiting], setup: bool) -> FailureKind {
        let pushes = waiting.iter().any(|waiting| matches!(waiting, Waiting::Push(_)));
        match self.settings.mode {
            _ if pushes => FailureKind::PushHandshakeFailed,
            TransferMode::Push if !waiting.is_empty() => FailureKind::PushRegHandshakeFailed,
            _ if setup => FailureKind::HandshakeSetupFailed,
            _ => FailureKind::HandshakeFailed,
        }
    }
}

/// Returns the workers of a peer that one worker performs a handshake with.
pub(super) fn ranks_to_ask(
    settings: &Settings,
    rank: WorkerRank,
    peer: &RemoteEngine,
) -> Result<Vec<WorkerRank>, String> {
    let own = Tp::new(rank.tp, settings.tp_size).and_then(|tp| tp.with_dcp(settings.dcp_size));
    let ranks = own.and_then(|own| handshake_ranks(own, peer.tp_size, peer.dcp_size));
    let ranks = ranks.map_err(|error| error.to_string())?;
    if peer.pp_size == 0 || u64::from(peer.pp_size) * ranks.len() as u64 > u64::from(MAX_RANKS) {
        return Err(format!(
            "the peer has {} pipeline ranks of {} workers each; at least 1 and at most {MAX_RANKS} \
             workers are supported",
            peer.pp_size,
            ranks.len()
        ));
    }
    Ok((0..peer.pp_size)
        .flat_map(|pp| ranks.iter().map(move |tp| WorkerRank { pp, tp: *tp }))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Address;

    fn asked(own: (u32, u32), tp_size: u32, pp_size: u32) -> Result<Vec<(u32, u32)>, String> {
        let address = Address { host: "h".into(), port: 1 };
        let settings = Settings { tp_size: own.1, ..Settings::new("d", address.clone()) };
        let peer = RemoteEngine { tp_size, pp_size, ..RemoteEngine::new("p", address) };
        let ranks = ranks_to_ask(&settings, WorkerRank { pp: 0, tp: own.0 }, &peer)?;
        Ok(ranks.into_iter().map(|rank| (rank.pp, rank.tp)).collect())
    }

    // vLLM 8: the handshake asks every pipeline and tensor rank of the peer
    #[test]
    fn all_stages_of_the_ranks_that_are_read_are_asked() {
        assert_eq!(asked((3, 4), 2, 1), Ok(vec![(0, 1)]));
        assert_eq!(asked((1, 2), 4, 2), Ok(vec![(0, 2), (0, 3), (1, 2), (1, 3)]));
    }

    #[test]
    fn impossible_sizes_are_rejected_before_anything_is_allocated() {
        for (tp, pp) in [(0, 1), (1, 0), (u32::MAX, 1), (1, u32::MAX), (1024, 1024), (3, 1)] {
            assert!(asked((0, 2), tp, pp).is_err(), "{tp} {pp}");
        }
    }
}
