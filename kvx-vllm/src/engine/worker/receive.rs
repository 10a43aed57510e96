//! Loads, from the order to the end of their reads.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvx_core::Indices;

use super::super::action::{Action, Connection, Move, MoveId, ReadBlocks};
use super::super::failure::{FailureKind, LoadFailure, TransferFailure};
use super::super::peers::Reach;
use super::super::plan::{PeerLane, PeerPlan, pair_load};
use super::super::remote::RemoteEngine;
use super::super::scheduler::EXPIRY_MARGIN;
use super::super::step::ReceiveOrder;
use super::load::{
    Checks, Invalid, LaneState, MovePhase, MoveState, Reading, Receive, ReceiveStage,
};
use super::{Waiting, Worker};
use crate::ids::{BlockLists, RequestId, WorkerRank};
use crate::mapping::{MemoryType, Part};
use crate::params::TransferMode;
use crate::time::Time;

impl Worker {
    pub(super) fn receive(&mut self, now: Time, order: ReceiveOrder) {
        let request = order.request.clone();
        if !self.receives.contains_key(&request) {
            self.add(order);
            self.find_peer(now, &request);
        }
    }

    /// Handles a load that was cancelled before it started. Accesses no block, and notifies the
    /// peer.
    pub(super) fn receive_cancelled(&mut self, now: Time, mut order: ReceiveOrder) {
        match self.settings.mode {
            TransferMode::Pull => {
                order.local = BlockLists::default();
                self.receive(now, order);
            }
            // Another worker of this engine may have registered the blocks of all workers.
            TransferMode::Push => self.add(order),
        }
    }

    fn add(&mut self, order: ReceiveOrder) {
        let request = order.request.clone();
        self.deadlines.set(request.clone(), order.deadline);
        let receive = Receive {
            order,
            connection: None,
            stage: ReceiveStage::Waiting,
            failure: None,
            invalid: Invalid::Blocks(BTreeSet::new()),
            cancelled: false,
            written_by: BTreeSet::new(),
        };
        self.receives.insert(request, receive);
    }

    /// Starts the load if the peer is connected, or waits for the handshake.
    pub(super) fn find_peer(&mut self, now: Time, request: &RequestId) {
        // Expected race: the load ended while it waited for the handshake.
        let Some(peer) =
            self.receives.get(request).map(|receive| Arc::clone(&receive.order.remote.peer))
        else {
            return;
        };
        match self.reach(now, &peer) {
            Reach::Ready(connection, plan) => self.begin(now, request, connection, &plan),
            Reach::Wait => self.wait_for(&peer.engine, Waiting::Receive(request.clone())),
            Reach::Refused(why, _) => self.refused(now, request, why),
        }
    }

    /// Fails a load because its parameters do not lead to a peer.
    pub(super) fn refused(&mut self, now: Time, request: &RequestId, why: String) {
        let failure = self.describe(request, FailureKind::HandshakeSetupFailed, None, &why);
        self.record(failure);
        self.fail_receive(request, LoadFailure::Handshake(why), None);
        self.advance(now, request);
    }

