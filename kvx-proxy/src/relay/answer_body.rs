//! Forwards the body of an answer to the client.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::Response;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::header::CONTENT_LENGTH;
use tokio::time::{Instant, Sleep};

use super::answer_head::AnswerHead;
use super::conversation::Capture;
use super::core::LiveSetup;
use super::fallback::FallbackPermit;
use super::legs::PrefillTask;
use super::record::Record;
use super::redaction::Redaction;
use crate::fleet::instance::{InFlight, Reason};
use crate::metrics::RequestOutcome;
use crate::request::{headers, without_transfer_params};
use crate::sse::{self, WholeEvents};
use crate::upstream::{compact, quoted_event, words};

/// The resources that an answer holds until it ends.
pub(crate) struct AnswerResources {
    pub(crate) live: std::sync::Arc<LiveSetup>,
    pub(crate) decode: InFlight,
    /// A prefill leg that is still running. Dropping it cancels the leg, as when the client
    /// disconnects.
    pub(crate) prefill: Option<PrefillTask>,
    pub(crate) capture: Option<Capture>,
    /// Hosts and engine ids that the legs named.
    pub(crate) named: Vec<String>,
    /// The message of the last error among the events.
    pub(crate) error: Option<String>,
    /// The request's part of the share of fallbacks.
    pub(crate) _fallback: Option<FallbackPermit>,
    /// The admission slot of the request.
    pub(crate) _place: Option<tokio::sync::OwnedSemaphorePermit>,
    /// The deadline of the request.
    pub(crate) until: Instant,
}

/// Builds the client's response from an answer that has begun.
pub(crate) fn pass(
    opened: AnswerHead,
    mut record: Record,
    mut held: AnswerResources,
) -> Response<Body> {
    let AnswerHead { mut parts, mut first, rest, mut events, wants_done, is_turn, .. } = opened;
    headers::drop_hop_by_hop(&mut parts.headers);
    headers::drop_instance(&mut parts.headers, held.decode.instance.name());
    let is_error = parts.status.as_u16() >= 400 || first.starts_with(b"{\"error\"");
    if let Some(events) = &mut events
        && events.take_error()
    {
        first = held.redacted(&mut record, &first, events);
    } else if events.is_none() && is_error {
        let redaction = Redaction::new(&held.live.fleet, &held.named, &record.id);
        if let Some(original) = redaction.error(&mut parts, &mut first) {
            record.hid(held.decode.instance.name(), &original, false);
        }
    }
    if events.is_some() {
        // The proxy may have to append an error event.
        parts.headers.remove(CONTENT_LENGTH);
    }
    record.stamp(&mut parts.headers);
    let status = parts.status;
    record.first_byte(status.as_u16());
    if let Some(capture) = &mut held.capture {
        capture.push(&first);
    }
    if is_turn {
        first = match events {
            Some(_) => sse::without_transfer_params(first),
            None => without_transfer_params(first),
        };
        parts.headers.remove(CONTENT_LENGTH);
    }
    record.passed(first.len(), events.as_ref().map_or(0, WholeEvents::count));
    let outcome = match status.as_u16() {
        ..=399 => RequestOutcome::Ok,
        400..=499 => RequestOutcome::ClientError,
        _ => RequestOutcome::UpstreamError,
    };
    if !status.is_success() {
        // No decode instance fetches the prefill's blocks: cancelling the leg frees them.
        held.prefill = None;
        held.capture = None;
    }
    let Some(rest) = rest else {
        record.whole_answer(&first);
        held.end(record, outcome, status.as_u16(), events.as_ref());
        return Response::from_parts(parts, Body::from(first));
    };
    let idle = held.live.setup.timeouts.idle;
    let mut end = record.core().end.subscribe();
    let passing = AnswerBody {
        first: Some(first),
        rest,
        events,
        wants_done,
        is_turn,
        idle,
        last: Instant::now(),
        sleep: Box::pin(tokio::time::sleep_until((Instant::now() + idle).min(held.until))),
        // The core holds the sender for at least as long as this body lives.
        end: Box::pin(async move { drop(end.wait_for(|end| *end).await) }),
        outcome,
        status: status.as_u16(),
        work: Some((record, held)),
    };
    Response::from_parts(parts, Body::new(passing))
}

