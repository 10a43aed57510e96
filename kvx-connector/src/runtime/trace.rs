//! One span for each load, from its arrival to the word that the prefill may free its blocks, with
//! what each phase took.

use std::collections::HashMap;
use std::time::Duration;

use tracing::Span;
use tracing::field::Empty;

use kvx_vllm::engine::{Action, Outcome, RequestId, Time};

/// A phase of a load, as the span's field is named: microseconds. A load in several parts says
/// each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// From its arrival until the workers had it.
    Queue,
    /// From then until its first read was posted.
    Handshake,
    /// To post a read.
    Post,
    /// From the post until the data was there.
    Transfer,
    /// To read the generations of its blocks.
    Check,
    /// Until the prefill had the word that its blocks are free.
    Notify,
}

impl Phase {
    /// Notes in the span that this runs in what the phase took.
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

/// A load's span, and when its phase began.
struct Trace {
    span: Span,
    since: Time,
    reads: bool,
}

/// The spans of loads; none are kept where nobody listens to them.
#[derive(Default)]
pub(super) struct Traces(HashMap<RequestId, Trace>);

impl Traces {
    /// A request with something to load has arrived.
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

    /// The workers have it.
    pub(super) fn ordered(&mut self, now: Time, request: &RequestId) {
        self.next(now, request, Phase::Queue);
    }

    /// The span that an action is done in.
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

    /// Records its outcome.
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

    /// The engine has ended the request: the span ends with what is still done in it.
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
