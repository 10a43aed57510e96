//! Ranks in processes of their own: they join the engine over a Unix socket, or over TCP from other hosts.
//!
//! The engine's process keeps the scheduler's half, the side channel and the words of all blocks, which it shares with
//! ranks of its host and tells the others; a rank's process has the worker's half, its agent and its memory. Steps go
//! down, outputs come up, and [`WorkerKind`](super::half::WorkerKind) is what of it the rest of the runtime sees.

mod away;
mod caches;
mod digesting;
mod granting;
mod head;
mod joined;
mod lead;
mod raising;
mod serving;
mod setup;
mod stream;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "what fails here is the test")]
mod tests;

use std::time::Duration;

pub(super) use self::away::Away;
pub(super) use self::digesting::await_digests;
pub(super) use self::granting::Granting;
pub(super) use self::head::{Gathering, JoinAddress};
pub use self::joined::JoinedRank;
pub(super) use self::lead::{HeadHandle, ReleaseConfirmation};

/// A rank says this often that it lives.
const PULSE: Duration = Duration::from_secs(1);
/// One of which nothing was heard for so long is lost.
const SILENT: Duration = Duration::from_secs(10);
/// How long a step of joining may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for who has not proven anything yet.
const IMPATIENCE: Duration = Duration::from_secs(3);
/// How long the last word may take on its way.
const LAST_WORD: Duration = Duration::from_secs(1);
