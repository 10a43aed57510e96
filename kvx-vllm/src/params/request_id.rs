//! `X-Request-Id`, and what engines make of it.

use std::fmt;

use super::{ParamsError, uuid};

/// The name of the header.
pub const X_REQUEST_ID: &str = "X-Request-Id";

/// The value of `X-Request-Id`: both legs of a request carry the same one, and no other request in flight does.
///
/// vLLM makes the ids of its answers from it ([`completion`](Self::completion), [`chat`](Self::chat)). Its engine
/// works with the id of a prompt ([`prompt`](Self::prompt), or the chat's) and eight random hexadecimal digits, and
/// says so in `remote_request_id`: `cmpl-ccff4c65-0-bbb18847`.
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
    /// The longest that is taken: it comes back in every id and every heartbeat.
    pub const MAX_LEN: usize = 256;

    /// A new one, from 16 random bytes.
    pub fn from_random(random: [u8; 16]) -> Self {
        XRequestId(uuid::text(random))
    }

    /// One that a client has sent.
    ///
    /// # Errors
    ///
    /// Empty, longer than [`MAX_LEN`](Self::MAX_LEN), or with anything but visible ASCII: it could not travel in a
    /// header. With a comma: heartbeats list ids between commas, so the prefill side would never hear of this one and
    /// free its blocks when the first lease ends.
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
            format!("{X_REQUEST_ID} {why}; send another, or none to have one made"),
        ))
    }

    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id of a completion's answer.
    pub fn completion(&self) -> String {
        format!("cmpl-{self}")
    }

    /// The id of one prompt of a completion: its engine works with this and a random suffix.
    pub fn prompt(&self, index: usize) -> String {
        format!("cmpl-{self}-{index}")
    }

    /// The id of a chat completion's answer; its engine works with this and a random suffix.
    pub fn chat(&self) -> String {
        format!("chatcmpl-{self}")
    }
}

impl fmt::Display for XRequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
