//! A client of the demo's servers.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Result;

/// The timeout of an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A streamed answer.
#[derive(Debug, Default)]
pub(super) struct StreamedAnswer {
    pub(super) tokens: Vec<u64>,
    pub(super) text: String,
    /// The time until the first token.
    pub(super) first: Duration,
    pub(super) prompt_tokens: u64,
    /// The number of prompt tokens that were cached or transferred.
    pub(super) not_computed: u64,
}

/// Requests an answer of `count` tokens to a prompt, and reads its stream. Calls `tell` with each
/// piece of its text. The tokens are chosen at random with a fixed seed: small models repeat
/// themselves if each token is the likeliest one.
pub(super) fn stream(
    port: u16,
    prompt: &Value,
    count: usize,
    mut tell: impl FnMut(&str) -> Result<()>,
) -> Result<StreamedAnswer> {
    let body = json!({"prompt": prompt, "max_tokens": count, "temperature": 0.5, "seed": 1,
                      "ignore_eos": true,
                      "return_token_ids": true, "stream": true,
                      "stream_options": {"include_usage": true}});
    let begun = Instant::now();
    let (status, mut answer) = send(port, "/v1/completions", Some(&body))?;
    let mut streamed = StreamedAnswer::default();
    let mut line = String::new();
    if status != 200 {
        answer.read_to_string(&mut line).map_err(late)?;
        return Err(format!("HTTP {status}: {}", line.trim()).into());
    }
    // Sizes of chunks are on separate lines.
    while answer.read_line(&mut line).map_err(late)? > 0 {
        if let Some(event) =
            line.strip_prefix("data: ").map(str::trim).filter(|event| *event != "[DONE]")
        {
            let event: Value = serde_json::from_str(event)?;
            if !event["error"].is_null() {
                return Err(format!("an error event: {}", event["error"]["message"]).into());
            }
            if let Some(tokens) = event["choices"][0]["token_ids"].as_array() {
                if streamed.tokens.is_empty() {
                    streamed.first = begun.elapsed();
                }
                streamed.tokens.extend(tokens.iter().filter_map(Value::as_u64));
            }
            if let Some(text) = event["choices"][0]["text"].as_str() {
                streamed.text.push_str(text);
                tell(text)?;
            }
            if let Some(prompt) = event["usage"]["prompt_tokens"].as_u64() {
                streamed.prompt_tokens = prompt;
                streamed.not_computed = event["usage"]["prompt_tokens_details"]["cached_tokens"]
                    .as_u64()
                    .unwrap_or_default();
            }
        }
        line.clear();
    }
    Ok(streamed)
}

/// Sends a request. Returns the status, and the rest of the answer.
pub(super) fn send(
    port: u16,
    path: &str,
    body: Option<&Value>,
) -> Result<(u16, BufReader<TcpStream>)> {
    let mut connection = TcpStream::connect(("127.0.0.1", port))?;
    connection.set_read_timeout(Some(PATIENCE))?;
    let method = if body.is_some() { "POST" } else { "GET" };
    let body = body.map(Value::to_string).unwrap_or_default();
    write!(
        connection,
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = BufReader::new(connection);
    let mut line = String::new();
    answer.read_line(&mut line).map_err(late)?;
    let status = line.split_whitespace().nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or("the server closed the connection")?;
    while line.trim_end() != "" {
        line.clear();
        answer.read_line(&mut line).map_err(late)?;
    }
    Ok((status, answer))
}

/// Describes a read timeout, which the system reports as a call that would block.
fn late(error: std::io::Error) -> Box<dyn std::error::Error> {
    match error.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            format!("a server did not answer within {PATIENCE:?}").into()
        }
        _ => error.into(),
    }
}

/// A server's metrics.
#[derive(Default)]
pub(super) struct Metrics(String);

impl Metrics {
    pub(super) fn of(port: u16) -> Result<Self> {
        let (_, mut answer) = send(port, "/metrics", None)?;
        let mut text = String::new();
        answer.read_to_string(&mut text).map_err(late)?;
        Ok(Metrics(text))
    }

    /// Returns the sum of a metric over its labels.
    pub(super) fn sum(&self, name: &str) -> f64 {
        self.each(name).map(|(_, value)| value).sum()
    }

    /// Returns the values of a metric with their labels.
    pub(super) fn each<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
        self.0.lines().filter_map(move |line| {
            let (labels, value) = line.strip_prefix(name)?.rsplit_once(' ')?;
            let of_it = labels.is_empty() || labels.starts_with('{');
            of_it.then_some((labels, value.parse().ok()?))
        })
    }
}
