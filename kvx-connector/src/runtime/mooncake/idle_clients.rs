//! Idle connections to workers that have answered, so that the next question needs no greeting.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::sync::Mutex;

use super::super::zmtp::Client;

/// How long a connection is kept for the next question to the same worker, and how many connections
/// are kept.
const KEPT: Duration = Duration::from_secs(30);
const MOST_KEPT: usize = 256;

/// Idle connections, by the address of the worker.
#[derive(Debug, Default)]
pub(super) struct IdleClients(Mutex<HashMap<Arc<str>, (Client, Instant)>>);

impl IdleClients {
    pub(super) fn take(&self, address: &str) -> Option<Client> {
        let (client, since) = self.0.lock().remove(address)?;
        (since.elapsed() < KEPT && client.is_quiet()).then_some(client)
    }

    pub(super) fn keep(&self, address: Arc<str>, client: Client) {
        let mut kept = self.0.lock();
        kept.retain(|_, (_, since)| since.elapsed() < KEPT);
        if kept.len() < MOST_KEPT {
            kept.insert(address, (client, Instant::now()));
        }
    }
}

#[cfg(test)]
impl IdleClients {
    /// Takes the only connection that is kept.
    pub(super) fn only(&self) -> Option<Client> {
        let mut kept = self.0.lock();
        assert!(kept.len() <= 1, "a worker has one");
        kept.drain().next().map(|(_, (client, _))| client)
    }
}
