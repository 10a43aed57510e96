//! The memory that connections move: registered regions, blocks of requests, and completions that
//! wait for memory.

pub(crate) mod deferred;
pub(crate) mod payload;
pub(crate) mod regions;
pub(crate) mod stages;
