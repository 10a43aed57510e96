//! The end of a load: failed, cancelled, timed out, or complete.

use super::super::action::Action;
use super::super::failure::LoadFailure;
use super::super::step::FailedLoad;
use super::Worker;
use super::load::{Invalid, ReceiveStage};
use crate::ids::RequestId;
use crate::params::TransferMode;
use crate::time::Time;

impl Worker {
    pub(super) fn fail_receive(
        &mut self,
        request: &RequestId,
        failure: LoadFailure,
        blocks: Option<Vec<u32>>,
    ) {
        if let Some(receive) = self.receives.get_mut(request) {
            receive.fail(failure, blocks);
        }
    }

    /// Finishes a load if no transfer accesses its blocks any more.
    pub(super) fn advance(&mut self, now: Time, request: &RequestId) {
        // Expected race: the load ended while it waited for the handshake.
        let Some(receive) = self.receives.get(request) else { return };
        match &receive.stage {
            ReceiveStage::Reading(reading) if reading.unsettled > 0 => {}
            ReceiveStage::Awaiting { expected }
                if receive.failure.is_none() && !receive.cancelled =>
            {
                if receive.written_by.len() >= *expected {
                    self.finish(now, request);
                }
            }
            ReceiveStage::Awaiting { .. } => self.fence(request),
            ReceiveStage::Fencing | ReceiveStage::Finishing => {}
            ReceiveStage::Reading(reading)
                if reading.finishes && receive.failure.is_none() && !receive.cancelled =>
            {
                self.finish_blocks(request);
            }
            ReceiveStage::Waiting if receive.failure.is_none() && !receive.cancelled => {}
            // Another worker of this engine may have registered the blocks of all workers.
            ReceiveStage::Waiting if self.settings.mode == TransferMode::Push => {
                self.fence(request)
            }
            ReceiveStage::Waiting if receive.failure.is_none() => {}
            ReceiveStage::Waiting | ReceiveStage::Reading(_) => self.finish(now, request),
        }
    }

    /// Asks the runtime to reorder and clear the blocks of a load.
    fn finish_blocks(&mut self, request: &RequestId) {
        let Some(receive) = self.receives.get_mut(request) else {
            return debug_assert!(false, "advance finishes loads that exist");
        };
        let Some(connection) = receive.connection else {
            return debug_assert!(false, "a load that reads has a connection");
        };
        receive.stage = ReceiveStage::Finishing;
        let lists = receive.order.lists();
        self.actions.push_back(Action::Finish { request: request.clone(), connection, lists });
    }

    /// Reports a load, and forgets it.
    pub(super) fn finish(&mut self, now: Time, request: &RequestId) {
        let Some(receive) = self.receives.remove(request) else {
            return debug_assert!(false, "each load ends once");
        };
        self.deadlines.clear(request);
        if let Some(connection) = receive.connection {
            if let (ReceiveStage::Reading(reading), true, None) =
                (&receive.stage, receive.cancelled, &receive.failure)
            {
                // The peer still keeps blocks that no local worker will read.
                for lane in reading.lanes.iter().filter(|lane| !lane.told || lane.parts_left > 0) {
                    self.complete(
                        request,
                        &receive.order.remote.request,
                        connection,
                        lane.rank,
                        lane.readers,
                    );
                }
            }
            self.peers.release(now, connection, &mut self.actions);
        }
        if !receive.order.awaited {
            return;
        }
        self.output.finished_recving.push(request.clone());
        let Some(failure) = receive.failure.filter(|_| !receive.cancelled) else { return };
        let unfinished =
            matches!(&receive.stage, ReceiveStage::Reading(reading) if reading.finishes);
        let invalid = match receive.invalid {
            Invalid::Blocks(blocks) if !unfinished => blocks.into_iter().collect(),
            _ => receive.order.local.ascending(),
        };
        self.output.failed_recving.push(FailedLoad { request: request.clone(), failure, invalid });
    }

    /// Cancels a load, whose blocks the engine wants back.
    pub(super) fn cancel(&mut self, now: Time, request: &RequestId) {
        // Expected race: the load ended before the engine cancelled it.
        let Some(receive) = self.receives.get_mut(request) else { return };
        if receive.cancelled {
            return;
        }
        receive.cancelled = true;
        match receive.stage {
            ReceiveStage::Waiting if self.settings.mode == TransferMode::Push => {
                self.advance(now, request)
            }
            ReceiveStage::Waiting => self.give_back(now, request),
            ReceiveStage::Reading(_) => self.cancel_moves(request),
            ReceiveStage::Awaiting { .. } => self.advance(now, request),
            ReceiveStage::Fencing | ReceiveStage::Finishing => {}
        }
    }

    /// Reports a load that has accessed no block. The worker still notifies the peer once it is
    /// connected.
    fn give_back(&mut self, now: Time, request: &RequestId) {
        let Some(receive) = self.receives.get_mut(request) else {
            return debug_assert!(false, "only loads that exist are returned");
        };
        let local = std::mem::take(&mut receive.order.local);
        self.deadlines.set(request.clone(), now + self.settings.load_timeout);
        if !std::mem::replace(&mut receive.order.awaited, false) {
            return;
        }
        self.output.finished_recving.push(request.clone());
        if let Some(failure) = receive.failure.take() {
            let invalid = local.ascending();
            self.output.failed_recving.push(FailedLoad {
                request: request.clone(),
                failure,
                invalid,
            });
        }
    }

    pub(super) fn cancel_moves(&mut self, request: &RequestId) {
        for (id, state) in &self.moves {
            if state.request == *request && state.is_running() {
                self.actions.push_back(Action::Cancel { id: *id });
            }
        }
    }

    pub(super) fn receive_timed_out(&mut self, now: Time, request: &RequestId) {
        let Some(receive) = self.receives.get_mut(request) else {
            return debug_assert!(false, "the deadline of a load ends with it");
        };
        let failure = match receive.stage {
            ReceiveStage::Awaiting { .. } => LoadFailure::NotPushed,
            _ => LoadFailure::Deadline,
        };
        receive.fail(failure, None);
        if matches!(receive.stage, ReceiveStage::Waiting)
            && receive.order.awaited
            && self.settings.mode == TransferMode::Pull
        {
            return self.give_back(now, request);
        }
        self.cancel_moves(request);
        self.advance(now, request);
    }
}
