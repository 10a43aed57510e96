//! Sends a request, and measures its streamed answer.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::{Request, Response};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::endpoint::{EndpointClient, message};
use crate::log::shown;
use crate::sse::WholeEvents;
use crate::upstream::{whole, words};

/// The longest error that is read.
const LONGEST_ERROR: usize = 1 << 20;

/// Why a request has no complete answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlayError {
    /// The kind of failure: `status 503`, `no connection`, `broken off`, `error event`, `timeout`
    /// or `malformed`.
    pub kind: String,
    /// The message of the server or of the connection, at most 300 characters of it, with control
    /// characters escaped.
    pub message: String,
}

impl PlayError {
    pub(super) fn new(kind: impl Into<String>, message: impl AsRef<str>) -> Self {
        PlayError { kind: kind.into(), message: shown(message.as_ref()) }
    }

    fn timeout() -> Self {
        PlayError::new("timeout", "the answer did not end in time")
    }
}

/// The measurements of an answer, up to its end or its failure.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) first: Option<Duration>,
    last: Option<Duration>,
    /// The events with a part of the answer.
    events: u64,
    usage: Option<Usage>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: Option<Details>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

/// An event of a stream. Other fields are ignored.
#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<IgnoredAny>,
    usage: Option<Usage>,
    error: Option<Value>,
}

impl Measured {
    /// Returns the tokens of the answer: as the server counts them, or else its events.
    pub(super) fn tokens(&self) -> u64 {
        self.usage.map_or(self.events, |usage| usage.completion_tokens)
    }

    /// Returns the mean time between two tokens.
    pub(super) fn per_token(&self) -> Option<Duration> {
        let tokens = u32::try_from(self.tokens()).ok().filter(|tokens| *tokens > 1)?;
        match self.events {
            0 | 1 => None,
            _ => Some((self.last? - self.first?) / (tokens - 1)),
        }
    }

    /// Returns the prompt's tokens, and those that the server had cached, if it reports them.
    pub(super) fn cached(&self) -> Option<(u64, u64)> {
        let usage = self.usage?;
        Some((usage.prompt_tokens, usage.prompt_tokens_details?.cached_tokens?))
    }

    /// Takes the data of an event that arrived at this time.
    fn event(&mut self, data: &[u8], at: Duration) -> Result<(), PlayError> {
        let event: Event = serde_json::from_slice(data).map_err(|error| {
            PlayError::new("malformed", format!("an event is not JSON: {error}"))
        })?;
        if let Some(error) = event.error.filter(|error| !error.is_null()) {
            let message = message(Some(serde_json::json!({ "error": error })));
            return Err(PlayError::new("error event", message));
        }
        if !event.choices.is_empty() {
            self.first.get_or_insert(at);
            self.last = Some(at);
            self.events += 1;
        }
        self.usage = event.usage.or(self.usage);
        Ok(())
    }
}

/// Sends a request, and reads its stream until `[DONE]`.
pub(super) async fn stream(
    client: &EndpointClient,
    request: Request<Full<Bytes>>,
    timeout: Duration,
    measured: &mut Measured,
) -> Result<(), PlayError> {
    let sent = Instant::now();
    let until = sent + timeout;
    let response = timeout_at(until, client.request(request)).await;
    let response = response.map_err(|_| PlayError::timeout())?.map_err(|error| {
        let kind = if error.is_connect() { "no connection" } else { "broken off" };
        PlayError::new(kind, words(&error))
    })?;
    if !response.status().is_success() {
        return Err(refusal(response, until).await);
    }
    let (mut events, mut body) = (WholeEvents::default(), response.into_body());
    loop {
        let frame = timeout_at(until, body.frame()).await.map_err(|_| PlayError::timeout())?;
        let (data, is_last) = match frame {
            Some(Ok(frame)) => (events.push(frame.into_data().unwrap_or_default()), false),
            Some(Err(error)) => return Err(PlayError::new("broken off", words(&error))),
            None => (events.finish(), true),
        };
        let at = sent.elapsed();
        let lines =
            data.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(b"data:"));
        for data in lines.map(<[u8]>::trim_ascii) {
            if data == b"[DONE]" {
                return match measured.events {
                    0 => Err(PlayError::new("malformed", "the stream had no answer")),
                    _ => Ok(()),
                };
            }
            measured.event(data, at)?;
        }
        if is_last {
            return Err(PlayError::new("broken off", "the stream ended without [DONE]"));
        }
    }
}

async fn refusal(response: Response<Incoming>, until: Instant) -> PlayError {
    let status = response.status().as_u16();
    let said = whole(response.into_body(), LONGEST_ERROR, until).await;
    let said = said.ok().and_then(|body| serde_json::from_slice(&body).ok());
    PlayError::new(format!("status {status}"), message(said))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn tokens_are_those_of_the_usage_and_times_those_of_the_events() {
        let mut measured = Measured::default();
        measured.event(br#"{"choices": [{"text": "a"}], "usage": null}"#, 10 * MS).unwrap();
        assert_eq!((measured.tokens(), measured.per_token()), (1, None));
        measured.event(br#"{"choices": [{"text": "bc"}]}"#, 40 * MS).unwrap();
        assert_eq!((measured.tokens(), measured.per_token()), (2, Some(30 * MS)));
        assert_eq!(measured.cached(), None);
        let usage = br#"{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
                         "prompt_tokens_details": {"cached_tokens": 6}}}"#;
        measured.event(usage, 90 * MS).unwrap();
        assert_eq!(measured.first, Some(10 * MS));
        assert_eq!((measured.tokens(), measured.per_token()), (4, Some(10 * MS)));
        assert_eq!(measured.cached(), Some((9, 6)));
    }

    #[test]
    fn messages_of_servers_are_short_and_control_no_terminal() {
        let error = PlayError::new("status 500", format!("a\u{1b}[2Jä{}", "x".repeat(1 << 20)));
        assert!(error.message.starts_with("a\\u{1b}[2Jä"), "{}", error.message);
        assert_eq!(error.message.chars().count(), 300 + "\\u{1b}".len() - 1);
    }

    #[test]
    fn errors_in_a_stream_are_told_apart() {
        let mut measured = Measured::default();
        let error = measured.event(br#"{"error": {"message": "no blocks"}}"#, MS).unwrap_err();
        assert_eq!(error, PlayError::new("error event", "no blocks"));
        assert_eq!(measured.event(b"<html>", MS).unwrap_err().kind, "malformed");
    }
}
