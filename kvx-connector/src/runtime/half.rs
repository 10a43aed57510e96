//! The worker's half of a connector, whichever protocol it speaks.

use crate::engine::mooncake::MooncakeWorker;
use crate::engine::{
    ConnectorMeta, MoveFailure, MoveId, RequestId, Settings, Time, Transferred, Worker, WorkerOutput,
    WorkerRank,
};
use crate::wire::mooncake::PullRequest;

/// What both kinds of worker are told and asked alike.
pub(super) enum Half {
    Nixl(Box<Worker>),
    Mooncake(Box<MooncakeWorker>),
}

/// The same call of either.
macro_rules! either {
    ($half:expr, $worker:ident => $call:expr) => {
        match $half {
            Half::Nixl($worker) => $call,
            Half::Mooncake($worker) => $call,
        }
    };
}

impl Half {
    /// Of one worker of an engine with these settings.
    pub(super) fn new(settings: &Settings, rank: WorkerRank) -> kvx_core::Result<Self> {
        Ok(match &settings.mooncake {
            None => Half::Nixl(Box::new(Worker::new(settings.clone(), rank))),
            // Nothing is asked before its caches are registered: then it tells where they are.
            Some(_) => {
                let nowhere = PullRequest::new("", 0, settings.tp_size, rank.tp);
                Half::Mooncake(Box::new(MooncakeWorker::new(settings.clone(), rank, nowhere)?))
            }
        })
    }

    pub(super) fn start_load_kv(&mut self, now: Time, meta: ConnectorMeta) {
        either!(self, worker => worker.start_load_kv(now, meta));
    }

    pub(super) fn get_finished(&mut self, now: Time) -> WorkerOutput {
        either!(self, worker => worker.get_finished(now))
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        either!(self, worker => worker.next_deadline())
    }

    pub(super) fn shutdown(&mut self, now: Time) {
        match self {
            Half::Nixl(worker) => worker.shutdown(),
            Half::Mooncake(worker) => worker.shutdown(now),
        }
    }

    pub(super) fn move_resolved(&mut self, now: Time, id: MoveId, result: Result<Transferred, MoveFailure>) {
        either!(self, worker => worker.move_resolved(now, id, result));
    }

    pub(super) fn move_settled(&mut self, now: Time, id: MoveId) {
        either!(self, worker => worker.move_settled(now, id));
    }

    pub(super) fn move_forgotten(&mut self, now: Time, id: MoveId) {
        either!(self, worker => worker.move_forgotten(now, id));
    }

    pub(super) fn fenced(&mut self, now: Time, request: &RequestId) {
        either!(self, worker => worker.fenced(now, request));
    }
}
