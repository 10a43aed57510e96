//! The end of a connector: of its peers' access, its agents, its loads and leases, and its thread.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use kvx_core::{Agent, Completion, Deadline, Error, ErrorKind, Result, Ticket};

use super::prefill::Released;
use super::register::closed;
use super::slot::Slot;
use super::state::{Shared, State};

/// A shutdown that was asked for.
pub(super) struct Shutdown {
    pub(super) deadline: Deadline,
    pub(super) begun: bool,
    tickets: Vec<Ticket>,
}

/// A shutdown that begins.
pub(super) struct Closing {
    pub(super) deadline: Deadline,
    pub(super) agents: Vec<Agent>,
    /// The ends of ranks in processes of their own.
    pub(super) away: Vec<Arc<Slot<Result<()>>>>,
}

impl Shared {
    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().is_closing()
    }

    /// Peers find nobody any more.
    pub(super) fn stop_listening(&self) {
        drop(self.side.lock().take());
    }

    pub(super) fn shutdown(&self, deadline: Deadline) -> Completion<()> {
        let (done, ticket) = Completion::with_ticket();
        let mut state = self.state.lock();
        state.closing.get_or_insert_with(|| Shutdown {
            deadline,
            begun: false,
            tickets: Vec::new(),
        });
        drop(state);
        self.settle_at_end(ticket);
        self.wake_up.notify_one();
        done
    }

    /// Settles a ticket with the shutdown that was asked for.
    pub(super) fn settle_at_end(&self, ticket: Ticket) {
        let mut state = self.state.lock();
        let over = state.over.clone();
        match (over, &mut state.closing) {
            (None, Some(closing)) => closing.tickets.push(ticket),
            (over, _) => {
                drop(state);
                ticket.settle(over.unwrap_or(Ok(())));
            }
        }
    }

    /// The end: whoever still waits hears it. `Ok`: nothing touches any block any more.
    pub(super) fn end(&self, result: Result<()>) {
        let mut state = self.state.lock();
        let released = if result.is_ok() { Released::Free } else { Released::Lost };
        state.awaited.close();
        let outcomes = state.scheduler.end(result.is_ok());
        let mut wakers: Vec<_> =
            outcomes.into_iter().filter_map(|outcome| state.deliver(outcome)).collect();
        let unraised = state.end_raising(result.is_ok());
        wakers.extend(unraised.into_iter().filter_map(|outcome| state.hand_over(outcome)));
        wakers.extend(state.awaited.end(released));
        let tickets = state.closing.as_mut().map(|closing| std::mem::take(&mut closing.tickets));
        state.over = Some(result.clone());
        let gathering = state.gathering.take();
        self.told.notify_all();
        drop(state);
        if let Some(gathering) = gathering {
            gathering.end(closed());
        }
        wakers.into_iter().for_each(Waker::wake);
        tickets.into_iter().flatten().for_each(|ticket| ticket.settle(result.clone()));
        self.news.notify_waiters();
        self.wake_up.notify_one();
    }
}

impl State {
    /// Whether a shutdown was asked for.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }
}

/// How long what has ended may take to say so.
const TO_SAY_SO: Duration = Duration::from_millis(100);

fn unheard() -> Error {
    Error::new(
        ErrorKind::StillShared,
        "a rank in a process of its own had not said by the deadline that it has ended: give it more time",
    )
}

/// Ends all agents, then the thread.
pub(super) async fn close(shared: Arc<Shared>, Closing { deadline, agents, away }: Closing) {
    // A registration that is under way has it for as long as it pins memory.
    let listening = Arc::clone(&shared);
    let stopped = tokio::task::spawn_blocking(move || listening.stop_listening());
    tokio::time::timeout(deadline.left(), stopped).await.ok();
    let ends: Vec<_> = agents.iter().map(|agent| agent.shutdown(deadline)).collect();
    let (mut registered, mut giving_back) = (Vec::new(), Vec::new());
    for held in shared.state.lock().ranks.values_mut() {
        registered.extend(held.registered.take());
        for given in held.giving_back.drain(..) {
            registered.push(given.registered);
            giving_back.push(given.ending);
        }
    }
    let mut result = Ok(());
    for registered in &registered {
        result = result.and(registered.finished(deadline).await);
    }
    for end in ends {
        result = result.and(end.await);
    }
    for end in away {
        let limit = deadline.left().max(TO_SAY_SO);
        let ended = tokio::time::timeout(limit, poll_fn(|context| end.poll(context))).await;
        result = result.and(ended.unwrap_or_else(|_| Err(unheard())));
    }
    // They have ended with their agents.
    for ending in giving_back {
        tokio::time::timeout(deadline.left().max(TO_SAY_SO), ending).await.ok();
    }
    shared.end(result);
}
