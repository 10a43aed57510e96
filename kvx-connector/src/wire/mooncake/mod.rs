//! The messages of the MooncakeConnector. A prefill worker tells a bootstrap server where it listens; the decode side
//! asks there, then asks the worker for blocks, and the worker answers while it writes.
//!
//! The two messages in msgpack leave fields at their defaults out, as vLLM does.

mod bootstrap;
mod request;
mod response;

pub use bootstrap::{Directory, ListedEngine, WorkerRegistration};
pub use request::{PullRequest, PulledRequest};
pub use response::{PullResponse, PullStatus};
