//! The beginning of an answer, held back until the proxy commits to forwarding it.

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap};
use hyper::http::response::Parts;
use hyper::{Response, StatusCode};
use tokio::time::{Instant, timeout_at};

use super::redaction::unreadable;
use crate::sse::{self, WholeEvents};
use crate::upstream::{Fault, WHOLE, accepted, words};

/// The most bytes of a non-streamed answer that are held back.
const HELD: usize = 1 << 20;
/// The longest error that is forwarded.
const LONGEST_ERROR: usize = 1 << 20;

/// The kind of answer that a request expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerKind {
    /// A completion: a JSON object, or events that end with `[DONE]`.
    Completion,
    /// A completion whose `kv_transfer_params` name blocks for the next turn. They are removed
    /// before it is forwarded.
    Turn,
    /// Any answer, forwarded unchanged.
    Any,
}

/// The beginning of an answer, and its rest.
#[derive(Debug)]
pub(crate) struct AnswerHead {
    pub(crate) parts: Parts,
    /// The bytes that may be forwarded now.
    pub(crate) first: Bytes,
    /// The rest; `None` if `first` is the whole body.
    pub(crate) rest: Option<Incoming>,
    /// The splitter of events, if the answer is an event stream.
    pub(crate) events: Option<WholeEvents>,
    /// True if the events must end with `[DONE]`.
    pub(crate) wants_done: bool,
    /// True if `kv_transfer_params` must be removed.
    pub(crate) is_turn: bool,
    /// True if the stream begins with a server error, before any part of a real answer.
    pub(crate) is_error: bool,
}

fn content_type_is(headers: &HeaderMap, wanted: &str) -> bool {
    headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).is_some_and(|value| {
        value.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(wanted)
    })
}

/// Waits for the beginning of an answer: the first complete event of a stream, the end of an error,
/// or the end of any other short answer.
pub(crate) async fn open(
    response: Response<Incoming>,
    kind: AnswerKind,
    until: Instant,
) -> Result<AnswerHead, Fault> {
    let response = accepted(response, until).await?;
    let (mut parts, mut body) = response.into_parts();
    let plain = !parts.headers.contains_key(CONTENT_ENCODING);
    let failed = parts.status.is_client_error() || parts.status.is_server_error();
    let is_stream = plain && !failed && content_type_is(&parts.headers, "text/event-stream");
    let mut events = is_stream.then(WholeEvents::default);
    let good = parts.status == StatusCode::OK && kind != AnswerKind::Any;
    let wants_done = good && events.is_some();
    let mut first = BytesMut::new();
    let mut rest = None;
    loop {
        if body.is_end_stream() {
            break;
        }
        let frame = timeout_at(until, body.frame()).await.map_err(|_| {
            Fault::Late(match first.is_empty() {
                true => "no byte of its answer arrived in time".to_owned(),
                false => "its answer stopped".to_owned(),
            })
        })?;
        let data = match frame {
            None => break,
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
            Some(Err(error)) => return Err(Fault::Broken(words(&error))),
        };
        match &mut events {
            Some(events) => {
                let ready = events.push(data);
                first.extend_from_slice(&ready);
            }
            None => first.extend_from_slice(&data),
        }
        if kind == AnswerKind::Turn && events.is_none() && first.len() > WHOLE {
            return Err(Fault::Broken(format!("its answer is longer than {WHOLE} bytes")));
        }
        if failed && first.len() > LONGEST_ERROR {
            parts.headers.remove(CONTENT_LENGTH);
            first = BytesMut::from(&unreadable(parts.status.as_u16())[..]);
            break;
        }
        let enough = match kind {
            _ if failed => usize::MAX,
            AnswerKind::Turn if events.is_none() => usize::MAX,
            AnswerKind::Completion if plain && events.is_none() => HELD,
            _ => 1,
        };
        if first.len() >= enough && !body.is_end_stream() {
            rest = Some(body);
            break;
        }
    }
    if rest.is_none()
        && let Some(events) = &mut events
    {
        first.extend_from_slice(&events.finish());
    }
    let first = first.freeze();
    if good && rest.is_none() {
        match &events {
            Some(events) if !events.done() && !events.has_error() => {
                return Err(Fault::Broken("its stream ended without [DONE]".to_owned()));
            }
            None if plain && serde_json::from_slice::<serde::de::IgnoredAny>(&first).is_err() => {
                let what = if first.is_empty() { "empty" } else { "not JSON" };
                return Err(Fault::Broken(format!("its answer with status 200 is {what}")));
            }
            _ => {}
        }
    }
    let is_error = events.is_some() && sse::opens_with_failure(&first);
    Ok(AnswerHead {
        parts,
        first,
        rest,
        events,
        wants_done,
        is_turn: kind == AnswerKind::Turn,
        is_error,
    })
}
