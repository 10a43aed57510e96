//! The bodies that a proxy sends to a prefill and a decode instance for one request of a client, as
//! plain functions.
//!
//! - [`sequential`]: NixlConnector. Prefill first; its answer names the blocks; then decode.
//! - [`concurrent`]: MooncakeConnector and NixlPushConnector. Both legs at once, with a common id.
//! - [`Answer`] and [`AnswerStream`] read the answers of instances, whole or streamed.
//!
//! Both legs of a request carry the same `X-Request-Id` ([`XRequestId`](super::XRequestId)) and the
//! client's own `Authorization`. Recipes never pass on parameters from a client: they would name
//! hosts to connect to.

mod answer;
mod bodies;
pub mod concurrent;
pub mod sequential;
mod stream;

pub use answer::Answer;
pub use stream::AnswerStream;
