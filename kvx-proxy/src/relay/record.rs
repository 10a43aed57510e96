//! The record of a request until it ends, for metrics, the access log, and its span.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use hyper::header::{HeaderMap, HeaderValue};
use tracing::{Span, field};

use super::core::Core;
use crate::fleet::instance::Instance;
use crate::log::shown;
use crate::metrics::RequestOutcome;
use crate::recording::writer::{RecordedPrompt, RecordedRequest};
use crate::request::{CompletionRequest, headers};
use crate::timeline::{LegLog, Timeline};

/// A request in progress. Dropping it without an outcome means that the client disconnected.
#[derive(Debug)]
pub(crate) struct Record {
    core: Arc<Core>,
    /// A drain waits until all of these are dropped.
    _working: tokio::sync::mpsc::Sender<()>,
    pub(crate) span: Span,
    pub(crate) id: String,
    id_is_known: bool,
    trace: String,
    method: String,
    path: String,
    model: Option<String>,
    started: Instant,
    queued: Duration,
    route: Option<(&'static str, &'static str)>,
    prefill: Option<Arc<str>>,
    decode: Option<Arc<str>>,
    attempts: u32,
    prefill_time: Option<Duration>,
    first_byte: Option<Duration>,
    status: u16,
    bytes: u64,
    events: u64,
    outcome: RequestOutcome,
    why: Option<String>,
    /// The prompt, and the tokens of an answer that is not streamed, for the recording.
    prompt: Option<RecordedPrompt>,
    answer_tokens: Option<u64>,
    prompt_tokens: Option<u64>,
    legs: Arc<LegLog>,
}

impl Record {
    pub(crate) fn new(
        core: Arc<Core>,
        working: tokio::sync::mpsc::Sender<()>,
        id: String,
        trace: String,
        method: &str,
        path: &str,
    ) -> Self {
        core.metrics.in_flight.fetch_add(1, Relaxed);
        let path = cut(path);
        let span = tracing::info_span!(
            "request",
            id,
            trace,
            path,
            model = field::Empty,
            route = field::Empty,
            status = field::Empty,
            outcome = field::Empty,
        );
        let started = Instant::now();
        Record {
            core,
            _working: working,
            span,
            id,
            id_is_known: false,
            trace,
            method: method.to_owned(),
            path: path.to_owned(),
            model: None,
            started,
            queued: Duration::ZERO,
            route: None,
            prefill: None,
            decode: None,
            attempts: 1,
            prefill_time: None,
            first_byte: None,
            status: 0,
            bytes: 0,
            events: 0,
            outcome: RequestOutcome::ClientGone,
            why: None,
            prompt: None,
            answer_tokens: None,
            prompt_tokens: None,
            legs: Arc::new(LegLog::new(started)),
        }
    }

    /// Marks the id as reserved. Dropping the record releases it.
    pub(crate) fn owns_id(&mut self) {
        self.id_is_known = true;
    }

    pub(crate) fn queued(&mut self, time: Duration) {
        self.queued = time;
        self.core.metrics.queue.observe(time);
    }

    pub(crate) fn route(&mut self, route: &'static str, reason: &'static str) {
        if self.route != Some((route, reason)) {
            self.route = Some((route, reason));
            self.core.metrics.route(route, reason);
            self.span.record("route", route);
        }
    }

    /// Sets the headers that tell the client its request's id and route.
    pub(crate) fn stamp(&self, into: &mut HeaderMap) {
        // The client's id: an instance may answer with the suffix that the proxy added.
        if let Ok(id) = HeaderValue::from_str(&self.id) {
            into.insert(headers::REQUEST_ID, id);
        }
        if let Ok(route) = HeaderValue::from_str(&self.route_words()) {
            into.insert(headers::ROUTE, route);
        }
    }

    fn route_words(&self) -> String {
        match self.route {
            Some(("decode_alone", reason)) => format!("decode-alone; {reason}"),
            Some((route, _)) => route.to_owned(),
            None => "none".to_owned(),
        }
    }

