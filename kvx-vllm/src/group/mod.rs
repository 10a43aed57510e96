//! Messages between an engine and its ranks in other processes: the only messages in this crate
//! that vLLM does not know.

pub mod fuzz;
mod message;
mod step;
mod value;

pub use message::{MAX_ASKED, MAX_MESSAGE, MAX_RAISED, OwnWords, ToHead, ToRank};
