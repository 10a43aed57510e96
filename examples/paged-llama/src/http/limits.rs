//! The limits on clients.

use kvx_proxy::server::{BodyMemory, ClientLimits};
use rustix::process::{Resource, getrlimit};

/// The longest body, in bytes.
const LONGEST_BODY: usize = 16 << 20;
/// The most bytes of all bodies that have not been read into tokens yet.
const MOST_MEMORY: usize = 256 << 20;
/// The most connections of clients.
const MOST_CONNECTIONS: usize = 4096;

/// The limits on clients: the proxy's, with shorter bodies.
#[derive(Debug)]
pub struct RequestLimits {
    pub(super) clients: ClientLimits,
    /// The memory for bodies.
    pub(super) bodies: BodyMemory,
}

impl Default for RequestLimits {
    fn default() -> Self {
        // Peers and files need descriptors too.
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let half = usize::try_from(descriptors / 2).unwrap_or(usize::MAX);
        let connections = half.clamp(1, MOST_CONNECTIONS);
        let clients = ClientLimits {
            connections,
            connections_per_address: connections.div_ceil(2),
            body: LONGEST_BODY,
            ..ClientLimits::default()
        };
        RequestLimits { clients, bodies: BodyMemory::new(MOST_MEMORY) }
    }
}
