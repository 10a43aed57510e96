//! The error type: a kind that a program branches on, and a message that a person can act on.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::report::Report;

/// The result of a kvx call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error, for a program to branch on. More kinds may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is wrong; the message names it.
    Invalid,
    /// Blocks, a grid or a range lie outside their region.
    OutOfBounds,
    /// Two destinations of one plan overlap.
    Overlap,
    /// The agent has no region of this number or name.
    Unregistered,
    /// The key of an operation is not the key of the region.
    WrongKey,
    /// The region was revoked: its owner has taken the memory back.
    Revoked,
    /// Remote access to the region could not be ended by the deadline; its memory stays
    /// quarantined.
    StillShared,
    /// The deadline passed first. The data of a transfer with a notification may have arrived: see
    /// [`Error::report`](crate::Error::report).
    TimedOut,
    /// The operation was cancelled, by `cancel` or because its handle was dropped.
    Cancelled,
    /// The budget of transfers in flight is used up; try again, or use `post_wait`.
    Busy,
    /// The peer has died, was silent for longer than `peer_timeout`, or never answered.
    /// [`Peer::ready`](crate::Peer::ready) tells these cases apart. A restarted peer is reported as
    /// lost too if nothing listens at its old address.
    PeerLost,
    /// Another incarnation answers under the peer's name; connect with its new metadata.
    PeerRestarted,
    /// The two sides have no version of a protocol in common.
    Incompatible,
    /// Authentication failed, or only one side has a shared secret.
    Authentication,
    /// The operation is not permitted: read-only memory, a file that is not safe to map, a host
    /// that is not allowed.
    PermissionDenied,
    /// No backend can serve this peer and memory; the message gives the reason for each backend.
    NoRoute,
    /// No backend has this name.
    UnknownBackend,
    /// The backend exists but was not compiled in.
    NotCompiled,
    /// The backend is compiled in but cannot run on this machine.
    Unavailable,
    /// The backend does not support this operation.
    Unsupported,
    /// A limit of the operating system or a queue was reached.
    Exhausted,
    /// Bytes from a peer are malformed, truncated or too large.
    Malformed,
    /// The agent has been shut down.
    Closed,
    /// The call was made in a child process after `fork`.
    Forked,
    /// A transport lost the ticket of a transfer, so the transfer's memory is quarantined.
    Forgotten,
    /// The operating system or a native library reported an error; see its code, text and source.
    Native,
}

impl ErrorKind {
    /// Every kind of this release.
    pub const ALL: &[ErrorKind] = &[
        ErrorKind::Invalid,
        ErrorKind::OutOfBounds,
        ErrorKind::Overlap,
        ErrorKind::Unregistered,
        ErrorKind::WrongKey,
        ErrorKind::Revoked,
        ErrorKind::StillShared,
        ErrorKind::TimedOut,
        ErrorKind::Cancelled,
        ErrorKind::Busy,
        ErrorKind::PeerLost,
        ErrorKind::PeerRestarted,
        ErrorKind::Incompatible,
        ErrorKind::Authentication,
        ErrorKind::PermissionDenied,
        ErrorKind::NoRoute,
        ErrorKind::UnknownBackend,
        ErrorKind::NotCompiled,
        ErrorKind::Unavailable,
        ErrorKind::Unsupported,
        ErrorKind::Exhausted,
        ErrorKind::Malformed,
        ErrorKind::Closed,
        ErrorKind::Forked,
        ErrorKind::Forgotten,
        ErrorKind::Native,
    ];

