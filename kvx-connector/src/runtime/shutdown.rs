//! Shutdown of a connector: of its peers' access, its agents, its loads and leases, and its thread.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Agent, Completion, Deadline, Error, ErrorKind, Result};

use super::shared::Shared;
use super::slot::Slot;

/// The work of a shutdown that starts.
pub(super) struct ShutdownWork {
    pub(super) deadline: Deadline,
    pub(super) agents: Vec<Agent>,
    /// The results of ranks in processes of their own.
    pub(super) remote: Vec<Arc<Slot<Result<()>>>>,
}

/// The time that an ended rank or task may take to report its end.
const TO_SAY_SO: Duration = Duration::from_millis(100);

/// Requests the shutdown. The connector's thread starts it.
pub(super) fn request(shared: &Shared, deadline: Deadline) -> Completion<()> {
    let (done, ticket) = Completion::with_ticket();
    shared.with_state(|state, _| state.shutdown.request(deadline));
    shared.settle_at_end(ticket);
    done
}

/// Ends all agents, then the thread.
pub(super) async fn run(
    shared: Arc<Shared>,
    ShutdownWork { deadline, agents, remote }: ShutdownWork,
) {
    // A registration in progress holds the lock for as long as it pins memory.
    let listening = Arc::clone(&shared);
    let stopped = tokio::task::spawn_blocking(move || drop(listening.listening.lock().take()));
    tokio::time::timeout(deadline.left(), stopped).await.ok();
    let ends: Vec<_> = agents.iter().map(|agent| agent.shutdown(deadline)).collect();
    let (mut registered, mut returns) = (Vec::new(), Vec::new());
    for (_, held) in shared.state.lock().ranks.iter_mut() {
        registered.extend(held.registered.take());
        for given in held.returns.drain(..) {
            registered.push(given.registered);
            returns.push(given.task);
        }
    }
    let mut result = Ok(());
    for registered in &registered {
        result = result.and(registered.finished(deadline).await);
    }
    for end in ends {
        result = result.and(end.await);
    }
    for end in remote {
        let limit = deadline.left().max(TO_SAY_SO);
        let ended = tokio::time::timeout(limit, poll_fn(|context| end.poll(context))).await;
        result = result.and(ended.unwrap_or_else(|_| Err(unheard())));
    }
    // These tasks have ended with their agents.
    for task in returns {
        tokio::time::timeout(deadline.left().max(TO_SAY_SO), task).await.ok();
    }
    shared.end(result);
}

fn unheard() -> Error {
    ErrorKind::StillShared.because(
        "a rank in a process of its own did not report its end by the deadline: allow more time",
    )
}
