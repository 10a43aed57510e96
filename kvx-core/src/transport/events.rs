//! The reports of a transport to its agent.

use crate::Error;
use crate::identity::{LinkId, Sender};

/// Receives the reports of a transport. The transport calls it without holding locks, except the
/// one that lets only one thread make progress. It may call wakers.
pub trait Events: Send + Sync {
    /// Reports that a peer sent `bytes`. May yield the core to threads that wait for the
    /// notification.
    ///
    /// # Errors
    /// [`QueueFull`]: the transport keeps the bytes, acknowledges nothing, lets only a bounded
    /// number of notifications follow, and tries again at
    /// [`Transport::resume`](super::Transport::resume).
    fn notification(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), QueueFull>;

    /// Reports a change of a link.
    fn link(&self, id: LinkId, state: LinkState);
}

/// The error of a full notification queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

/// A change of a link.
#[derive(Clone, Debug)]
pub enum LinkState {
    /// The handshake is complete: plans may be posted.
    Up,
    /// The link's capabilities or its description changed.
    Changed,
    /// The link is gone for good, or never came up. Core resolves what is in flight with this error
    /// at once. Each ticket settles when it is proven that nothing touches its memory.
    Lost(Error),
    /// The peer's address answers, but its metadata's invitation does not match: usually another
    /// incarnation.
    Restarted,
}
