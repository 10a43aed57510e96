//! The notifications between engines.

use kvx_core::{Error, ErrorKind, Result};

use super::PushRegistration;

const HEARTBEAT: &str = "HB:";
const REGISTRATION: &[u8] = b"PUSH_REG:";
const RELEASE: &str = "KVX_RELEASE:";
/// Stands in a release for a proof, which has one colon.
const NO_PROOF: &str = ":";

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
    /// The data of a request have moved. Created by [`done`](Self::done).
    #[non_exhaustive]
    Done {
        /// The request, by its id in the notified engine.
        request_id: String,
        /// Pull: the number of workers that read from the notified worker (vLLM 0.28 and older: the
        /// reader's tensor-parallel size). Push: the writer's tensor-parallel size.
        count: u32,
    },
    /// The sender still waits for these requests. Created by [`heartbeat`](Self::heartbeat).
    #[non_exhaustive]
    Heartbeat {
        /// The requests, by their ids in the notified engine.
        request_ids: Vec<String>,
    },
    /// Blocks for the receiver to write into.
    Registration(Box<PushRegistration>),
    /// No decode will fetch the blocks of a request. Only between routers and kvx engines: other
    /// engines get [`Done`](Self::Done). Created by [`release`](Self::release).
    #[non_exhaustive]
    Release {
        /// The request, by its id in the notified engine.
        request_id: String,
        /// The proof that the sender has the fleet's secret
        /// ([`ParamsTrust::sign_release`](crate::engine::ParamsTrust::sign_release)). Empty in a
        /// fleet without a secret.
        proof: String,
    },
}

impl EngineNotification {
    /// The longest notification that is read, in bytes.
    pub const MAX_LEN: usize = 9 + PushRegistration::MAX_LEN;
    /// The longest heartbeat that [`heartbeats`](Self::heartbeats) creates, in bytes: the limit of
    /// all kvx transports.
    pub const MAX_HEARTBEAT: usize = 64 << 10;

    /// Creates the notification that the data of a request have moved.
    ///
    /// # Errors
    ///
    /// A count of 0, which would never free the blocks; an id that would be read as another
    /// notification.
    pub fn done(request_id: impl Into<String>, count: u32) -> Result<Self> {
        let request_id = request_id.into();
        if count == 0 {
            return Err(invalid(&request_id, "the count is 0; the other side would wait forever"));
        }
        checked(&request_id)?;
        Ok(EngineNotification::Done { request_id, count })
    }

    /// Creates the notification that no decode will fetch the blocks of a request. The proof is
    /// empty in a fleet without a secret.
    ///
    /// # Errors
    ///
    /// An id that would be read as another notification.
    pub fn release(request_id: impl Into<String>, proof: impl Into<String>) -> Result<Self> {
        let request_id = request_id.into();
        checked(&request_id)?;
        Ok(EngineNotification::Release { request_id, proof: proof.into() })
    }

    /// Creates the notification that this engine still waits for these requests.
    ///
    /// # Errors
    ///
    /// No id; an id that is empty or has a comma, which separates ids.
    pub fn heartbeat<T: Into<String>>(request_ids: impl IntoIterator<Item = T>) -> Result<Self> {
        let request_ids: Vec<String> = request_ids.into_iter().map(Into::into).collect();
        if request_ids.is_empty() {
            return Err(ErrorKind::Invalid.because("a heartbeat needs at least one request id"));
        }
        match request_ids.iter().find(|id| id.is_empty() || id.contains(',')) {
            Some(id) => {
                Err(invalid(id, "it is empty or has a comma, which separates ids in heartbeats"))
            }
            None => Ok(EngineNotification::Heartbeat { request_ids }),
        }
    }

    /// Creates as many heartbeats of at most [`MAX_HEARTBEAT`](Self::MAX_HEARTBEAT) bytes as the
    /// ids need.
    ///
    /// # Errors
    ///
    /// As [`heartbeat`](Self::heartbeat), except that no ids give no notifications; an id that is
    /// too long for one.
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
                        "it is too long for a notification; only its first 64 characters are shown",
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

    /// Encodes the notification.
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
            EngineNotification::Release { request_id, proof } => {
                let proof = if proof.is_empty() { NO_PROOF } else { proof };
                format!("{RELEASE}{proof}:{request_id}").into_bytes()
            }
        }
    }

    /// Decodes a notification. Its request may have ended long ago.
    ///
    /// # Errors
    ///
    /// Any other bytes. vLLM's engine does not survive them; a kvx engine logs them and continues.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let malformed = |why: &str| {
            let shown = bytes[..bytes.len().min(64)].escape_ascii();
            ErrorKind::Malformed.because(format!("malformed notification: {why}: {shown}"))
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
        if let Some(release) = text.strip_prefix(RELEASE) {
            // The proof has one colon, and a request id may have some.
            let parts = release.splitn(3, ':').collect::<Vec<_>>();
            let [expires, mac, request_id] = parts[..] else {
                return Err(malformed("a release without a proof or a request"));
            };
            let proof = format!("{expires}:{mac}");
            let proof = if proof == NO_PROOF { String::new() } else { proof };
            return Self::release(request_id, proof).map_err(|_| malformed("no request id"));
        }
        let (request_id, count) =
            text.rsplit_once(':').ok_or_else(|| malformed("neither a request nor a heartbeat"))?;
        let count = match count.as_bytes() {
            [b'1'..=b'9', ..] => count.parse().ok(),
            _ => None,
        };
        let count = count.ok_or_else(|| malformed("no count after the last colon"))?;
        Self::done(request_id, count).map_err(|_| malformed("no request id"))
    }
}

fn checked(request_id: &str) -> Result<()> {
    if request_id.is_empty() {
        return Err(invalid(request_id, "it is empty"));
    }
    let starts = |with: &[u8]| request_id.as_bytes().starts_with(with);
    if starts(HEARTBEAT.as_bytes()) || starts(REGISTRATION) || starts(RELEASE.as_bytes()) {
        return Err(invalid(request_id, "it would be read as another notification"));
    }
    Ok(())
}

fn invalid(request_id: &str, why: &str) -> Error {
    ErrorKind::Invalid
        .because(format!("cannot send a notification for request id {request_id:?}: {why}"))
}
