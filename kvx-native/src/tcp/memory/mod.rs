//! The memory that connections move: whose it is, how much of it a request names, and when nobody touches it any more.

pub(crate) mod deferred;
pub(crate) mod payload;
pub(crate) mod regions;
pub(crate) mod stages;
