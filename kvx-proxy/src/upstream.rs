//! Connections to instances, and the requests sent over them.

use std::fmt;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::http::uri::PathAndQuery;
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{HttpConnector, capture_connection};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::log::shown;
use crate::release::Delivery;
use crate::resolver::Resolver;
use crate::setup::{InstanceSetup, Setup};

/// The most bytes of an instance's answer that is read as a whole: a prefill's, an error's, a list
/// of models.
pub(crate) const WHOLE: usize = 16 << 20;

/// The reason that a leg has no usable answer, in the order of a request's life.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The connection failed: the instance has not seen the request.
    Refused(String),
    /// The connection timed out, which says less about the instance. It has not seen the request
    /// either.
    Unreached(String),
    /// The instance answered that it cannot take the request now.
    Busy(Box<Response<Bytes>>),
    /// The instance took the request and answered with a server error.
    Status(Box<Response<Bytes>>),
    /// The instance took the request, and the connection or the answer broke.
    Broken(String),
    /// The instance took the request, and sent nothing for too long.
    Late(String),
}

impl Fault {
    /// Returns true if the instance has not begun the request, so that another one may get it
    /// unchanged.
    pub(crate) fn not_accepted(&self) -> bool {
        matches!(self, Fault::Refused(_) | Fault::Unreached(_) | Fault::Busy(_))
    }

    /// Returns the fault of a stream that begins with these events, an error among them.
    pub(crate) fn failed_stream(events: &[u8]) -> Self {
        let said = quoted_event(events).map_or_else(String::new, |said| format!(": {said}"));
        Fault::Broken(format!("its stream begins with an error{said}"))
    }

    /// Returns true if the only reason is a timeout.
    pub(crate) fn is_late(&self) -> bool {
        matches!(self, Fault::Late(_) | Fault::Unreached(_))
    }

    /// Describes the fault for clients: without addresses and engine ids, which its `Display` text
    /// may have.
    pub(crate) fn summary(&self) -> &'static str {
        match self {
            Fault::Refused(_) => "could not be reached",
            Fault::Unreached(_) => "accepted no connection in time",
            Fault::Busy(_) | Fault::Status(_) => "answered with an error",
            Fault::Broken(_) => "broke off, or its answer is wrong",
            Fault::Late(_) => "did not answer in time",
        }
    }

    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Fault::Refused(_) => "refused",
            Fault::Busy(_) | Fault::Status(_) => "status",
            Fault::Broken(_) => "failed",
            Fault::Late(_) | Fault::Unreached(_) => "timeout",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Refused(why) => write!(f, "could not be reached: {why}"),
            Fault::Unreached(why) => write!(f, "accepted no connection in time: {why}"),
            Fault::Busy(response) | Fault::Status(response) => {
                write!(f, "answered with status {}", response.status().as_u16())?;
                match quoted(response.body()) {
                    Some(said) => write!(f, ": {said}"),
                    None => Ok(()),
                }
            }
            Fault::Broken(why) => write!(f, "broke off: {why}"),
            Fault::Late(why) => write!(f, "was silent: {why}"),
        }
    }
}

/// The most bytes of an error that are read for its message.
const LONGEST_ERROR: usize = 16 << 10;

/// Returns the message of an error that an instance answered, [`shown`] in one line; `None` if it
/// has no text.
pub(crate) fn quoted(body: &[u8]) -> Option<String> {
    let body = &body[..body.len().min(LONGEST_ERROR)];
    let value: Option<Value> = serde_json::from_slice(body).ok();
    // OpenAI's form, an older one of vLLM, and FastAPI's.
    let message = value.as_ref().and_then(|value| {
        ["/error/message", "/message", "/detail", "/error"]
            .iter()
            .find_map(|path| value.pointer(path).and_then(Value::as_str))
    });
    let text = match message {
        Some(message) => message.trim(),
        None => std::str::from_utf8(body).ok()?.trim(),
    };
    (!text.is_empty()).then(|| shown(text))
}

/// Returns the message of the last error among a stream's events, as [`quoted`].
pub(crate) fn quoted_event(events: &[u8]) -> Option<String> {
    let lines = events.split(|byte| matches!(byte, b'\n' | b'\r'));
    let data = lines.filter_map(|line| line.strip_prefix(b"data:").map(<[u8]>::trim_ascii));
    let mut errors =
        data.filter(|data| data.starts_with(b"{\"error\"") || data.starts_with(b"{ \"error\""));
    errors.next_back().and_then(quoted)
}

