//! A client of the router: complete answers, streams event by event, and whether they ended
//! normally.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};

/// The timeout of every wait for a connection.
pub(crate) const CUT_OFF: Duration = Duration::from_secs(10);

/// A builder of a request.
pub(crate) struct Call {
    port: u16,
    request: hyper::http::request::Builder,
    body: Bytes,
    limit: Duration,
}

impl Call {
    pub(crate) fn new(port: u16, method: Method, path: &str) -> Self {
        let request =
            Request::builder().method(method).uri(path).header("host", format!("127.0.0.1:{port}"));
        Call { port, request, body: Bytes::new(), limit: CUT_OFF }
    }

    pub(crate) fn get(port: u16, path: &str) -> Self {
        Call::new(port, Method::GET, path)
    }

    pub(crate) fn post(port: u16, path: &str, body: &Value) -> Self {
        Call::new(port, Method::POST, path)
            .header("content-type", "application/json")
            .body(body.to_string())
    }

    pub(crate) fn header(mut self, name: &str, value: impl AsRef<str>) -> Self {
        self.request = self.request.header(name, value.as_ref());
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    pub(crate) fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sends the request, and returns once the headers of the answer have arrived.
    pub(crate) async fn try_open(self) -> Result<Open, String> {
        let Call { port, request, body, limit } = self;
        let opened = tokio::time::timeout(limit, async move {
            let stream = tokio::net::TcpStream::connect(("127.0.0.1", port))
                .await
                .map_err(|e| e.to_string())?;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream))
                    .await
                    .map_err(|e| e.to_string())?;
            let connection = Connection(tokio::spawn(async move { drop(connection.await) }));
            let request = request.body(Full::new(body)).map_err(|e| e.to_string())?;
            let response = sender.send_request(request).await.map_err(|e| e.to_string())?;
            let (parts, body) = response.into_parts();
            let status = parts.status.as_u16();
            Ok(Open {
                status,
                headers: parts.headers,
                body,
                _connection: connection,
                rest: Vec::new(),
                until: Instant::now() + limit,
            })
        });
        opened.await.map_err(|_| "no answer in time".to_owned())?
    }

    pub(crate) async fn open(self) -> Open {
        self.try_open().await.expect("the router answers")
    }

    /// Sends the request, and reads the whole stream.
    pub(crate) async fn stream(self) -> Streamed {
        self.open().await.read_out().await
    }

    pub(crate) async fn try_send(self) -> Result<Answer, String> {
        let mut open = self.try_open().await?;
        let mut body = Vec::new();
        while let Some(piece) = open.piece().await? {
            body.extend_from_slice(&piece);
        }
        let answer = Answer {
            status: open.status,
            headers: std::mem::take(&mut open.headers),
            body: body.into(),
        };
        if answer.status >= 400 {
            scan_error(&answer.headers, &answer.text());
        }
        Ok(answer)
    }

    /// Sends the request, and reads the whole answer.
    pub(crate) async fn send(self) -> Answer {
        self.try_send().await.expect("the router answers")
    }
}

/// Fails if a router's error names an instance, its host, its port or its engine. Instances that a
/// test asks directly do so.
fn scan_error(headers: &HeaderMap, error: &str) {
    if !headers.contains_key("x-request-id") {
        return;
    }
    for internal in ["127.0.0.1", "localhost", "://", "engine-"] {
        assert!(!error.contains(internal), "clients must not see {internal}: {error}");
    }
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {} {:?}", self.status, self.text()))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().expect("headers of tests are text"))
    }

    /// Returns the texts of a completion's choices.
    pub(crate) fn texts(&self) -> Vec<String> {
        let body = self.json();
        assert_eq!(self.status, 200, "{body}");
        let choices = body["choices"].as_array().unwrap_or_else(|| panic!("no choices: {body}"));
        let text = |choice: &Value| {
            choice["text"].as_str().or(choice["message"]["content"].as_str()).map(str::to_owned)
        };
        choices.iter().map(|choice| text(choice).expect("a choice has text")).collect()
    }
}

/// An answer whose body is being read. Dropping this closes its connection.
pub(crate) struct Open {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    _connection: Connection,
    rest: Vec<u8>,
    until: Instant,
}

