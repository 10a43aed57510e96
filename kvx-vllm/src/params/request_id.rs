//! `X-Request-Id`, and the request ids that engines derive from it.

use std::fmt;

use super::{ParamsError, uuid};

/// The name of the header.
pub const X_REQUEST_ID: &str = "X-Request-Id";

/// The value of `X-Request-Id`. Both legs of a request carry the same one; no other request in
/// flight may.
///
/// vLLM derives the ids of its answers from it ([`completion`](Self::completion),
/// [`chat`](Self::chat)). Its engine appends eight random hexadecimal digits to the id of a prompt
/// ([`prompt`](Self::prompt), or the chat's) and returns the result in `remote_request_id`:
/// `cmpl-ccff4c65-0-bbb18847`.
///
/// ```
/// use kvx_vllm::params::XRequestId;
/// let id = XRequestId::new("ccff4c65").unwrap();
/// assert_eq!(id.completion(), "cmpl-ccff4c65");
/// assert_eq!(id.prompt(0), "cmpl-ccff4c65-0");
/// assert_eq!(id.chat(), "chatcmpl-ccff4c65");
/// assert!(XRequestId::new("a,b").is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct XRequestId(String);

impl XRequestId {
    /// The most bytes in a value: every id and every heartbeat contains it.
    pub const MAX_LEN: usize = 256;

    /// Creates a value from 16 random bytes.
    pub fn from_random(random: [u8; 16]) -> Self {
        XRequestId(uuid::text(random))
    }

    /// Checks a value that a client has sent.
    ///
    /// # Errors
    ///
    /// A value that is empty, longer than [`MAX_LEN`](Self::MAX_LEN), or has anything but visible
    /// ASCII, which a header cannot carry. A value with a comma: heartbeats separate ids with
    /// commas, so the prefill side would get no heartbeat for this request and free its blocks at
    /// the end of the first lease.
    pub fn new(text: impl Into<String>) -> Result<Self, ParamsError> {
        let text = text.into();
        let why = if text.is_empty() {
            "is empty"
        } else if text.len() > Self::MAX_LEN {
            "is longer than 256 bytes"
        } else if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            "has characters that a header cannot carry"
        } else if text.contains(',') {
            "has a comma, which separates ids in heartbeats"
        } else {
            return Ok(XRequestId(text));
        };
        Err(ParamsError::new(
            X_REQUEST_ID,
            format!("{X_REQUEST_ID} {why}; send another one, or omit it to have one generated"),
        ))
    }

    /// Returns the value as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the id of a completion's answer.
    pub fn completion(&self) -> String {
        format!("cmpl-{self}")
    }

    /// Returns the id of one prompt of a completion. The engine appends a random suffix to it.
    pub fn prompt(&self, index: usize) -> String {
        format!("cmpl-{self}-{index}")
    }

    /// Returns the id of a chat completion's answer. The engine appends a random suffix to it.
    pub fn chat(&self) -> String {
        format!("chatcmpl-{self}")
    }
}

impl fmt::Display for XRequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