    /// Returns the kind as a short identifier, unique to the kind. Metrics use it as a label,
    /// except that they count [`Authentication`](Self::Authentication) and
    /// [`PermissionDenied`](Self::PermissionDenied) both as `denied`.
    pub fn as_str(self) -> &'static str {
        match self {
            ErrorKind::Invalid => "invalid",
            ErrorKind::OutOfBounds => "out_of_bounds",
            ErrorKind::Overlap => "overlap",
            ErrorKind::Unregistered => "unregistered",
            ErrorKind::WrongKey => "wrong_key",
            ErrorKind::Revoked => "revoked",
            ErrorKind::StillShared => "still_shared",
            ErrorKind::TimedOut => "timed_out",
            ErrorKind::Cancelled => "cancelled",
            ErrorKind::Busy => "busy",
            ErrorKind::PeerLost => "peer_lost",
            ErrorKind::PeerRestarted => "peer_restarted",
            ErrorKind::Incompatible => "incompatible",
            ErrorKind::Authentication => "authentication",
            ErrorKind::PermissionDenied => "permission_denied",
            ErrorKind::NoRoute => "no_route",
            ErrorKind::UnknownBackend => "unknown_backend",
            ErrorKind::NotCompiled => "not_compiled",
            ErrorKind::Unavailable => "unavailable",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::Exhausted => "exhausted",
            ErrorKind::Malformed => "malformed",
            ErrorKind::Closed => "closed",
            ErrorKind::Forked => "forked",
            ErrorKind::Forgotten => "forgotten",
            ErrorKind::Native => "native",
        }
    }

    /// Creates an error of this kind; `sentence` says what happened and what to do next.
    ///
    /// This is [`Error::new`] for code that names the kind: `ErrorKind::Closed.because("…")`.
    pub fn because(self, sentence: impl Into<Cow<'static, str>>) -> Error {
        Error::new(self, sentence)
    }
}

/// An error: its [`ErrorKind`], a message that says what to do next, and the operation, peer,
/// backend and native error where known.
///
/// Cheap to clone, so that the failure of a link can be the result of every transfer on it.
///
/// ```
/// # use kvx_core as kvx;
/// use kvx::{Error, ErrorKind};
/// let error = Error::new(ErrorKind::TimedOut, "no answer within 2 s; raise the deadline or check the peer")
///     .with_backend("TCP")
///     .with_peer("prefill-0");
/// assert_eq!(error.kind(), ErrorKind::TimedOut);
/// assert_eq!(
///     error.to_string(),
///     "no answer within 2 s; raise the deadline or check the peer (peer prefill-0, backend TCP)"
/// );
/// ```
#[derive(Clone)]
pub struct Error(Box<Detail>);

#[derive(Clone)]
struct Detail {
    kind: ErrorKind,
    sentence: Cow<'static, str>,
    operation: Option<Cow<'static, str>>,
    backend: Option<Cow<'static, str>>,
    peer: Option<Arc<str>>,
    native: Option<Native>,
    report: Option<Report>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// The error of a native library or of the operating system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Native {
    /// The native code: an errno, a `ucs_status_t`, an `fi_errno`, …
    pub code: i64,
    /// The native text for the code.
    pub text: String,
}

impl Error {
    /// Creates an error of `kind`; `sentence` says what happened and what to do next.
    /// [`ErrorKind::because`] does the same, and is shorter if the kind is a constant.
    pub fn new(kind: ErrorKind, sentence: impl Into<Cow<'static, str>>) -> Self {
        Error(Box::new(Detail {
            kind,
            sentence: sentence.into(),
            operation: None,
            backend: None,
            peer: None,
            native: None,
            report: None,
            source: None,
        }))
    }

    /// Creates an error of the operating system from `sentence`, with the code and text of `error`,
    /// and `error` as the source.
    pub fn os(sentence: impl Into<Cow<'static, str>>, error: impl Into<std::io::Error>) -> Self {
        let error = error.into();
        let native = error.raw_os_error().map(|code| (i64::from(code), error.to_string()));
        let mut this = ErrorKind::Native.because(sentence);
        if let Some((code, text)) = native {
            this = this.with_native(code, text);
        }
        this.with_source(error)
    }

    /// Replaces the kind.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// Names the operation that failed, unless one is already named.
    #[must_use]
    pub fn with_operation(mut self, operation: impl Into<Cow<'static, str>>) -> Self {
        self.0.operation.get_or_insert(operation.into());
        self
    }

    /// Names the backend, unless one is already named.
    #[must_use]
    pub fn with_backend(mut self, backend: impl Into<Cow<'static, str>>) -> Self {
        self.0.backend.get_or_insert(backend.into());
        self
    }

    /// Names the peer, unless one is already named.
    #[must_use]
    pub fn with_peer(mut self, peer: impl Into<Arc<str>>) -> Self {
        self.0.peer.get_or_insert(peer.into());
        self
    }

    /// Adds the code and text of the native error.
    #[must_use]
    pub fn with_native(mut self, code: i64, text: impl Into<String>) -> Self {
        self.0.native = Some(Native { code, text: text.into() });
        self
    }

