//! What a proxy sends to a prefill and a decode instance for one request of a client: plain functions over bodies.
//!
//! - [`sequential`]: NixlConnector. Prefill first; its answer says where the blocks are; then decode.
//! - [`concurrent`]: MooncakeConnector and NixlPushConnector. Both legs at once, tied together by an id.
//! - [`Answer`] and [`AnswerStream`] read what instances answer, whole or streamed.
//!
//! Both legs of a request carry the same `X-Request-Id` ([`XRequestId`](super::XRequestId)) and the client's own
//! `Authorization`. Parameters that a client sends itself are never passed on: they would name hosts to connect to.

mod answer;
mod bodies;
pub mod concurrent;
pub mod sequential;
mod stream;

pub use answer::Answer;
pub use stream::AnswerStream;
