//! The messages of the MooncakeConnector. A prefill worker registers its address with a bootstrap
//! server. A decode worker queries that server, then requests blocks from the prefill worker, which
//! answers while it writes. vLLM before 0.16 had no bootstrap server and a different request.
//!
//! The two msgpack messages omit fields with default values, as vLLM does.

mod bootstrap;
mod older;
mod request;
mod response;

pub use bootstrap::{Directory, ListedEngine, WorkerRegistration};
pub use older::{OlderAnswer, OlderPullRequest};
pub use request::{PullRequest, PulledRequest};
pub use response::{PullResponse, PullStatus};
