//! One span for each load, with the duration of each phase. It starts when the request arrives, and
//! ends when the prefill has been notified that it may free its blocks.

use std::collections::HashMap;
use std::time::Duration;

use tracing::Span;
use tracing::field::Empty;

use kvx_vllm::engine::{Action, Outcome, RequestId, Time};

/// A phase of a load, named as the field of the span, in microseconds. A load in several parts
/// records each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// From the request's arrival until the workers have the load.
    Queue,
    /// From then until the load's first read is posted.
    Handshake,
    /// The posting of a read.
    Post,
    /// From the post until the data has arrived.
    Transfer,
    /// The read of the blocks' generations.
    Check,
    /// The notification that the prefill may free the blocks.
    Notify,
}

impl Phase {
    /// Records the duration of this phase in the current span.
    pub(super) fn took(self, time: Duration) {
        self.record(&Span::current(), time);
    }

    fn record(self, span: &Span, time: Duration) {
        let field = match self {
            Phase::Queue => "queue_us",
            Phase::Handshake => "handshake_us",
            Phase::Post => "post_us",
            Phase::Transfer => "transfer_us",
            Phase::Check => "check_us",
            Phase::Notify => "notify_us",
        };
        span.record(field, u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }
}

/// A load's span, and the start of its phase.
struct Trace {
    span: Span,
    since: Time,
    reads: bool,
}

/// The spans of loads. Empty if no subscriber is interested in them.
#[derive(Default)]
pub(super) struct Traces(HashMap<RequestId, Trace>);

impl Traces {
    /// Opens the span of a request with something to load.
    pub(super) fn arrived(&mut self, now: Time, request: &RequestId, engine: &str) {
        let span = tracing::info_span!(
            "kvx_load",
            %request,
            engine,
            queue_us = Empty,
            handshake_us = Empty,
            post_us = Empty,
            transfer_us = Empty,
            check_us = Empty,
            notify_us = Empty,
            backend = Empty,
            nixl = Empty,
            outcome = Empty,
        );
        if !span.is_disabled() {
            self.0.insert(request.clone(), Trace { span, since: now, reads: false });
        }
    }

    /// Records that the workers have the load.
    pub(super) fn ordered(&mut self, now: Time, request: &RequestId) {
        self.next(now, request, Phase::Queue);
    }

    /// Returns the span in which an action runs.
    pub(super) fn of(&mut self, now: Time, action: &Action) -> Span {
        let request = match action {
            Action::Read(order) => {
                if self
                    .0
                    .get_mut(&order.request)
                    .is_some_and(|trace| !std::mem::replace(&mut trace.reads, true))
                {
                    self.next(now, &order.request, Phase::Handshake);
                }
                Some(&order.request)
            }
            Action::ReadGenerations { request, .. }
            | Action::CheckDigests { request, .. }
            | Action::Finish { request, .. }
            | Action::Register { request, .. }
            | Action::Fence { request } => Some(request),
            Action::Notify { request, .. } => request.as_ref(),
            _ => None,
        };
        let trace = request.and_then(|request| self.0.get(request));
        trace.map_or_else(Span::none, |trace| trace.span.clone())
    }

    /// Records the outcome of a load.
    pub(super) fn outcome(&mut self, outcome: &Outcome) {
        let (request, said) = match outcome {
            Outcome::Loaded { request, .. } => (request, "loaded".to_owned()),
            Outcome::Failed { request, failure, .. } => (request, failure.to_string()),
            Outcome::Free { .. } | Outcome::Lost { .. } => return,
        };
        if let Some(trace) = self.0.get(request) {
            trace.span.record("outcome", &*said);
        }
    }

    /// Releases the span of a request that the engine has ended. Work in progress still runs in it.
    pub(super) fn finished(&mut self, request: &RequestId) {
        self.0.remove(request);
    }

    fn next(&mut self, now: Time, request: &RequestId, phase: Phase) {
        if let Some(trace) = self.0.get_mut(request) {
            phase.record(&trace.span, now.since(trace.since));
            trace.since = now;
        }
    }
}
