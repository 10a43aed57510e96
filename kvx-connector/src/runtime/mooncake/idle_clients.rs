//! Idle connections to workers that have answered, so that the next question needs no handshake.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::sync::Mutex;

use super::prefill_connection::PrefillConnection;

/// How long a connection is kept for the next question to the same worker, and how many connections
/// are kept.
const KEPT: Duration = Duration::from_secs(30);
const MOST_KEPT: usize = 256;

/// Idle connections, by the address of the worker.
#[derive(Debug, Default)]
pub(super) struct IdleClients(Mutex<HashMap<Arc<str>, (PrefillConnection, Instant)>>);

impl IdleClients {
    /// Takes the connection to a worker, if it is `authenticated` or not, as the caller needs.
    pub(super) fn take(&self, address: &str, authenticated: bool) -> Option<PrefillConnection> {
        let (connection, since) = self.0.lock().remove(address)?;
        let fits = connection.is_authenticated() == authenticated;
        (fits && since.elapsed() < KEPT && connection.is_quiet()).then_some(connection)
    }

    pub(super) fn keep(&self, address: Arc<str>, connection: PrefillConnection) {
        let mut kept = self.0.lock();
        kept.retain(|_, (_, since)| since.elapsed() < KEPT);
        if kept.len() < MOST_KEPT {
            kept.insert(address, (connection, Instant::now()));
        }
    }
}

#[cfg(test)]
impl IdleClients {
    /// Takes the only connection that is kept.
    pub(super) fn only(&self) -> Option<PrefillConnection> {
        let mut kept = self.0.lock();
        assert!(kept.len() <= 1, "a worker has one");
        kept.drain().next().map(|(_, (connection, _))| connection)
    }
}
