//! Events for a worker: results of handshakes, moves and reads of generations, and notifications.

use std::sync::Arc;

use kvx_core::ErrorKind;

use crate::config::BlockRelease;

use super::super::action::{Action, Connection, MoveId};
use super::super::failure::{
    FailureKind, HandshakeFailure, LoadFailure, MoveFailure, TransferFailure,
};
use super::super::plan::PeerPlan;
use super::super::stats::Transferred;
use super::super::step::Heartbeat;
use super::super::step::Kept;
use super::load::{MovePhase, MoveState, Receive, ReceiveStage};
use super::send::{Counted, ReleaseEffect};
use super::{Waiting, Worker};
use crate::ids::{RequestId, WorkerRank};
use crate::params::TransferMode;
use crate::time::Time;
use crate::wire::EngineNotification;

impl Worker {
    /// Handles the end of a handshake.
    pub fn connected(
        &mut self,
        now: Time,
        connection: Connection,
        result: Result<PeerPlan, HandshakeFailure>,
    ) {
        let clock = result.as_ref().ok().and_then(|plan| plan.clock);
        // Expected race: another handshake has replaced this one, or the worker was shut down.
        let ended = self.peers.connected(now, connection, result, &mut self.actions);
        let Some((peer, failure)) = ended else { return };
        let waiting = self.waiting.remove(&peer.engine).unwrap_or_default();
        let heartbeat = self.heartbeats.remove(&peer.engine);
        let Some(failure) = failure else {
            self.output.clocks.extend(clock.map(|clock| (peer.engine.clone(), clock)));
            if let Some(heartbeat) = heartbeat {
                self.send_heartbeat(connection, &heartbeat);
            }
            for waiting in waiting {
                match waiting {
                    // It waited for a registration that the engine has since replaced.
                    Waiting::Receive(request) if !self.speaks_of(&request, &peer) => {
                        let why = "the engine registered its memory again during the handshake";
                        self.refused(now, &request, why.into());
                    }
                    Waiting::Receive(request) => self.find_peer(now, &request),
                    Waiting::Push(request) => self.find_decode(now, &request),
                }
            }
            return;
        };
        // Record one failure per handshake, even if several requests waited for it.
        let mut said = TransferFailure::new(
            self.handshake_failure_kind(&waiting, failure.setup),
            &*failure.error,
        );
        said.engine = Some(peer.engine.clone());
        said.address = Some(peer.address.clone());
        if let Some(Waiting::Receive(request)) = waiting.first() {
            said = TransferFailure {
                kind: said.kind,
                ..self.describe(request, said.kind, None, &failure.error)
            };
        }
        self.record(said);
        for waiting in waiting {
            match waiting {
                Waiting::Receive(request) => {
                    self.fail_receive(
                        &request,
                        LoadFailure::Handshake(failure.error.clone()),
                        None,
                    );
                    self.advance(now, &request);
                }
                Waiting::Push(request) => self.push_failed(&request),
            }
        }
    }

    /// Handles the outcome of a move. `Ok` means that its data has arrived, that its notification
    /// was sent, and that it no longer accesses its memory.
    pub fn move_resolved(
        &mut self,
        now: Time,
        id: MoveId,
        result: Result<Transferred, MoveFailure>,
    ) {
        // Expected race: the transport has forgotten the move.
        let Some(state) = self.moves.get_mut(&id).filter(|state| state.phase == MovePhase::Running)
        else {
            return;
        };
        let (request, lane, push) = (state.request.clone(), state.lane, state.push);
        match result {
            Ok(transferred) => {
                self.output.stats.record(transferred);
                if push { self.write_done(now, id) } else { self.read_done(now, id) }
            }
            Err(failure) => {
                state.phase = MovePhase::Unsettled;
                if failure.settled && self.receives.get(&request).is_some_and(Receive::is_cancelled)
                {
                    return self.move_settled(now, id);
                }
                let rank = if push { None } else { self.rank_of_lane(&request, lane) };
                let said = self.describe(&request, failure.kind, rank, &failure.error);
                self.record(said);
                if !failure.settled {
                    // The failure is already counted.
                    let why = "the transfer may still access its blocks: they stay pinned";
                    let said =
                        self.describe(&request, FailureKind::TransferReleaseFailed, rank, why);
                    self.output.failures.push(said);
                }
                let connection = if push {
                    self.push_failed(&request);
                    self.pushes.connection(&request)
                } else {
                    self.fail_receive(&request, LoadFailure::Transfer(failure.error), None);
                    self.receives.get(&request).and_then(|receive| receive.connection)
                };
                if failure.peer_is_gone
                    && let Some(connection) = connection
                {
                    self.peers.invalidate(connection, &mut self.actions);
                }
                if failure.settled {
                    self.move_settled(now, id);
                }
            }
        }
    }

    /// Handles the report that a failed move no longer accesses its memory.
    pub fn move_settled(&mut self, now: Time, id: MoveId) {
        // Expected race: its transport has forgotten the move.
        let Some(state) = self.moves.get(&id).filter(|state| state.phase == MovePhase::Unsettled)
        else {
            return;
        };
        if state.push { self.write_over(now, id) } else { self.part_failed(now, id) }
    }

