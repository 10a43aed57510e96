//! Endpoints over shared memory in this process.
//!
//! libfabric (seen with 1.17) maps an endpoint's shared memory once per process. Neighbours, the
//! other endpoints in the process, use the same mapping and crash when the endpoint is closed. So
//! an endpoint stays open while a neighbour leads to it. Before it is closed, every other endpoint
//! forgets it, including one that only knows its name.

use std::sync::Arc;

use kvx_core::backend::sync::Mutex;

use crate::ffi::Endpoint;

struct OpenEndpoint {
    address: Box<[u8]>,
    endpoint: Arc<Endpoint>,
    /// The number of users of the endpoint: its own agent, and neighbours that lead to it.
    users: usize,
}

static OPEN: Mutex<Vec<OpenEndpoint>> = Mutex::new(Vec::new());
/// Serialises closing: all endpoints that are involved stay open meanwhile.
static CLOSING: Mutex<()> = Mutex::new(());

/// Keeps an endpoint of this process open.
#[derive(Debug)]
pub(crate) struct Neighbour(Box<[u8]>);

impl Neighbour {
    /// Registers an agent's own endpoint.
    pub(crate) fn new(address: &[u8], endpoint: &Arc<Endpoint>) -> Self {
        let endpoint = Arc::clone(endpoint);
        let mut open = OPEN.lock();
        open.push(OpenEndpoint { address: address.into(), endpoint, users: 1 });
        Neighbour(address.into())
    }

    /// Finds another agent's endpoint. Returns `None` if it has been closed.
    pub(crate) fn find(address: &[u8]) -> Option<Self> {
        let mut open = OPEN.lock();
        let found = open.iter_mut().find(|open| *open.address == *address)?;
        found.users += 1;
        Some(Neighbour(address.into()))
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let closing = CLOSING.lock();
        let mut open = OPEN.lock();
        let Some(at) = open.iter().position(|open| open.address == self.0) else {
            return debug_assert!(false, "an endpoint stays on the list while it has users");
        };
        open[at].users -= 1;
        if open[at].users > 0 {
            return;
        }
        let ended = open.swap_remove(at);
        let others: Vec<Arc<Endpoint>> =
            open.iter().map(|open| Arc::clone(&open.endpoint)).collect();
        drop(open);
        for other in &others {
            // SAFETY: this provider created the address.
            match unsafe { other.insert(&ended.address) } {
                Ok(number) => other.remove(number),
                Err(errno) => tracing::debug!(
                    ?errno,
                    "a neighbour could not remove the address of an endpoint"
                ),
            }
        }
        drop(ended); // closes it, unless its agent still holds it and will
        drop(closing);
    }
}
