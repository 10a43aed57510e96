//! The return paths to decodes that have asked.

use std::collections::HashMap;

use kvx_core::backend::sync::Mutex;
use tokio::sync::mpsc;

use kvx_vllm::engine::WorkerRank;
use kvx_vllm::engine::mooncake::AskId;

/// The return paths to decodes that have asked, by connection.
#[derive(Debug, Default)]
pub(super) struct Askers(Mutex<HashMap<(WorkerRank, u32), mpsc::Sender<Vec<u8>>>>);

impl Askers {
    /// Sends an answer. Drops it if the connection has ended, because the decode does not wait for
    /// it then.
    pub(super) fn answer(&self, rank: WorkerRank, ask: AskId, bytes: Vec<u8>) {
        let key = (rank, connection_of(ask));
        let asker = self.0.lock().get(&key).cloned();
        if asker.is_some_and(|asker| asker.try_send(bytes).is_err()) {
            // Dropping the sender ends the connection.
            self.remove(key);
        }
    }

    /// Adds the return path of a connection.
    pub(super) fn insert(&self, key: (WorkerRank, u32), way_back: mpsc::Sender<Vec<u8>>) {
        self.0.lock().insert(key, way_back);
    }

    pub(super) fn remove(&self, key: (WorkerRank, u32)) {
        let removed = self.0.lock().remove(&key);
        drop(removed); // it may wake a task
    }
}

/// Returns the number of the connection on which a question arrived, which is part of the
/// question's id.
fn connection_of(ask: AskId) -> u32 {
    (ask.0 >> 32) as u32
}