    fn begin(
        &mut self,
        now: Time,
        request: &RequestId,
        connection: Connection,
        plan: &Arc<PeerPlan>,
    ) {
        let mode = self.settings.mode;
        let windows = &self.settings.groups;
        let Some(receive) = self.receives.get_mut(request) else {
            return debug_assert!(false, "find_peer begins loads that exist");
        };
        receive.connection = Some(connection);
        self.peers.hold(connection);
        if mode == TransferMode::Push {
            self.register(request, connection, plan);
            return self.advance(now, request);
        }
        if receive.order.local.is_empty() {
            self.tell_lanes(request, connection, plan);
            return self.finish(now, request);
        }
        if let Some(expires) = receive.order.remote.expires_at_peer {
            let ours = plan.clock.and_then(|clock| clock.to_ours(expires));
            if ours.is_none_or(|ours| (now + EXPIRY_MARGIN).has_reached(ours)) {
                receive.fail(LoadFailure::Expiring, None);
                self.output.stats.record_expired();
                return self.advance(now, request);
            }
        }
        let reading = checked(receive, plan, windows, self.settings.block_size)
            .and_then(|()| pair_load(plan, &receive.order, windows))
            .and_then(|paired| Ok((paired.load_moves()?, paired)));
        let (groups, paired) = match reading {
            Ok(reading) => reading,
            Err(why) => {
                let failure = self.describe(request, FailureKind::TransferSetupFailed, None, &why);
                self.record(failure);
                self.tell_lanes(request, connection, plan);
                self.fail_receive(request, LoadFailure::Refused(why), None);
                return self.advance(now, request);
            }
        };
        if paired.is_empty() {
            self.tell_lanes(request, connection, plan);
            return self.finish(now, request);
        }
        let reference = receive.order.remote.reference.filter(|_| plan.generations);
        let lanes = plan.lanes.iter().map(|lane| LaneState {
            rank: lane.rank,
            readers: lane.readers,
            parts_left: lane.memory.len(),
            told: false,
        });
        let lanes = lanes.collect();
        let checks = match reference {
            None => Checks::Nothing,
            Some(_) if plan.digests => Checks::WordsAndDigests,
            Some(_) => Checks::Words,
        };
        let reading = Reading { paired, reference, lanes, unsettled: 0, finishes: plan.finishes };
        let order = &receive.order;
        let remote = order.remote.request.clone();
        let all = Move {
            id: MoveId(0),
            request: request.clone(),
            connection,
            part: Part {
                rank: WorkerRank::default(),
                memory: (MemoryType::Vram, MemoryType::Vram),
            },
            groups: groups.into(),
            lists: order.lists(),
            notification: None,
            deadline: order.deadline,
            grants: [].into(),
        };
        receive.stage = ReceiveStage::Reading(reading);
        for (at, lane) in plan.lanes.iter().enumerate() {
            self.read_lane(request, &remote, (at, lane), &all, checks);
        }
        for (rank, readers) in &plan.told {
            self.complete(request, &remote, connection, *rank, *readers);
        }
    }

    /// Posts the reads of `all` from one worker of the peer.
    fn read_lane(
        &mut self,
        request: &RequestId,
        remote: &RequestId,
        (at, lane): (usize, &PeerLane),
        all: &Move,
        checks: Checks,
    ) {
        let groups = lane.select(&all.groups);
        // The completion travels with the read if nothing else decides whether the load succeeded.
        let rides = checks == Checks::Nothing && lane.memory.len() == 1;
        let notification = if rides { self.completion(remote, lane.readers) } else { None };
        for part in lane.parts() {
            self.last_move += 1;
            let id = MoveId(self.last_move);
            let mut state = MoveState::new(request, at, false);
            state.reads = (checks == Checks::WordsAndDigests).then(|| (part, Arc::clone(&groups)));
            if let Some(ReceiveStage::Reading(reading)) =
                self.receives.get_mut(request).map(|receive| &mut receive.stage)
            {
                reading.unsettled += 1;
                reading.lanes[at].told |= rides;
            }
            self.moves.insert(id, state);
            self.actions.push_back(Action::Read(Move {
                id,
                part,
                groups: Arc::clone(&groups),
                notification: notification.clone(),
                ..all.clone()
            }));
        }
    }

    /// Handles a read whose data has arrived and that no longer accesses its memory.
    pub(super) fn read_done(&mut self, now: Time, id: MoveId) {
        let Some(state) = self.moves.get_mut(&id) else {
            return debug_assert!(false, "move_resolved ends moves that exist");
        };
        let (request, lane) = (state.request.clone(), state.lane);
        let Some(receive) = self.receives.get_mut(&request) else {
            return debug_assert!(false, "a load outlives its reads");
        };
        let Some(connection) = receive.connection else {
            return debug_assert!(false, "a load that reads has a connection");
        };
        self.peers.proven(connection);
        let ReceiveStage::Reading(reading) = &mut receive.stage else {
            return debug_assert!(false, "a load with a read under way is reading");
        };
        if reading.reference.is_some() && receive.failure.is_none() && !receive.cancelled {
            state.phase = MovePhase::Checking;
            self.actions.push_back(Action::ReadGenerations {
                id,
                request: request.clone(),
                connection,
                rank: reading.lanes[lane].rank,
                blocks: reading.paired.producer_blocks().into(),
            });
            return;
        }
        self.part_done(now, id);
    }

