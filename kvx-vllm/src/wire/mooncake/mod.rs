//! The messages of the MooncakeConnector. A prefill worker tells a bootstrap server where it listens; the decode side
//! asks there, then asks the worker for blocks, and the worker answers while it writes. Before vLLM 0.16 there was no
//! bootstrap server, and another question.
//!
//! The two messages in msgpack leave fields at their defaults out, as vLLM does.

mod bootstrap;
mod older;
mod request;
mod response;

pub use bootstrap::{Directory, ListedEngine, WorkerRegistration};
pub use older::{OlderAnswer, OlderPullRequest};
pub use request::{PullRequest, PulledRequest};
pub use response::{PullResponse, PullStatus};
