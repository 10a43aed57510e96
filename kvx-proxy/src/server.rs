//! The protection of listeners, which `kvx serve` shares with the proxy.

pub use crate::admission::{BodyMemory, BodyPermit};
pub use crate::body::{BodyError, read_body};
pub use crate::serve::address_limit::counted_address;
pub use crate::serve::keys::Keys;
pub use crate::serve::listener::serve_http1;
pub use crate::setup::ClientLimits;

/// The connections of KV cache events.
pub mod zmtp {
    pub use kvx_vllm::zmtp::{Budget, Command, Input, MessageLimits, SocketType};

    pub use crate::zmtp::{EventConnection, parse_endpoint};
}