/// The two kinds of pooled connections, HTTP/1.1 and HTTP/2 without TLS.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    http1: Client<HttpConnector<Resolver>, Full<Bytes>>,
    h2c: Client<HttpConnector<Resolver>, Full<Bytes>>,
    timeout: Duration,
}

impl Upstream {
    pub(crate) fn new(setup: &Setup) -> Self {
        let mut connector = HttpConnector::new_with_resolver(Resolver::default());
        connector.set_connect_timeout(Some(setup.timeouts.connect));
        connector.set_nodelay(true);
        connector.set_keepalive(Some(Duration::from_secs(30)));
        let mut builder = Client::builder(TokioExecutor::new());
        builder
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            // vLLM closes idle connections after 5 s: never take one that it is about to close.
            .pool_idle_timeout(Duration::from_secs(4))
            // hyper doubles its read buffer up to this while an instance sends faster than the client
            // reads. It also bounds the head of an answer.
            .http1_max_buf_size(32 << 10)
            .http2_keep_alive_interval(Duration::from_secs(20))
            .http2_initial_stream_window_size(1 << 20)
            .http2_initial_connection_window_size(16 << 20);
        let http1 = builder.build(connector.clone());
        let h2c = builder.http2_only(true).build(connector);
        Upstream { http1, h2c, timeout: setup.timeouts.connect }
    }

    /// Sends a request and waits for the head of the answer.
    pub(crate) async fn send(
        &self,
        instance: &InstanceSetup,
        method: Method,
        path: &PathAndQuery,
        headers: HeaderMap,
        body: Bytes,
        until: Instant,
    ) -> Result<Response<Incoming>, Fault> {
        self.send_watched(instance, method, path, headers, body, until, &Delivery::default()).await
    }

    /// Sends a request as [`send`](Self::send) does. `delivery` tells whether the instance may have
    /// it.
    #[expect(clippy::too_many_arguments, reason = "the parts of a request, and its delivery")]
    pub(crate) async fn send_watched(
        &self,
        instance: &InstanceSetup,
        method: Method,
        path: &PathAndQuery,
        headers: HeaderMap,
        body: Bytes,
        until: Instant,
        delivery: &Delivery,
    ) -> Result<Response<Incoming>, Fault> {
        let mut parts = instance.url.clone().into_parts();
        parts.path_and_query = Some(path.clone());
        let uri = Uri::from_parts(parts).map_err(|error| Fault::Refused(error.to_string()))?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        delivery.watch(capture_connection(&mut request));
        let client = if instance.h2c { &self.h2c } else { &self.http1 };
        match timeout_at(until, client.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) if error.is_connect() => Err(match timed_out(&error) {
                true => Fault::Unreached(words(&error)),
                false => Fault::Refused(words(&error)),
            }),
            Ok(Err(error)) => Err(Fault::Broken(words(&error))),
            Err(_) => Err(Fault::Late("no answer in time".to_owned())),
        }
    }

    /// `GET`s a small JSON document.
    pub(crate) async fn get_json(
        &self,
        instance: &InstanceSetup,
        path: &'static str,
        headers: HeaderMap,
        within: Duration,
    ) -> Result<(StatusCode, Option<serde_json::Value>), Fault> {
        let until = Instant::now() + within;
        let path = PathAndQuery::from_static(path);
        let response =
            self.send(instance, Method::GET, &path, headers, Bytes::new(), until).await?;
        let status = response.status();
        let body = whole(response.into_body(), WHOLE, until).await?;
        Ok((status, serde_json::from_slice(&body).ok()))
    }

    /// Returns the timeout of a connection attempt.
    pub(crate) fn connect_timeout(&self) -> Duration {
        self.timeout
    }
}

/// Returns true if a timeout is among the causes of an error.
fn timed_out(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source())
        .filter_map(|error| error.downcast_ref::<std::io::Error>())
        .any(|error| error.kind() == std::io::ErrorKind::TimedOut)
}