    /// Adds the error that caused this one.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Adds the report of a transfer whose data had arrived before the error.
    #[must_use]
    pub(crate) fn with_report(mut self, report: Option<Report>) -> Self {
        self.0.report = report;
        self
    }

    /// Returns the report of a transfer whose data arrived even though it failed: only its
    /// notification was not acknowledged before this error.
    ///
    /// The peer may still receive the notification, and may then reuse its blocks. So use the data
    /// that has arrived, and do not read those blocks again.
    pub fn report(&self) -> Option<&Report> {
        self.0.report.as_ref()
    }

    /// Returns the kind, to branch on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns true if the same operation may succeed later: a limit was reached, a deadline
    /// passed, or the peer does not answer now. After `PeerLost`, connect to the peer again first.
    ///
    /// ```
    /// # use kvx_core as kvx;
    /// use kvx::{Error, ErrorKind};
    /// assert!(Error::new(ErrorKind::Busy, "too many transfers in flight").is_retryable());
    /// assert!(!Error::new(ErrorKind::WrongKey, "the region was registered anew").is_retryable());
    /// ```
    pub fn is_retryable(&self) -> bool {
        matches!(
            self.0.kind,
            ErrorKind::TimedOut | ErrorKind::Busy | ErrorKind::Exhausted | ErrorKind::PeerLost
        )
    }

    /// Returns the message alone, without the context that `Display` adds.
    pub fn sentence(&self) -> &str {
        &self.0.sentence
    }

    /// Returns the operation that failed, if known.
    pub fn operation(&self) -> Option<&str> {
        self.0.operation.as_deref()
    }

    /// Returns the backend that the operation failed on, if one was chosen.
    pub fn backend(&self) -> Option<&str> {
        self.0.backend.as_deref()
    }

    /// Returns the name of the peer that the error concerns, if known.
    pub fn peer(&self) -> Option<&str> {
        self.0.peer.as_deref()
    }

    /// Returns the error of the native library or of the operating system.
    pub fn native(&self) -> Option<&Native> {
        self.0.native.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail = &*self.0;
        f.write_str(&detail.sentence)?;
        let mut open = false;
        let mut part = |f: &mut fmt::Formatter<'_>, text: fmt::Arguments<'_>| {
            let lead = if std::mem::replace(&mut open, true) { ", " } else { " (" };
            write!(f, "{lead}{text}")
        };
        if let Some(operation) = &detail.operation {
            part(f, format_args!("in {operation}"))?;
        }
        if let Some(peer) = &detail.peer {
            part(f, format_args!("peer {peer}"))?;
        }
        if let Some(backend) = &detail.backend {
            part(f, format_args!("backend {backend}"))?;
        }
        if let Some(native) = &detail.native {
            part(f, format_args!("code {}: {}", native.code, native.text))?;
        }
        if detail.report.is_some() {
            part(f, format_args!("the data has arrived, the notification is not acknowledged"))?;
        }
        if open { f.write_str(")") } else { Ok(()) }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| &**source as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_name_of_its_own() {
        let mut words: Vec<_> = ErrorKind::ALL.iter().map(|kind| kind.as_str()).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), ErrorKind::ALL.len());
    }

    #[test]
    fn an_error_names_all_it_knows_and_nothing_else() {
        let bare = ErrorKind::Busy.because("too many transfers in flight");
        assert_eq!(bare.to_string(), "too many transfers in flight");
        let full = bare
            .with_operation("post")
            .with_backend("SHM")
            .with_peer("p0")
            .with_native(11, "EAGAIN");
        assert_eq!(
            full.to_string(),
            "too many transfers in flight (in post, peer p0, backend SHM, code 11: EAGAIN)"
        );
    }

    #[test]
    fn the_first_named_backend_stays() {
        let error = ErrorKind::Native.because("refused").with_backend("TCP").with_backend("SHM");
        assert_eq!(error.backend(), Some("TCP"));
    }

    #[test]
    fn an_os_error_keeps_code_and_source() {
        let error = Error::os("bind failed", std::io::Error::from_raw_os_error(98));
        assert_eq!(error.native().map(|native| native.code), Some(98));
        assert!(std::error::Error::source(&error).is_some());
    }
}
