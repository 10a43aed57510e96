//! The engine of a rank that runs in a process of its own.

use kvx_core::{Deadline, Error, ErrorKind, Result};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio::time::timeout;

use kvx_vllm::group::ToHead;

/// Where the engine is told what happens here.
pub(in crate::runtime) struct HeadHandle {
    up: UnboundedSender<ToHead>,
    /// How often it was told that caches are given back.
    told: u64,
    /// How often it has said that it knows.
    knows: watch::Sender<u64>,
}

impl HeadHandle {
    pub(in crate::runtime) fn new(up: UnboundedSender<ToHead>) -> Self {
        HeadHandle { up, told: 0, knows: watch::Sender::new(0) }
    }

    /// Says something. An engine that has gone needs to hear nothing.
    pub(in crate::runtime) fn send(&self, what: ToHead) {
        self.up.send(what).ok();
    }

    /// Says that this rank gives its caches back.
    pub(in crate::runtime) fn give_back(&mut self) -> ReleaseConfirmation {
        self.told += 1;
        self.send(ToHead::GivesBack);
        ReleaseConfirmation { number: self.told, knows: self.knows.subscribe() }
    }

    /// The engine has confirmed caches that were given back.
    pub(super) fn confirm(&self) {
        self.knows.send_modify(|knows| *knows = knows.saturating_add(1));
    }

    /// The engine has gone: nobody waits for it any more.
    pub(super) fn confirm_all(&self) {
        self.knows.send_replace(u64::MAX);
    }
}

/// That the engine knows of caches that are given back, some time.
#[derive(Clone, Debug)]
pub(in crate::runtime) struct ReleaseConfirmation {
    number: u64,
    knows: watch::Receiver<u64>,
}

impl ReleaseConfirmation {
    /// Errors: `TimedOut`.
    pub(in crate::runtime) async fn known(mut self, deadline: Deadline) -> Result<()> {
        match timeout(deadline.left(), self.knows.wait_for(|knows| *knows >= self.number)).await {
            // Who is gone with this process asks nothing.
            Ok(_) => Ok(()),
            Err(_) => Err(Error::new(
                ErrorKind::TimedOut,
                "the caches are given back, and the engine had not said by the deadline that it knows: peers are \
                 refused by this rank alone",
            )),
        }
    }
}