impl AnswerResources {
    /// Removes addresses from the errors among these events. The log keeps them.
    fn redacted(&mut self, record: &mut Record, events: &Bytes, all: &WholeEvents) -> Bytes {
        self.error = quoted_event(events).or(self.error.take());
        let redaction = Redaction::new(&self.live.fleet, &self.named, &record.id);
        let redacted =
            sse::with_data(events, |data| redaction.event(&String::from_utf8_lossy(data)));
        if redacted != events {
            // The events may have text of the answer too.
            let said = self.error.as_deref().unwrap_or("an error event of another form");
            record.hid(self.decode.instance.name(), said, all.has_failed());
        }
        redacted
    }

    /// Finishes the answer: records the outcome, and blames the instance for an error in its
    /// events.
    fn end(
        mut self,
        mut record: Record,
        outcome: RequestOutcome,
        status: u16,
        events: Option<&WholeEvents>,
    ) {
        let instance = &self.decode.instance;
        if events.is_some_and(WholeEvents::has_failed) {
            let said = self.error.as_ref().map_or_else(String::new, |said| format!(": {said}"));
            let what = format!("decode leg: its stream reported an error{said}");
            record.core().blame_for(&self.live, instance, Reason::Errors, &what);
            record.set_error_if_none(&format!("instance {}: {what}", instance.name()));
        } else {
            instance.state.succeeded();
        }
        if events.is_some_and(WholeEvents::has_error) {
            record.ended(RequestOutcome::UpstreamError, status);
            return;
        }
        record.ended(outcome, status);
        if let Some(prefill) = self.prefill.take() {
            prefill.detach();
        }
        if let Some(capture) = self.capture.take() {
            capture.keep(instance.name());
        }
    }
}

/// The body of an answer: forwards an instance's bytes, and ends with an error if they stop.
struct AnswerBody {
    first: Option<Bytes>,
    rest: Incoming,
    events: Option<WholeEvents>,
    wants_done: bool,
    is_turn: bool,
    idle: Duration,
    last: Instant,
    sleep: Pin<Box<Sleep>>,
    end: Pin<Box<dyn Future<Output = ()> + Send>>,
    outcome: RequestOutcome,
    status: u16,
    /// `None` once the body has ended.
    work: Option<(Record, AnswerResources)>,
}

type FramePoll = Poll<Option<Result<Frame<Bytes>, std::io::Error>>>;

impl AnswerBody {
    /// Handles the end of the instance's body.
    fn end(&mut self) -> FramePoll {
        let (mut left, mut fails) = (Bytes::new(), false);
        if let Some(events) = &mut self.events {
            left = events.finish();
            fails = events.take_error();
            if self.wants_done && !events.done() && !events.has_error() {
                return self.break_off(
                    RequestOutcome::BrokenOff,
                    "the stream of the decode instance ended without [DONE]",
                    None,
                    Some(Reason::Errors),
                );
            }
        }
        let Some((mut record, mut held)) = self.work.take() else { return Poll::Ready(None) };
        if let Some(events) = self.events.as_ref().filter(|_| fails) {
            left = held.redacted(&mut record, &left, events);
        }
        if let Some(capture) = &mut held.capture {
            capture.push(&left);
        }
        let left = if self.is_turn { sse::without_transfer_params(left) } else { left };
        record.passed(left.len(), self.events.as_ref().map_or(0, WholeEvents::count));
        held.end(record, self.outcome, self.status, self.events.as_ref());
        match left.is_empty() {
            true => Poll::Ready(None),
            false => Poll::Ready(Some(Ok(Frame::data(left)))),
        }
    }

