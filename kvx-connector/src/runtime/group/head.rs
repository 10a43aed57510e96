//! The engine of a rank that runs in a process of its own.

use kvx_core::{Deadline, ErrorKind, Result};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio::time::timeout;

use kvx_vllm::group::ToHead;

/// The channel from a rank's process to its engine.
pub(in crate::runtime) struct HeadHandle {
    up: UnboundedSender<ToHead>,
    /// The number of times that this rank has reported that it gives caches back.
    told: u64,
    /// The number of those reports that the engine has confirmed.
    knows: watch::Sender<u64>,
}

impl HeadHandle {
    pub(in crate::runtime) fn new(up: UnboundedSender<ToHead>) -> Self {
        HeadHandle { up, told: 0, knows: watch::Sender::new(0) }
    }

    /// Sends a message. Does nothing if the engine has ended.
    pub(in crate::runtime) fn send(&self, what: ToHead) {
        self.up.send(what).ok();
    }

    /// Reports that this rank gives its caches back.
    pub(in crate::runtime) fn give_back(&mut self) -> ReleaseConfirmation {
        self.told += 1;
        self.send(ToHead::GivesBack);
        ReleaseConfirmation { number: self.told, knows: self.knows.subscribe() }
    }

    /// Records the engine's confirmation of caches that were given back.
    pub(super) fn confirm(&self) {
        self.knows.send_modify(|knows| *knows = knows.saturating_add(1));
    }

    /// Confirms everything, because the engine has gone.
    pub(super) fn confirm_all(&self) {
        self.knows.send_replace(u64::MAX);
    }
}

/// The pending confirmation of caches that were given back.
#[derive(Clone, Debug)]
pub(in crate::runtime) struct ReleaseConfirmation {
    number: u64,
    knows: watch::Receiver<u64>,
}

impl ReleaseConfirmation {
    /// Waits for the confirmation. Errors: `TimedOut`.
    pub(in crate::runtime) async fn known(mut self, deadline: Deadline) -> Result<()> {
        match timeout(deadline.left(), self.knows.wait_for(|knows| *knows >= self.number)).await {
            // If the sender is gone with the process, no confirmation is needed.
            Ok(_) => Ok(()),
            Err(_) => Err(ErrorKind::TimedOut.because(
                "the caches are given back, but the engine did not confirm it by the deadline: \
                 only this rank refuses peers so far",
            )),
        }
    }
}
