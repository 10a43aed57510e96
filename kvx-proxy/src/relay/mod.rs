//! What becomes of a client's request.

pub(crate) mod alone;
pub(crate) mod conversation;
pub(crate) mod core;
pub(crate) mod disaggregated;
pub(crate) mod job;
pub(crate) mod legs;
pub(crate) mod opening;
mod passing;
mod record;
pub(crate) mod refusal;
mod tries;
