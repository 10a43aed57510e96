//! The worker's half of a connector: whichever protocol it speaks, and whichever process it is in.

use super::group::Away;
use crate::engine::mooncake::MooncakeWorker;
use crate::engine::{
    ConnectorMeta, MoveFailure, MoveId, RequestId, Settings, Time, Transferred, Worker,
    WorkerOutput, WorkerRank,
};
use crate::wire::mooncake::PullRequest;

/// What all kinds of worker are told and asked alike.
pub(super) enum WorkerKind {
    Nixl(Box<Worker>),
    Mooncake(Box<MooncakeWorker>),
    /// In a process of its own, where it speaks NixlConnector's protocol.
    Away(Box<Away>),
}

/// The same call of either that is in this process.
macro_rules! here {
    ($half:expr, $worker:ident => $call:expr, $away:pat => $otherwise:expr) => {
        match $half {
            WorkerKind::Nixl($worker) => $call,
            WorkerKind::Mooncake($worker) => $call,
            WorkerKind::Away($away) => $otherwise,
        }
    };
}

impl WorkerKind {
    /// Of one worker of an engine with these settings.
    pub(super) fn new(settings: &Settings, rank: WorkerRank) -> kvx_core::Result<Self> {
        Ok(match &settings.mooncake {
            None => WorkerKind::Nixl(Box::new(Worker::new(settings.clone(), rank))),
            // Nothing is asked before its caches are registered: then it tells where they are.
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

    pub(super) fn away(&self) -> Option<&Away> {
        if let WorkerKind::Away(away) = self { Some(away) } else { None }
    }

    pub(super) fn away_mut(&mut self) -> Option<&mut Away> {
        if let WorkerKind::Away(away) = self { Some(away) } else { None }
    }

    /// Whether it fills blocks for a request, in this process and by a NixlConnector's protocol.
    pub(super) fn is_loading(&self, request: &RequestId) -> bool {
        matches!(self, WorkerKind::Nixl(worker) if worker.is_loading(request))
    }

    /// Takes the message of a step.
    pub(super) fn start_load_kv(&mut self, now: Time, meta: ConnectorMeta) {
        here!(self, worker => worker.start_load_kv(now, meta), away => away.start_load_kv(meta));
    }

    /// What there is to tell.
    pub(super) fn get_finished(&mut self, now: Time) -> WorkerOutput {
        here!(self, worker => worker.get_finished(now), away => away.take_said())
    }

    /// When [`get_finished`](Self::get_finished) has something to do, though nothing else may happen.
    pub(super) fn next_deadline(&self) -> Option<Time> {
        here!(self, worker => worker.next_deadline(), _ => None)
    }

    /// Ends what it has, if it is in this process.
    pub(super) fn shutdown(&mut self, now: Time) {
        match self {
            WorkerKind::Nixl(worker) => worker.shutdown(),
            WorkerKind::Mooncake(worker) => worker.shutdown(now),
            WorkerKind::Away(_) => {}
        }
    }

    /// Its caches are given back.
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
