//! The part of HTTP/1.1 that a bootstrap server and its clients need: requests and answers whose
//! bodies have a length. Heads and bodies are bounded before memory is allocated for them.
//! `httparse` parses heads.

use kvx_core::{Error, ErrorKind, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The maximum length of a head.
pub(in super::super) const MAX_HEAD: usize = 8 << 10;
/// The maximum number of headers.
const MAX_HEADERS: usize = 64;
/// The number of bytes read at once.
const READ: usize = 4 << 10;

/// A request or an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HttpMessage {
    /// The three parts of the first line: `GET /query HTTP/1.1` or `HTTP/1.1 200 OK`.
    pub(super) start: [String; 3],
    /// The headers, with names in lower case.
    headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
}

/// The head of a message, and the length of its body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HttpHead {
    message: HttpMessage,
    body: Option<usize>,
    /// The length of the head.
    len: usize,
}

/// Returns the length of the head at the front of these bytes. The inner `None` means that it is
/// incomplete, the outer one that it is not a head.
pub(in super::super) fn head_len(bytes: &[u8]) -> Option<Option<usize>> {
    HttpHead::parse(bytes).ok().map(|head| head.map(|head| head.len))
}

fn malformed(why: &str) -> Error {
    ErrorKind::Malformed.because(format!("malformed HTTP: {why}"))
}

fn broken(error: std::io::Error) -> Error {
    Error::os("an HTTP connection broke", error).with_kind(ErrorKind::PeerLost)
}

impl HttpHead {
    /// Parses a head at the front of these bytes. Returns `None` if it is incomplete.
    ///
    /// Errors: `Malformed`; `Unsupported`: a chunked body.
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<HttpHead>> {
        const ANSWER: &[u8] = b"HTTP/";
        let head = &bytes[..bytes.len().min(MAX_HEAD)];
        if head.starts_with(b"\r") || head.starts_with(b"\n") {
            return Err(malformed("the first line is empty"));
        }
        if ANSWER.starts_with(head) {
            return Ok(None); // too short to tell requests from answers
        }
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let (status, start) = if head.starts_with(ANSWER) {
            let mut answer = httparse::Response::new(&mut headers);
            let status = answer.parse(head);
            let code = answer.code.unwrap_or_default().to_string();
            let reason = answer.reason.unwrap_or_default().to_owned();
            (status, [version(answer.version), code, reason])
        } else {
            let mut request = httparse::Request::new(&mut headers);
            let status = request.parse(head);
            let text = |part: Option<&str>| part.unwrap_or_default().to_owned();
            (status, [text(request.method), text(request.path), version(request.version)])
        };
        let refused = |error| match error {
            httparse::Error::HeaderName | httparse::Error::HeaderValue => {
                malformed("a header has no colon, or is not text")
            }
            httparse::Error::TooManyHeaders => malformed("a head has too many headers"),
            _ => malformed("the first line is not one of HTTP/1"),
        };
        let len = match status.map_err(refused)? {
            httparse::Status::Complete(len) => len,
            httparse::Status::Partial if bytes.len() < MAX_HEAD => return Ok(None),
            httparse::Status::Partial => {
                return Err(malformed(&format!("a head has more than {MAX_HEAD} bytes")));
            }
        };
        let header = |header: &httparse::Header<'_>| {
            let value =
                std::str::from_utf8(header.value).map_err(|_| malformed("a header is not text"))?;
            Ok((header.name.to_ascii_lowercase(), value.trim().to_owned()))
        };
        let named = headers.iter().take_while(|header| !header.name.is_empty());
        let headers = named.map(header).collect::<Result<Vec<_>>>()?;
        let message = HttpMessage { start, headers, body: Vec::new() };
        let body = message.body_len()?;
        Ok(Some(HttpHead { message, body, len }))
    }
}

fn version(minor: Option<u8>) -> String {
    format!("HTTP/1.{}", minor.unwrap_or_default())
}

impl HttpMessage {
    /// Returns the length of the body, if a header names it.
    fn body_len(&self) -> Result<Option<usize>> {
        if self.header("transfer-encoding").is_some() {
            return Err(ErrorKind::Unsupported
                .because("chunked HTTP bodies are not supported: send the body with its length"));
        }
        let mut lengths = self.headers.iter().filter(|(name, _)| name == "content-length");
        let digits =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        match (lengths.next(), lengths.next()) {
            (None, _) => Ok(None),
            (Some((_, length)), None) if digits(length) => {
                length.parse().map(Some).map_err(|_| malformed("content-length is too large"))
            }
            _ => Err(malformed("content-length is not a number, or occurs twice")),
        }
    }

    /// Returns a header, by its name in lower case.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Returns whether the other end keeps the connection open.
    pub(super) fn keeps_alive(&self) -> bool {
        let asked = self.header("connection").unwrap_or_default();
        match self.start.iter().any(|word| word == "HTTP/1.0") {
            true => asked.eq_ignore_ascii_case("keep-alive"),
            false => !asked.eq_ignore_ascii_case("close"),
        }
    }
}

