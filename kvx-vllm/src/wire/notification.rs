//! What engines tell each other beside the data.

use kvx_core::{Error, ErrorKind, Result};

use super::PushRegistration;

const HEARTBEAT: &str = "HB:";
const REGISTRATION: &[u8] = b"PUSH_REG:";

/// A notification between two engines.
///
/// ```
/// use kvx_vllm::wire::EngineNotification;
/// let done = EngineNotification::done("cmpl-u-0-bbb18847", 2)?;
/// assert_eq!(done.encode(), b"cmpl-u-0-bbb18847:2");
/// assert_eq!(EngineNotification::decode(b"HB:one,two")?, EngineNotification::heartbeat(["one", "two"])?);
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineNotification {
    /// The data of a request have moved. Made by [`done`](Self::done).
    #[non_exhaustive]
    Done {
        /// The request, by the id of the engine that is told.
        request_id: String,
        /// Pull: how many workers read from the worker that is told (vLLM 0.28 and older: the reader's tensor
        /// parallel size). Push: the writer's tensor parallel size.
        count: u32,
    },
    /// These requests are still waited for. Made by [`heartbeat`](Self::heartbeat).
    #[non_exhaustive]
    Heartbeat {
        /// The requests, by the ids of the engine that is told.
        request_ids: Vec<String>,
    },
    /// Blocks to write into.
    Registration(Box<PushRegistration>),
}

impl EngineNotification {
    /// The longest that is read.
    pub const MAX_LEN: usize = 9 + PushRegistration::MAX_LEN;
    /// The longest heartbeat that [`heartbeats`](Self::heartbeats) makes: what every kvx transport carries.
    pub const MAX_HEARTBEAT: usize = 64 << 10;

    /// The data of a request have moved.
    ///
    /// # Errors
    ///
    /// A count of 0, which frees nothing ever; an id that would be read as another notification.
    pub fn done(request_id: impl Into<String>, count: u32) -> Result<Self> {
        let request_id = request_id.into();
        if count == 0 {
            return Err(invalid(&request_id, "the count is 0; the other side would wait for ever"));
        }
        checked(&request_id)?;
        Ok(EngineNotification::Done { request_id, count })
    }

    /// These requests are still waited for.
    ///
    /// # Errors
    ///
    /// No id; an id that is empty or has a comma, which separates them.
    pub fn heartbeat<T: Into<String>>(request_ids: impl IntoIterator<Item = T>) -> Result<Self> {
        let request_ids: Vec<String> = request_ids.into_iter().map(Into::into).collect();
        if request_ids.is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "a heartbeat without request ids says nothing",
            ));
        }
        match request_ids.iter().find(|id| id.is_empty() || id.contains(',')) {
            Some(id) => {
                Err(invalid(id, "it is empty or has a comma, which separates ids in heartbeats"))
            }
            None => Ok(EngineNotification::Heartbeat { request_ids }),
        }
    }

    /// As [`heartbeat`](Self::heartbeat), in as many notifications of at most [`MAX_HEARTBEAT`](Self::MAX_HEARTBEAT)
    /// bytes as it takes.
    ///
    /// # Errors
    ///
    /// As [`heartbeat`](Self::heartbeat), but no ids make no notifications; an id that is too long for one.
    pub fn heartbeats<T: Into<String>>(
        request_ids: impl IntoIterator<Item = T>,
    ) -> Result<Vec<Self>> {
        let mut beats: Vec<Vec<String>> = Vec::new();
        let mut len = usize::MAX;
        for id in request_ids {
            let id = id.into();
            len = len.saturating_add(1 + id.len());
            if len > Self::MAX_HEARTBEAT {
                len = HEARTBEAT.len() + id.len();
                if len > Self::MAX_HEARTBEAT {
                    let start: String = id.chars().take(64).collect();
                    return Err(invalid(
                        &start,
                        "it starts like this and is longer than a notification",
                    ));
                }
                beats.push(Vec::new());
            }
            if let Some(beat) = beats.last_mut() {
                beat.push(id);
            }
        }
        beats.into_iter().map(Self::heartbeat).collect()
    }

    /// The notification as bytes.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            EngineNotification::Done { request_id, count } => {
                format!("{request_id}:{count}").into_bytes()
            }
            EngineNotification::Heartbeat { request_ids } => {
                format!("{HEARTBEAT}{}", request_ids.join(",")).into_bytes()
            }
            EngineNotification::Registration(registration) => {
                [REGISTRATION, &registration.encode()].concat()
            }
        }
    }

    /// Reads a notification. What it says of a request need not be true: the request may be long gone.
    ///
    /// # Errors
    ///
    /// Anything else. vLLM's engine does not survive it; a kvx engine logs it and goes on.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let malformed = |why: &str| {
            let shown = bytes[..bytes.len().min(64)].escape_ascii();
            Error::new(ErrorKind::Malformed, format!("malformed notification: {why}: {shown}"))
        };
        if bytes.len() > Self::MAX_LEN {
            return Err(malformed("it is too long"));
        }
        if let Some(map) = bytes.strip_prefix(REGISTRATION) {
            return Ok(EngineNotification::Registration(Box::new(PushRegistration::decode(map)?)));
        }
        let text = std::str::from_utf8(bytes).map_err(|_| malformed("it is not UTF-8"))?;
        if let Some(ids) = text.strip_prefix(HEARTBEAT) {
            return Self::heartbeat(ids.split(','))
                .map_err(|_| malformed("a heartbeat with an empty id"));
        }
        let (request_id, count) =
            text.rsplit_once(':').ok_or_else(|| malformed("neither a request nor a heartbeat"))?;
        let count = match count.as_bytes() {
            [b'1'..=b'9', ..] => count.parse().ok(),
            _ => None,
        };
        let count = count.ok_or_else(|| malformed("no count behind the last colon"))?;
        Self::done(request_id, count).map_err(|_| malformed("no request id"))
    }
}

fn checked(request_id: &str) -> Result<()> {
    if request_id.is_empty() {
        return Err(invalid(request_id, "it is empty"));
    }
    if request_id.starts_with(HEARTBEAT) || request_id.as_bytes().starts_with(REGISTRATION) {
        return Err(invalid(request_id, "it would be read as another notification"));
    }
    Ok(())
}

fn invalid(request_id: &str, why: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("request id {request_id:?} cannot be notified of: {why}"),
    )
}