    /// Ends a part of a lane whose data is valid.
    fn part_done(&mut self, now: Time, id: MoveId) {
        let Some(MoveState { request, lane, .. }) = self.moves.remove(&id) else {
            return debug_assert!(false, "each part ends once");
        };
        let Some(receive) = self.receives.get_mut(&request) else {
            return debug_assert!(false, "a load outlives its reads");
        };
        let (failed, connection) = (receive.failure.is_some(), receive.connection);
        let ReceiveStage::Reading(reading) = &mut receive.stage else {
            return debug_assert!(false, "a load with a read under way is reading");
        };
        reading.unsettled -= 1;
        let lane = &mut reading.lanes[lane];
        lane.parts_left = lane.parts_left.saturating_sub(1);
        if lane.parts_left == 0 && !lane.told && !failed {
            lane.told = true;
            let (rank, readers, remote) =
                (lane.rank, lane.readers, receive.order.remote.request.clone());
            if let Some(connection) = connection {
                self.complete(&request, &remote, connection, rank, readers);
            }
        }
        self.advance(now, &request);
    }

    /// Ends a part of a lane without valid data.
    pub(super) fn part_failed(&mut self, now: Time, id: MoveId) {
        let Some(MoveState { request, .. }) = self.moves.remove(&id) else {
            return debug_assert!(false, "each part ends once");
        };
        if let Some(ReceiveStage::Reading(reading)) =
            self.receives.get_mut(&request).map(|receive| &mut receive.stage)
        {
            reading.unsettled -= 1;
        }
        self.advance(now, &request);
    }

    /// Handles the result of [`Action::ReadGenerations`]: the pool's identifier, and one generation
    /// counter per block in order.
    pub fn generations_read(
        &mut self,
        now: Time,
        id: MoveId,
        result: Result<(u64, &[u64]), String>,
    ) {
        let checking = |state: &&mut MoveState| state.phase == MovePhase::Checking;
        // A repeated report of the same read changes nothing.
        let Some(state) = self.moves.get_mut(&id).filter(checking) else { return };
        let (request, lane) = (state.request.clone(), state.lane);
        let Some(receive) = self.receives.get_mut(&request) else {
            return debug_assert!(false, "a load outlives its reads");
        };
        let ReceiveStage::Reading(Reading { paired, reference: Some(reference), lanes, .. }) =
            &receive.stage
        else {
            return debug_assert!(false, "a read whose generations are checked has a reference");
        };
        let expected: usize = paired.producer_blocks().iter().map(Indices::len).sum();
        let (failure, blocks, error) = match result {
            Ok((pool, words)) if words.len() == expected => {
                let stale = reference.stale(pool, words);
                if stale.is_empty() {
                    // Do not hash data that is no longer wanted.
                    let wanted = receive.failure.is_none() && !receive.cancelled;
                    let Some((part, groups)) = state.reads.take().filter(|_| wanted) else {
                        return self.part_done(now, id);
                    };
                    let Some(connection) = receive.connection else {
                        return debug_assert!(false, "a load that reads has a connection");
                    };
                    state.phase = MovePhase::Hashing;
                    let words = paired.producer_numbers().zip(words.iter().copied()).collect();
                    let blocks = Arc::new(ReadBlocks { part, groups, pool, words });
                    self.actions.push_back(Action::CheckDigests {
                        id,
                        request,
                        connection,
                        blocks,
                    });
                    return;
                }
                let blocks = paired.consumers_of(&stale);
                (LoadFailure::Stale, Some(blocks), LoadFailure::Stale.to_string())
            }
            Ok((_, words)) => {
                let why = format!("{} generations were read for {expected} blocks", words.len());
                (LoadFailure::Transfer(why.clone()), None, why)
            }
            Err(why) => (LoadFailure::Transfer(why.clone()), None, why),
        };
        let rank = lanes[lane].rank;
        receive.fail(failure, blocks);
        let failure = self.describe(&request, FailureKind::TransferFailed, Some(rank), &error);
        self.record(failure);
        self.part_failed(now, id);
    }