/// Returns an error and its causes in one line.
pub(crate) fn words(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// Pieces below this are copied out of the buffer that they were read into.
const SMALL_PIECE: usize = 4 << 10;

/// Returns a piece of a body that keeps at most about twice its length allocated. hyper reads into
/// buffers of at least 8 KiB, and a small piece, mostly one event, would keep all of its buffer until
/// the client has read it: a slow client has up to 16 of them.
pub(crate) fn compact(piece: Bytes) -> Bytes {
    if piece.len() < SMALL_PIECE { Bytes::copy_from_slice(&piece) } else { piece }
}

/// Reads a whole body of at most `limit` bytes.
pub(crate) async fn whole<B>(mut body: B, limit: usize, until: Instant) -> Result<Bytes, Fault>
where
    B: Body<Data = Bytes, Error: std::error::Error + 'static> + Unpin,
{
    let mut collected = BytesMut::new();
    loop {
        let frame = timeout_at(until, body.frame())
            .await
            .map_err(|_| Fault::Late("its answer did not end in time".to_owned()))?;
        let data = match frame {
            None => return Ok(collected.freeze()),
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
            Some(Err(error)) => return Err(Fault::Broken(words(&error))),
        };
        if collected.is_empty() && body.is_end_stream() {
            return Ok(data);
        }
        if collected.len() + data.len() > limit {
            return Err(Fault::Broken(format!("its answer is longer than {limit} bytes")));
        }
        collected.extend_from_slice(&data);
    }
}

/// Separates final answers from those that another instance may improve. 503 and 429 mean that the
/// instance did nothing, other 5xx that it tried. Reads the bodies of these, so that they can be
/// forwarded in the end.
pub(crate) async fn accepted(
    response: Response<Incoming>,
    until: Instant,
) -> Result<Response<Incoming>, Fault> {
    let status = response.status();
    let busy = matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS);
    // Every instance would answer 501 alike.
    if !busy && (!status.is_server_error() || status == StatusCode::NOT_IMPLEMENTED) {
        return Ok(response);
    }
    let (parts, body) = response.into_parts();
    let body = whole(body, 1 << 20, until).await?;
    let response = Box::new(Response::from_parts(parts, body));
    Err(if busy { Fault::Busy(response) } else { Fault::Status(response) })
}

/// Sets the headers of a JSON body.
pub(crate) fn json_headers(headers: &mut HeaderMap, length: usize) {
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_quoted_by_its_message_escaped_and_cut() {
        for (body, wanted) in [
            (r#"{"error": {"message": "out of\nmemory", "code": 500}}"#, Some("out of\\nmemory")),
            (r#"{"object": "error", "message": "no blocks"}"#, Some("no blocks")),
            (r#"{"detail": "Not Found"}"#, Some("Not Found")),
            ("Internal Server Error\n", Some("Internal Server Error")),
            (r#"{"code": 7}"#, Some(r#"{"code": 7}"#)),
            ("  ", None),
        ] {
            assert_eq!(quoted(body.as_bytes()).as_deref(), wanted, "{body}");
        }
        assert_eq!(quoted(b"\x1f\x8b\xff"), None, "compressed");
        assert!(quoted("x".repeat(1 << 20).as_bytes()).unwrap().len() <= 300);
        let events =
            b"data: {\"id\": 1}\n\ndata: {\"error\": {\"message\": \"lost\"}}\n\ndata: [DONE]\n\n";
        assert_eq!(quoted_event(events).as_deref(), Some("lost"));
        let fault = Fault::failed_stream(events).to_string();
        assert_eq!(fault, "broke off: its stream begins with an error: lost");
        let body = Bytes::from_static(br#"{"error": {"message": "lost"}}"#);
        let mut response = Response::new(body);
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        let fault = Fault::Status(Box::new(response));
        assert_eq!(fault.to_string(), "answered with status 500: lost");
    }

    #[test]
    fn a_small_piece_does_not_keep_the_buffer_that_it_was_read_into() {
        let mut buffer = BytesMut::zeroed(8 << 10);
        let piece = compact(buffer.split_to(300).freeze());
        assert_eq!(piece.len(), 300);
        buffer.clear();
        assert!(buffer.try_reclaim(8 << 10), "nothing else refers to the buffer");
        let large = Bytes::from(vec![0; SMALL_PIECE]);
        assert_eq!(compact(large.clone()).as_ptr(), large.as_ptr(), "without a copy");
    }
}