    pub(crate) fn prefill(&mut self, instance: &Instance, time: Option<Duration>) {
        self.prefill = Some(Arc::clone(&instance.shared_name));
        self.prefill_time = time;
    }

    pub(crate) fn decode(&mut self, instance: &Instance) {
        self.decode = Some(Arc::clone(&instance.shared_name));
    }

    pub(crate) fn attempts(&mut self, made: u32) {
        self.attempts = made;
    }

    /// Records that the answer's first byte goes to the client.
    pub(crate) fn first_byte(&mut self, status: u16) {
        let time = self.started.elapsed();
        self.first_byte = Some(time);
        self.status = status;
        if status < 400 {
            self.core.metrics.ttft.observe(time);
        }
    }

    pub(crate) fn passed(&mut self, bytes: usize, events: u64) {
        self.bytes += bytes as u64;
        self.events = events;
    }

    /// Records the outcome and the status.
    pub(crate) fn ended(&mut self, outcome: RequestOutcome, status: u16) {
        self.outcome = outcome;
        self.status = status;
    }

    pub(crate) fn model(&mut self, model: Option<&str>) {
        self.model = model.map(|model| cut(model).to_owned());
    }

    /// Returns the legs of the request.
    pub(crate) fn legs(&self) -> &Arc<LegLog> {
        &self.legs
    }

    /// Records the length of a prompt as it is known when the request is sent on.
    pub(crate) fn prompt_tokens(&mut self, tokens: u64) {
        self.prompt_tokens = Some(tokens);
    }

    /// Returns true if the request is passed through unchanged.
    pub(crate) fn is_passed(&self) -> bool {
        matches!(self.route, Some(("passed", _)))
    }

    /// Keeps what a recording has of an admitted completion. Requests without this are not
    /// recorded.
    pub(crate) fn prompt(&mut self, asked: &CompletionRequest) {
        let recorder = &self.core.recorder;
        if !recorder.is_configured() {
            return;
        }
        // A recording that has ended only counts what it lacks.
        let chunks = if recorder.is_on() { asked.prompt.chunks.clone() } else { Vec::new() };
        let is_chat = self.is_chat();
        self.prompt = Some(RecordedPrompt {
            tokens: asked.prompt_tokens,
            max_tokens: asked.new_tokens,
            chunks,
            stream: asked.stream,
            // A chat begins with the role; the usage is an event of its own.
            other_events: u64::from(is_chat) + u64::from(asked.streams_usage()),
        });
    }

    /// Reads the length of a whole answer from its usage.
    pub(crate) fn whole_answer(&mut self, body: &[u8]) {
        self.answer_tokens = completion_tokens(body);
    }

    fn is_chat(&self) -> bool {
        self.path == "/v1/chat/completions"
    }

    /// Returns what the recording keeps of this request, if it is an admitted completion.
    fn recorded(&mut self, total: Duration) -> Option<RecordedRequest> {
        let prompt = self.prompt.take()?;
        let answer_tokens = match prompt.stream {
            true => Some(self.events.saturating_sub(prompt.other_events)),
            false => self.answer_tokens,
        };
        Some(RecordedRequest {
            arrived: self.started,
            prompt,
            chat: self.is_chat(),
            answer_tokens,
            status: self.status,
            outcome: self.outcome.as_str(),
            route: self.route.map(|(route, _)| route),
            first_byte: self.first_byte,
            total,
        })
    }

    pub(crate) fn set_error(&mut self, why: impl Into<String>) {
        self.why = Some(why.into());
    }

    /// Sets the error, unless one is set that says more.
    pub(crate) fn set_error_if_none(&mut self, why: &str) {
        self.why.get_or_insert_with(|| why.to_owned());
    }

    /// Logs what an instance said, of which the client gets only a part. The last errors have it
    /// already if the instance `is_blamed` for it.
    pub(crate) fn hid(&mut self, instance: &str, said: &str, is_blamed: bool) {
        let said = shown(cut(said.trim()));
        if !is_blamed {
            self.core.errors.add(instance, &said);
        }
        self.why = Some(format!("instance {instance} said: {said}"));
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }
}