    /// Handles the result of [`Action::CheckDigests`]: the local blocks without valid contents.
    pub fn digests_checked(&mut self, now: Time, id: MoveId, result: Result<Vec<u32>, String>) {
        // A repeated report of the same read changes nothing.
        let Some(state) = self.moves.get(&id).filter(|state| state.phase == MovePhase::Hashing)
        else {
            return;
        };
        let (request, lane) = (state.request.clone(), state.lane);
        let (failure, blocks, error) = match result {
            Ok(wrong) if wrong.is_empty() => return self.part_done(now, id),
            Ok(wrong) => (LoadFailure::Corrupt, Some(wrong), LoadFailure::Corrupt.to_string()),
            Err(why) => (LoadFailure::Transfer(why.clone()), None, why),
        };
        let rank = self.rank_of_lane(&request, lane);
        self.fail_receive(&request, failure, blocks);
        let failure = self.describe(&request, FailureKind::TransferFailed, rank, &error);
        self.record(failure);
        self.part_failed(now, id);
    }

    /// Returns whether the load expects this registration of the engine.
    pub(super) fn speaks_of(&self, request: &RequestId, peer: &RemoteEngine) -> bool {
        let load = self.receives.get(request);
        load.is_none_or(|receive| receive.order.remote.peer.registration == peer.registration)
    }

    /// Notifies all workers of the peer that their blocks are not wanted.
    fn tell_lanes(&mut self, request: &RequestId, connection: Connection, plan: &PeerPlan) {
        let Some(receive) = self.receives.get(request) else {
            return debug_assert!(false, "begin tells the peer of a load that exists");
        };
        let remote = receive.order.remote.request.clone();
        let lanes = plan.lanes.iter().map(|lane| (lane.rank, lane.readers));
        for (rank, readers) in lanes.chain(plan.told.iter().copied()) {
            self.complete(request, &remote, connection, rank, readers);
        }
    }

    pub(super) fn complete(
        &mut self,
        request: &RequestId,
        remote: &RequestId,
        connection: Connection,
        rank: WorkerRank,
        readers: u32,
    ) {
        if let Some(bytes) = self.completion(remote, readers) {
            self.actions.push_back(Action::Notify {
                connection,
                rank,
                request: Some(request.clone()),
                bytes,
            });
        }
    }

    /// Describes a failed step of a load.
    pub(super) fn describe(
        &self,
        request: &RequestId,
        kind: FailureKind,
        rank: Option<WorkerRank>,
        error: &str,
    ) -> TransferFailure {
        let mut failure = TransferFailure::new(kind, error);
        failure.request = Some(request.clone());
        failure.rank = rank;
        if let Some(receive) = self.receives.get(request) {
            let remote = &receive.order.remote;
            failure.remote_request = Some(remote.request.clone());
            failure.engine = Some(remote.peer.engine.clone());
            failure.address = Some(remote.peer.address.clone());
            failure.blocks = receive.order.local.groups().iter().map(|group| group.len()).collect();
        }
        failure
    }

    pub(super) fn rank_of_lane(&self, request: &RequestId, lane: usize) -> Option<WorkerRank> {
        match &self.receives.get(request)?.stage {
            ReceiveStage::Reading(reading) => Some(reading.lanes.get(lane)?.rank),
            _ => None,
        }
    }
}

/// Rejects impossible orders before anything is posted.
fn checked(
    receive: &Receive,
    plan: &PeerPlan,
    windows: &[Option<u32>],
    block_size: u32,
) -> Result<(), String> {
    let order = &receive.order;
    if plan.generations && order.remote.reference.is_none() {
        return Err(
            "the peer has generations of blocks, but the parameters carry no reference to \
             them; forward the peer's answer unchanged"
                .into(),
        );
    }
    let size = block_size.max(1);
    let (first, end) = (order.computed / size, order.end.div_ceil(size));
    let needed = end.saturating_sub(first) as usize;
    if order.end != order.held_there && windows.iter().any(Option::is_some) {
        return Err(format!(
            "the peer lacks blocks of the sliding window that ends at token {} of {}",
            order.end, order.held_there
        ));
    }
    let whole = order.local.groups().iter().zip(windows).filter(|(_, window)| window.is_none());
    for (blocks, _) in whole {
        if blocks.len() != needed {
            return Err(format!(
                "the number of local blocks, {}, does not fit tokens {} to {}",
                blocks.len(),
                order.computed,
                order.end
            ));
        }
    }
    Ok(())
}
