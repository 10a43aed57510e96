//! The two messages of the MooncakeConnector: the decode side asks, the prefill side answers while it writes.
//!
//! Both leave fields at their defaults out, as vLLM does.

mod request;
mod response;

pub use request::{PullRequest, PulledRequest};
pub use response::{PullResponse, PullStatus};