    /// Handles the report that the transport has forgotten a failed move, and will never report
    /// that it has settled. Ends what waits for the move, and marks its blocks as lost.
    pub fn move_forgotten(&mut self, now: Time, id: MoveId) {
        let why = "the transport forgot the transfer: it may access its blocks until the process \
                   exits, so they are lost";
        if self.moves.get(&id).is_some_and(MoveState::is_running) {
            let kind = FailureKind::TransferException;
            let failure =
                MoveFailure { kind, settled: false, peer_is_gone: false, error: why.into() };
            self.move_resolved(now, id, Err(failure));
        }
        // Expected race: the move has settled.
        let Some(state) = self.moves.get(&id).filter(|state| state.phase == MovePhase::Unsettled)
        else {
            return;
        };
        let request = state.request.clone();
        let kept = if state.push { Kept::Request } else { Kept::Load };
        self.output.failures.push(self.describe(
            &request,
            FailureKind::TransferReleaseFailed,
            None,
            why,
        ));
        if !self.output.lost.contains(&(request.clone(), kept)) {
            self.output.lost.push((request, kept));
        }
        self.move_settled(now, id);
    }

    /// Handles the result of [`Action::Finish`]. In either case, nothing accesses the load's blocks
    /// any more.
    pub fn finished(&mut self, now: Time, request: &RequestId, result: Result<(), String>) {
        let finishing = |receive: &Receive| matches!(receive.stage, ReceiveStage::Finishing);
        if !self.receives.get(request).is_some_and(finishing) {
            return;
        }
        if let Err(why) = result {
            let said = self.describe(request, FailureKind::TransferFailed, None, &why);
            self.record(said);
            self.fail_receive(request, LoadFailure::Transfer(why), None);
        }
        self.finish(now, request);
    }

    /// Handles a notification that could not be sent. The peer keeps its blocks until its lease
    /// ends. In push mode, the load fails.
    pub fn notification_failed(
        &mut self,
        now: Time,
        request: Option<&RequestId>,
        rank: WorkerRank,
        error: impl Into<String>,
    ) {
        let awaiting = |request: &&RequestId| {
            self.receives
                .get(*request)
                .is_some_and(|receive| matches!(receive.stage, ReceiveStage::Awaiting { .. }))
        };
        let registration = request.filter(awaiting).cloned();
        let kind = match registration {
            Some(_) => FailureKind::PushRegNotifFailed,
            None => FailureKind::NotificationFailed,
        };
        let error = error.into();
        let said = match request {
            Some(request) => self.describe(request, kind, Some(rank), &error),
            None => TransferFailure { rank: Some(rank), ..TransferFailure::new(kind, &*error) },
        };
        self.record(said);
        if let Some(request) = registration {
            self.fail_receive(&request, LoadFailure::Transfer(error), None);
            self.advance(now, &request);
        }
    }

    /// Handles the end of a fence: no peer writes into the blocks of the request any more.
    pub fn fenced(&mut self, now: Time, request: &RequestId) {
        if self
            .receives
            .get(request)
            .is_some_and(|receive| matches!(receive.stage, ReceiveStage::Fencing))
        {
            self.finish(now, request);
        }
    }

    /// Handles the loss of a peer. Moves with the peer end without further action. Loads that
    /// waited for its writes fail.
    pub fn connection_lost(&mut self, now: Time, connection: Connection) {
        self.peers.invalidate(connection, &mut self.actions);
        let awaiting = self.receives.iter().filter(|(_, receive)| {
            receive.connection == Some(connection)
                && matches!(receive.stage, ReceiveStage::Awaiting { .. })
        });
        let awaiting: Vec<_> = awaiting.map(|(request, _)| request.clone()).collect();
        for request in awaiting {
            self.fail_receive(&request, LoadFailure::Transfer("the peer is gone".into()), None);
            self.advance(now, &request);
        }
    }

    /// Handles a notification from a worker of a peer. `from` is the transport's name of that
    /// worker.
    ///
    /// # Errors
    ///
    /// Fails if a registration is invalid, if a release has no valid proof, or if a decode may be
    /// reading the blocks to release. The worker's state does not change; the caller should log the
    /// error.
    pub fn notified(
        &mut self,
        now: Time,
        from: &str,
        notification: EngineNotification,
    ) -> kvx_core::Result<()> {
        match notification {
            EngineNotification::Done { request_id, count } => {
                self.done(now, from, &request_id, count)
            }
            EngineNotification::Heartbeat { request_ids } => {
                for request in request_ids {
                    self.renew(now, &request);
                }
            }
            EngineNotification::Registration(registration) => {
                self.registered(now, *registration)?
            }
            EngineNotification::Release { request_id, proof } => {
                self.released(now, from, &request_id, &proof)?
            }
        }
        Ok(())
    }