impl Open {
    /// Returns the next piece of the body as it arrives, or `None` at its regular end.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>, String> {
        let left = self.until.saturating_duration_since(Instant::now());
        match tokio::time::timeout(left, self.body.frame()).await {
            Err(_) => Err("the body stopped: no piece in time".to_owned()),
            Ok(None) => Ok(None),
            Ok(Some(Ok(frame))) => Ok(frame.into_data().ok()),
            Ok(Some(Err(error))) => Err(format!("broken off: {error}")),
        }
    }

    /// Returns the next event of a stream.
    pub(crate) async fn event(&mut self) -> Result<Option<Event>, String> {
        loop {
            if let Some(end) = self.rest.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = self.rest.drain(..end + 2).collect();
                let text =
                    String::from_utf8(event).map_err(|_| "an event is no UTF-8".to_owned())?;
                let data: String = text
                    .lines()
                    .filter_map(|line| line.strip_prefix("data:"))
                    .map(str::trim)
                    .collect();
                if data == "[DONE]" {
                    return Ok(Some(Event::Done));
                }
                if data.is_empty() {
                    continue; // a comment
                }
                let value: Value =
                    serde_json::from_str(&data).map_err(|error| format!("{error}: {data}"))?;
                if !value["error"].is_null() {
                    scan_error(&self.headers, &data);
                }
                return Ok(Some(Event::Chunk(value)));
            }
            match self.piece().await? {
                Some(piece) => self.rest.extend_from_slice(&piece),
                None if self.rest.is_empty() => return Ok(None),
                None => {
                    return Err(format!(
                        "ended within an event: {:?}",
                        String::from_utf8_lossy(&self.rest)
                    ));
                }
            }
        }
    }

    /// Reads the stream to its end.
    pub(crate) async fn read_out(mut self) -> Streamed {
        let mut streamed = Streamed { status: self.status, ..Streamed::default() };
        loop {
            match self.event().await {
                Ok(Some(Event::Chunk(chunk))) if !chunk["error"].is_null() => {
                    streamed.error = Some(chunk)
                }
                Ok(Some(Event::Chunk(chunk))) => streamed.add(chunk),
                Ok(Some(Event::Done)) => streamed.done = true,
                Ok(None) => return streamed,
                Err(broken) => {
                    streamed.broken = Some(broken);
                    return streamed;
                }
            }
        }
    }
}

/// A connection, which is closed when this is dropped.
struct Connection(tokio::task::JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An event of a stream.
#[derive(Debug)]
pub(crate) enum Event {
    Chunk(Value),
    Done,
}

/// A stream that has been read to its end.
#[derive(Debug, Default)]
pub(crate) struct Streamed {
    pub(crate) status: u16,
    /// The text of the first choice.
    pub(crate) text: String,
    pub(crate) chunks: Vec<Value>,
    pub(crate) done: bool,
    pub(crate) error: Option<Value>,
    /// The error of its connection, if it broke.
    pub(crate) broken: Option<String>,
    /// The time at which its first chunk had arrived, by the clock of all processes.
    pub(crate) begun: Option<Duration>,
}

impl Streamed {
    fn add(&mut self, chunk: Value) {
        self.begun.get_or_insert_with(kvx_instance::now);
        let choice = &chunk["choices"][0];
        if choice["index"] == 0 {
            self.text +=
                choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or("");
        }
        self.chunks.push(chunk);
    }

    /// Returns true if a single server would have streamed the same.
    pub(crate) fn is_whole(&self) -> bool {
        self.status == 200 && self.done && self.error.is_none() && self.broken.is_none()
    }
}

/// Returns the body of a completion.
pub(crate) fn completion(prompt: &str, tokens: u64) -> Value {
    json!({"model": "m", "prompt": prompt, "max_tokens": tokens})
}

/// Returns the body of a streamed completion.
pub(crate) fn streamed(prompt: &str, tokens: u64) -> Value {
    let mut body = completion(prompt, tokens);
    body["stream"] = true.into();
    body
}

/// Returns a prompt of about `tokens` tokens, which no other test uses.
pub(crate) fn prompt(name: &str, tokens: usize) -> String {
    let mut prompt = format!("{name}:");
    while prompt.len() < tokens * 4 {
        prompt.push_str(" lorem ipsum");
    }
    prompt.truncate(tokens * 4);
    prompt
}
