//! The next notification of an agent.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use super::inner::AgentInner;
use crate::deadline::{Expire, Reason, Watch};
use crate::inbox::Notification;
use crate::{Deadline, ErrorKind, Result};

/// A future for the next notification of an agent; see
/// [`Agent::notification`](super::Agent::notification).
#[must_use = "await it, or call join"]
pub struct NextNotification {
    agent: Arc<AgentInner>,
    deadline: Deadline,
    watch: Option<Watch>,
}

/// Wakes everyone who waits for a notification, so that they check their deadlines.
struct WakeAtDeadline(Weak<AgentInner>);

impl Expire for WakeAtDeadline {
    fn expire(self: Arc<Self>) {
        if let Some(agent) = self.0.upgrade() {
            agent.inbox.wake_all();
        }
    }

    fn interrupt(self: Arc<Self>, reason: &Reason) {
        if matches!(reason, Reason::Shutdown) {
            self.expire();
        }
    }
}

impl NextNotification {
    pub(super) fn new(agent: Arc<AgentInner>, deadline: Deadline) -> Self {
        NextNotification { agent, deadline, watch: None }
    }

    fn ready(&self, taken: (Option<Notification>, bool)) -> Option<Result<Notification>> {
        if taken.1 {
            self.agent.resume_transports();
        }
        match taken.0 {
            Some(notification) => Some(Ok(notification)),
            None if self.agent.check_open().is_err() => self.agent.check_open().err().map(Err),
            None if self.deadline.passed() => {
                Some(Err(ErrorKind::TimedOut.because("no notification arrived by the deadline")))
            }
            None => None,
        }
    }

    /// Blocks until a notification arrives or the deadline of the call passes.
    ///
    /// # Errors
    /// `TimedOut` at the deadline; `Closed` if the agent is shut down; `Forked`.
    pub fn join(self) -> Result<Notification> {
        loop {
            if let Some(result) = self.ready(self.agent.inbox.take()) {
                return result;
            }
            self.agent.inbox.wait_until(self.deadline.instant());
        }
    }

    /// Blocks until a notification arrives, or until the earlier of `deadline` and the deadline of
    /// the call.
    ///
    /// # Errors
    /// `TimedOut` at the deadline; `Closed` if the agent is shut down; `Forked`.
    pub fn wait_blocking(mut self, deadline: impl Into<Deadline>) -> Result<Notification> {
        self.deadline = self.deadline.earlier(deadline.into());
        self.join()
    }
}

impl Future for NextNotification {
    type Output = Result<Notification>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let taken = self.agent.inbox.take_or_wake(Some(context.waker()));
        if let Some(result) = self.ready(taken) {
            return Poll::Ready(result);
        }
        if self.watch.is_none()
            && let Some(at) = self.deadline.instant()
        {
            let wake = Arc::new(WakeAtDeadline(Arc::downgrade(&self.agent)));
            self.watch = Some(self.agent.clock.watch(at, wake));
        }
        Poll::Pending
    }
}