    /// Handles a router's release. The blocks stay if a decode has sent a heartbeat for them, or one
    /// of several ranks has read its part. Reads are one-sided, and heartbeats periodic, so this
    /// engine does not see a read that begins and ends between two of its decode's heartbeats:
    /// routers must release only blocks that no decode has accepted.
    fn released(
        &mut self,
        now: Time,
        from: &str,
        request: &str,
        proof: &str,
    ) -> kvx_core::Result<()> {
        let engine = self.settings.engine.as_str();
        self.settings
            .trust
            .check_release(engine, request, proof)
            .map_err(|why| ErrorKind::Authentication.because(why.to_string()))?;
        if self.settings.mode == TransferMode::Push {
            return Err(ErrorKind::Unsupported.because(
                "blocks that are pushed cannot be released: the decode has registered for them, \
                 or push_registration_timeout ends",
            ));
        }
        match self.sends.released(now, request, from) {
            ReleaseEffect::Freed => self.output.finished_sending.push(request.into()),
            ReleaseEffect::Nothing => {}
            ReleaseEffect::Wanted => {
                return Err(ErrorKind::PermissionDenied.because(format!(
                    "the blocks of request {request} are not released: a decode wants them; a \
                     router may release only blocks that no decode has accepted"
                )));
            }
        }
        Ok(())
    }

    fn done(&mut self, now: Time, from: &str, request: &str, count: u32) {
        if self.settings.mode == TransferMode::Push
            && let Some(receive) = self.receives.get_mut(request)
        {
            receive.written_by.insert(from.into());
            return self.advance(now, &request.into());
        }
        if self.withdrawn(now, request) {
            return;
        }
        match self.sends.completed(now, request, count, from) {
            Counted::Last => {
                if let Some(request) = self.pushes.give_up(request).or_else(|| Some(request.into()))
                {
                    self.output.finished_sending.push(request);
                }
            }
            Counted::OneOfSeveral | Counted::Early => {}
            Counted::Unknown => self.output.stats.record_after_expiry(),
        }
    }

    /// Renews the lease of a request that a peer still wants. In push mode, the peer knows only the
    /// part of the name that both engines share.
    fn renew(&mut self, now: Time, request: &str) {
        if self.sends.renew(now, request) {
            return;
        }
        let name = RequestId::from(request);
        let kept: Vec<_> = match self.settings.mode {
            TransferMode::Pull => Vec::new(),
            TransferMode::Push => self.sends.of_shared_name(name.shared()).cloned().collect(),
        };
        // The blocks have been released, or the peer names a request that never existed.
        self.output.unknown_requests += u64::from(kept.is_empty());
        for request in kept {
            self.sends.renew(now, request.as_str());
        }
    }

    pub(super) fn send_heartbeat(&mut self, connection: Connection, heartbeat: &Heartbeat) {
        // A name with a comma would be read as two names. The blocks of such a request stay only
        // for one lease.
        let names =
            heartbeat.requests.iter().map(RequestId::as_str).filter(|name| !name.contains(','));
        match EngineNotification::heartbeats(names) {
            Ok(heartbeats) => {
                for heartbeat in heartbeats {
                    self.tell_all(connection, None, &heartbeat.encode().into());
                }
            }
            Err(error) => self
                .record(TransferFailure::new(FailureKind::NotificationFailed, error.to_string())),
        }
    }

    /// Returns the completion that tells a peer's worker to free the blocks of a request. Returns
    /// `None` if the name cannot be encoded; the lease must then end.
    pub(super) fn completion(&self, remote: &RequestId, readers: u32) -> Option<Arc<[u8]>> {
        let count = self.settings.consumers.written(readers, self.settings.tp_size);
        Some(EngineNotification::done(remote.as_str(), count).ok()?.encode().into())
    }

    pub(super) fn expire_sends(&mut self, now: Time) {
        while let Some(request) = self.sends.take_expired(now) {
            self.output.stats.record_expired();
            if self.pushes.expired(&request) {
                self.note_expiry(&request);
                self.output.finished_sending.push(request);
            } else if self.pushes.grants(&request) {
                // A kvx decode renews the lease while it waits, and no write may continue after its
                // grants have ended.
                self.cancel_moves(&request);
            }
        }
    }

    /// Records that blocks are released before all their readers have read them.
    pub(super) fn note_expiry(&mut self, request: &RequestId) {
        let setting = match self.settings.release {
            BlockRelease::Lease(_) => "kv_lease_duration of kv_connector_extra_config",
            BlockRelease::After(_) => "VLLM_NIXL_ABORT_REQUEST_TIMEOUT",
        };
        self.output.failures.push(TransferFailure::lease_expired(request, setting));
    }

    pub(super) fn fence(&mut self, request: &RequestId) {
        let Some(receive) = self.receives.get_mut(request) else {
            return debug_assert!(false, "advance fences loads that exist");
        };
        let connection = receive.connection;
        receive.stage = ReceiveStage::Fencing;
        self.actions.push_back(Action::Fence { request: request.clone() });
        // A load that waits for its handshake has not registered anywhere.
        let Some(connection) = connection else { return };
        // A kvx peer forgets the registration. Other peers log that they do not know the request.
        if let Some(bytes) =
            EngineNotification::done(request.as_str(), 1).ok().map(|done| done.encode().into())
        {
            self.tell_all(connection, Some(request), &bytes);
        }
    }
}