/// Returns the number of generated tokens in the usage at the end of an answer.
fn completion_tokens(body: &[u8]) -> Option<u64> {
    const KEY: &[u8] = b"\"completion_tokens\":";
    let end = &body[body.len().saturating_sub(4 << 10)..];
    let at = end.windows(KEY.len()).rposition(|part| part == KEY)? + KEY.len();
    let digits = end[at..].trim_ascii_start().split(|byte| !byte.is_ascii_digit()).next()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Returns the part of a text of others that logs keep.
fn cut(text: &str) -> &str {
    let end = (0..=256.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

impl Drop for Record {
    fn drop(&mut self) {
        let total = self.started.elapsed();
        if self.outcome == RequestOutcome::ClientGone && *self.core.end.borrow() {
            // The proxy ended the request, not the client.
            self.outcome = RequestOutcome::BrokenOff;
        }
        if let Some(recorded) = self.recorded(total) {
            self.core.recorder.add(recorded);
        }
        let metrics = &self.core.metrics;
        metrics.in_flight.fetch_sub(1, Relaxed);
        metrics.request(self.outcome);
        if let (Some(first), true) = (self.first_byte, self.events > 1) {
            metrics.per_token.observe(total.saturating_sub(first) / (self.events - 1) as u32);
        }
        if self.id_is_known {
            self.core.forget_id(&self.id);
        }
        self.span.record("status", self.status);
        self.span.record("outcome", self.outcome.as_str());
        if let Some(model) = &self.model {
            self.span.record("model", model.as_str());
        }
        let millis = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        self.core.access.line(metrics, || {
            serde_json::json!({
                "time": crate::log::now(),
                "id": self.id,
                "trace": self.trace,
                "method": self.method,
                "path": self.path,
                "model": self.model,
                "status": self.status,
                "outcome": self.outcome.as_str(),
                "why": self.why,
                "route": self.route.map(|(route, _)| route),
                "reason": self.route.map(|(_, reason)| reason).filter(|reason| !reason.is_empty()),
                "prefill": self.prefill.as_deref(),
                "decode": self.decode.as_deref(),
                "attempts": self.attempts,
                "queue_ms": millis(self.queued),
                "prefill_ms": self.prefill_time.map(millis),
                "ttft_ms": self.first_byte.map(millis),
                "total_ms": millis(total),
                "bytes": self.bytes,
                "events": self.events,
            })
        });
        self.legs.end_answers(total);
        self.core.history.add(Timeline {
            id: std::mem::take(&mut self.id),
            path: std::mem::take(&mut self.path),
            model: self.model.take(),
            route: self.route,
            outcome: self.outcome,
            status: self.status,
            why: self.why.take().map(|why| cut(&why).to_owned()),
            attempts: self.attempts,
            arrived: self.started,
            queued: self.queued,
            first_byte: self.first_byte,
            total,
            bytes: self.bytes,
            events: self.events,
            prompt_tokens: self.prompt_tokens,
            answer_tokens: self.answer_tokens,
            legs: Arc::clone(&self.legs),
        });
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_length_of_an_answer_is_read_from_its_usage() {
        let body =
            br#"{"text": "\"completion_tokens\": 7", "usage": {"completion_tokens": 12, "x": 1}}"#;
        assert_eq!(super::completion_tokens(body), Some(12));
        assert_eq!(super::completion_tokens(br#"{"usage":{"completion_tokens":3}}"#), Some(3));
        for other in [&b""[..], br#"{"text": "a"}"#, br#"{"completion_tokens":null}"#] {
            assert_eq!(super::completion_tokens(other), None);
        }
    }

    #[test]
    fn logs_keep_the_beginning_of_a_text() {
        assert_eq!(super::cut(&"ä".repeat(1000)).len(), 256);
        assert_eq!(super::cut(&format!("x{}", "ä".repeat(1000))).len(), 255);
        assert_eq!(super::cut("short"), "short");
    }
}
