//! The work in progress of a MooncakeConnector's workers.

use std::collections::HashMap;
use std::sync::Arc;

use kvx_core::backend::sync::Mutex;
use tokio::task::AbortHandle;

use super::super::zmtp::Budget;
use super::askers::Askers;
use super::idle_clients::IdleClients;
use super::route::WriteRoute;
use kvx_vllm::engine::mooncake::PullId;
use kvx_vllm::engine::{Connection, WorkerRank};

/// The limit for the answers in memory of all questions of an engine.
const ANSWERS: usize = 64 << 20;

/// The routes, questions and connections of all workers.
#[derive(Debug)]
pub(in super::super) struct MooncakeState {
    /// Routes to the memory of decodes.
    routes: Mutex<HashMap<(WorkerRank, Connection), Arc<WriteRoute>>>,
    /// The tasks of pulls that wait for answers.
    pulls: Mutex<HashMap<(WorkerRank, PullId), AbortHandle>>,
    pub(super) askers: Askers,
    /// The budget of answers in memory.
    pub(super) answers: Arc<Budget>,
    pub(super) idle: IdleClients,
}

impl Default for MooncakeState {
    fn default() -> Self {
        MooncakeState {
            routes: Mutex::default(),
            pulls: Mutex::default(),
            askers: Askers::default(),
            answers: Budget::new(ANSWERS),
            idle: IdleClients::default(),
        }
    }
}

impl MooncakeState {
    pub(in super::super) fn route(
        &self,
        rank: WorkerRank,
        connection: Connection,
    ) -> Option<Arc<WriteRoute>> {
        self.routes.lock().get(&(rank, connection)).cloned()
    }

    pub(super) fn add_route(&self, rank: WorkerRank, connection: Connection, route: WriteRoute) {
        self.routes.lock().insert((rank, connection), Arc::new(route));
    }

    pub(in super::super) fn disconnect(&self, rank: WorkerRank, connection: Connection) {
        self.routes.lock().remove(&(rank, connection));
    }

    /// Registers the task of a question. Aborts an earlier one with the same id.
    pub(in super::super) fn asks(&self, rank: WorkerRank, pull: PullId, task: AbortHandle) {
        if let Some(before) = self.pulls.lock().insert((rank, pull), task) {
            before.abort();
        }
    }

    /// Aborts the task of a question.
    pub(in super::super) fn hang_up(&self, rank: WorkerRank, pull: PullId) {
        if let Some(task) = self.pulls.lock().remove(&(rank, pull)) {
            task.abort();
        }
    }

    /// Sends an answer to the decode that asked.
    pub(in super::super) fn answer(
        &self,
        rank: WorkerRank,
        ask: kvx_vllm::engine::mooncake::AskId,
        bytes: Vec<u8>,
    ) {
        self.askers.answer(rank, ask, bytes);
    }
}
