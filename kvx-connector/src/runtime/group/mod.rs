//! Ranks in processes of their own, which join the engine over a Unix socket, or over TCP from
//! other hosts.
//!
//! The engine's process has the scheduler, the side channel and the generations of all blocks,
//! which it shares with ranks of its host and sends to the others. A rank's process has the worker,
//! its agent and its memory. Steps go to the rank and outputs to the engine. The rest of the
//! runtime sees a rank as a [`RemoteRank`].
//!
//! Layers, lowest to highest: `limits`, `process`, `stream`; `head`, `gathering`, `remote_rank`,
//! which the state holds; `registration`, `members`, `serving`, `open` in the engine's process;
//! `setup`, `joined` in that of a rank.

mod gathering;
mod head;
mod joined;
mod limits;
mod members;
mod open;
mod process;
mod registration;
mod remote_rank;
mod serving;
mod setup;
mod stream;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "what fails here is the test")]
mod tests;

pub(super) use self::gathering::Gathering;
pub(super) use self::head::{HeadHandle, ReleaseConfirmation};
pub use self::joined::JoinedRank;
pub(super) use self::limits::PATIENCE;
pub(super) use self::members::send_grants;
pub(super) use self::remote_rank::{RemoteRank, Task, await_digests, rank_name};
