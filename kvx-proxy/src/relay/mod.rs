//! Relays a client's request to instances, and their answer to the client.

mod answer_body;
pub(crate) mod answer_head;
pub(crate) mod api_error;
pub(crate) mod conversation;
pub(crate) mod core;
pub(crate) mod decode_only;
pub(crate) mod disaggregated;
pub(crate) mod fallback;
pub(crate) mod job;
pub(crate) mod legs;
mod record;
mod redaction;
mod retries;
pub(crate) mod tokens;
