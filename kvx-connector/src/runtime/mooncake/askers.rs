//! The ways back to decodes that have asked.

use std::collections::HashMap;

use kvx_core::backend::sync::Mutex;
use tokio::sync::mpsc;

use kvx_vllm::engine::WorkerRank;
use kvx_vllm::engine::mooncake::AskId;

/// The ways back to decodes that have asked, by connection.
#[derive(Debug, Default)]
pub(super) struct Askers(Mutex<HashMap<(WorkerRank, u32), mpsc::Sender<Vec<u8>>>>);

impl Askers {
    /// Sends an answer. If there is no way back any more, nothing is lost.
    pub(super) fn answer(&self, rank: WorkerRank, ask: AskId, bytes: Vec<u8>) {
        let key = (rank, connection_of(ask));
        let asker = self.0.lock().get(&key).cloned();
        if asker.is_some_and(|asker| asker.try_send(bytes).is_err()) {
            // With it ends the connection.
            self.remove(key);
        }
    }

    /// Notes the way back of a connection.
    pub(super) fn insert(&self, key: (WorkerRank, u32), way_back: mpsc::Sender<Vec<u8>>) {
        self.0.lock().insert(key, way_back);
    }

    pub(super) fn remove(&self, key: (WorkerRank, u32)) {
        let removed = self.0.lock().remove(&key);
        drop(removed); // it may wake a task
    }
}

/// A question's name has its connection's number in it: the way back.
fn connection_of(ask: AskId) -> u32 {
    (ask.0 >> 32) as u32
}