/// A connection that carries messages one after the other.
#[derive(Debug)]
pub(super) struct Exchange {
    stream: TcpStream,
    unread: Vec<u8>,
}

impl Exchange {
    pub(super) fn new(stream: TcpStream) -> Self {
        Exchange { stream, unread: Vec::new() }
    }

    /// Receives the next message, with a body of at most `most` bytes. `None`: the other end has
    /// closed the connection before it. Without a length, an answer ends with the connection, and a
    /// request has no body.
    ///
    /// Errors: `Exhausted`: the body is longer; `Malformed`, `Unsupported`, `PeerLost`.
    pub(super) async fn receive(&mut self, most: usize) -> Result<Option<HttpMessage>> {
        let head = loop {
            if let Some(head) = HttpHead::parse(&self.unread)? {
                break head;
            }
            if self.fill().await? == 0 {
                return if self.unread.is_empty() {
                    Ok(None)
                } else {
                    Err(malformed("the connection ended within a head"))
                };
            }
        };
        let HttpHead { mut message, body, len } = head;
        self.unread.drain(..len);
        let too_long =
            || ErrorKind::Exhausted.because(format!("an HTTP body has more than {most} bytes"));
        let is_answer = message.start[0].starts_with("HTTP/");
        match body {
            Some(length) if length > most => return Err(too_long()),
            Some(length) => {
                while self.unread.len() < length {
                    if self.fill().await? == 0 {
                        return Err(
                            ErrorKind::PeerLost.because("an HTTP connection ended within a body")
                        );
                    }
                }
                message.body = self.unread.drain(..length).collect();
            }
            None if is_answer => {
                while self.fill().await? > 0 {
                    if self.unread.len() > most {
                        return Err(too_long());
                    }
                }
                message.body = std::mem::take(&mut self.unread);
            }
            None => {}
        }
        Ok(Some(message))
    }

    async fn fill(&mut self) -> Result<usize> {
        self.unread.reserve(READ);
        self.stream.read_buf(&mut self.unread).await.map_err(broken)
    }

    /// Sends a message. `start` is its first line, and each of `headers` a line without its end.
    pub(super) async fn send(&mut self, start: &str, headers: &[&str], body: &[u8]) -> Result<()> {
        let mut out = format!(
            "{start}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
        for header in headers {
            out.push_str(header);
            out.push_str("\r\n");
        }
        out.push_str("\r\n");
        let mut out = out.into_bytes();
        out.extend_from_slice(body);
        self.stream.write_all(&out).await.map_err(broken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Option<HttpHead>> {
        HttpHead::parse(text.as_bytes())
    }

    #[test]
    fn heads_of_requests_and_answers_are_read() {
        let text = "POST /register HTTP/1.1\r\nHost: a:1\r\ncontent-LENGTH: 12\r\nConnection: close\r\n\r\n{\"a\"";
        let head = parsed(text).unwrap().unwrap();
        assert_eq!((head.body, head.len), (Some(12), text.len() - 4));
        assert_eq!(head.message.start, ["POST", "/register", "HTTP/1.1"]);
        assert_eq!((head.message.header("host"), head.message.keeps_alive()), (Some("a:1"), false));
        let head = parsed("HTTP/1.1 404 Not Found\r\n\r\n").unwrap().unwrap();
        assert_eq!(
            (head.message.start, head.body),
            (["HTTP/1.1", "404", "Not Found"].map(String::from), None)
        );
        for part in 0..text.len() - 5 {
            assert_eq!(parsed(&text[..part]).unwrap(), None, "{part}");
        }
    }

    #[test]
    fn malformed_heads_are_refused_and_memory_is_bounded() {
        for bad in [
            "GET /\r\n\r\n",
            "\r\n\r\n",
            "hello there general\r\n\r\n",
            "GET / HTTP/1.1\r\nno colon\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        ] {
            assert_eq!(parsed(bad).unwrap_err().kind(), ErrorKind::Malformed, "{bad:?}");
        }
        let chunked = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(parsed(chunked).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(HttpHead::parse(&[b'a'; MAX_HEAD]).unwrap_err().kind(), ErrorKind::Malformed);
        assert_eq!(HttpHead::parse(&[0xff; 100]).unwrap_err().kind(), ErrorKind::Malformed);
        let many = "a: b\r\n".repeat(MAX_HEADERS + 1);
        let many = format!("GET / HTTP/1.1\r\n{many}\r\n");
        assert_eq!(parsed(&many).unwrap_err().kind(), ErrorKind::Malformed);
        let long = format!("GET / HTTP/1.1\r\na: {}\r\n\r\n", "b".repeat(MAX_HEAD));
        assert_eq!(parsed(&long).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
