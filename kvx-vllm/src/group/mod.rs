//! What an engine and its ranks in processes of their own say to each other: the only messages here that no vLLM knows.

pub mod fuzz;
mod message;
mod step;

pub use message::{MAX_ASKED, MAX_MESSAGE, MAX_RAISED, OwnWords, ToHead, ToRank};