    /// Ends an answer that the instance did not finish: with an error event in a stream, else by
    /// breaking the client's connection. `detail` is for the log alone.
    fn break_off(
        &mut self,
        outcome: RequestOutcome,
        why: &str,
        detail: Option<&str>,
        blame: Option<Reason>,
    ) -> FramePoll {
        let Some((mut record, held)) = self.work.take() else { return Poll::Ready(None) };
        let instance = &held.decode.instance;
        let message = format!("this answer was broken off: {why}");
        let logged = detail.unwrap_or(why);
        if let Some(reason) = blame {
            record.core().blame_for(&held.live, instance, reason, &format!("decode leg: {logged}"));
        }
        record.ended(outcome, self.status);
        record.set_error(format!("instance {} broke off: {logged}", instance.name()));
        drop((record, held));
        match &self.events {
            Some(events) => {
                let kind = if outcome == RequestOutcome::Timeout {
                    "upstream_timeout"
                } else {
                    "upstream_error"
                };
                let code = if outcome == RequestOutcome::Timeout { 504 } else { 502 };
                let event =
                    [events.gap().as_bytes(), &sse::error_event(&message, kind, code)].concat();
                Poll::Ready(Some(Ok(Frame::data(event.into()))))
            }
            None => Poll::Ready(Some(Err(std::io::Error::other(message)))),
        }
    }

    fn out_of_time(&mut self) -> FramePoll {
        let why = "the request exceeded timeouts.request of this router";
        self.break_off(RequestOutcome::Timeout, why, None, None)
    }

    fn poll_time(&mut self, cx: &mut Context<'_>) -> FramePoll {
        if self.end.as_mut().poll(cx).is_ready() {
            let why = "this proxy is shutting down";
            return self.break_off(RequestOutcome::BrokenOff, why, None, None);
        }
        loop {
            ready!(self.sleep.as_mut().poll(cx));
            let now = Instant::now();
            let until = self.work.as_ref().map_or(now, |(_, held)| held.until);
            if now >= until {
                return self.out_of_time();
            }
            if now >= self.last + self.idle {
                let why = format!("the decode instance sent no data for {:?}", self.idle);
                return self.break_off(RequestOutcome::Timeout, &why, None, Some(Reason::Slow));
            }
            self.sleep.as_mut().reset((self.last + self.idle).min(until));
        }
    }
}

impl hyper::body::Body for AnswerBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> FramePoll {
        let this = self.get_mut();
        if let Some(first) = this.first.take()
            && !first.is_empty()
        {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        loop {
            let Some((record, held)) = &mut this.work else { return Poll::Ready(None) };
            let now = Instant::now();
            if now >= held.until {
                return this.out_of_time();
            }
            let data = match Pin::new(&mut this.rest).poll_frame(cx) {
                Poll::Pending => return this.poll_time(cx),
                Poll::Ready(None) => return this.end(),
                Poll::Ready(Some(Err(error))) => {
                    return this.break_off(
                        RequestOutcome::BrokenOff,
                        "the connection to the decode instance broke",
                        Some(&words(&error)),
                        Some(Reason::Errors),
                    );
                }
                Poll::Ready(Some(Ok(frame))) => compact(frame.into_data().unwrap_or_default()),
            };
            this.last = now;
            let (mut ready, mut fails) = (data, false);
            if let Some(events) = &mut this.events {
                ready = events.push(ready);
                fails = events.take_error();
            }
            if ready.is_empty() {
                continue;
            }
            if let Some(events) = this.events.as_ref().filter(|_| fails) {
                ready = held.redacted(record, &ready, events);
            }
            if let Some(capture) = &mut held.capture {
                capture.push(&ready);
            }
            let ready = if this.is_turn { sse::without_transfer_params(ready) } else { ready };
            record.passed(ready.len(), this.events.as_ref().map_or(0, WholeEvents::count));
            return Poll::Ready(Some(Ok(Frame::data(ready))));
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.work.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.events {
            Some(_) => SizeHint::default(),
            None => {
                let first = self.first.as_ref().map_or(0, |first| first.len() as u64);
                let rest = self.rest.size_hint();
                let mut hint = SizeHint::new();
                hint.set_lower(rest.lower() + first);
                if let Some(upper) = rest.upper() {
                    hint.set_upper(upper + first);
                }
                hint
            }
        }
    }
}
