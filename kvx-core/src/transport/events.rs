//! Reports of a transport to its agent.

use crate::Error;
use crate::identity::{LinkId, Sender};

/// Receives the reports of a transport. Called without locks of the transport but the one that makes it the only one
/// to make progress; may call wakers.
pub trait Events: Send + Sync {
    /// A peer sent `bytes`. [`QueueFull`]: keep them, acknowledge nothing and let a bounded number follow; try again at
    /// [`Transport::resume`](super::Transport::resume). May let go of the core for whoever waits for them.
    fn notification(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), QueueFull>;

    /// A link changed.
    fn link(&self, id: LinkId, state: LinkState);
}

/// The queue of notifications has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

/// A change of a link.
#[derive(Clone, Debug)]
pub enum LinkState {
    /// The handshake is done: plans may be posted.
    Up,
    /// Its capabilities or its description changed.
    Changed,
    /// It is gone for good, or never came up. Core resolves what is in flight with this error at once; each ticket
    /// settles when it is proven that nobody touches its memory.
    Lost(Error),
    /// Somebody answers at the peer's address whom its metadata does not invite to: another incarnation of it, as a
    /// rule.
    Restarted,
}
