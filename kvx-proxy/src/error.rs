//! The error type of this crate.

use std::fmt;

/// An invalid configuration, or a socket or file that cannot be opened. Its message says what to
/// do.
///
/// ```
/// let error = kvx_proxy::Setup::from_toml("prot = 8000").unwrap_err();
/// assert!(error.to_string().contains("prot"));
/// ```
#[derive(Debug)]
pub struct Error {
    sentence: String,
    source: Option<std::io::Error>,
}

/// The result type of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(sentence: impl Into<String>) -> Self {
        Error { sentence: sentence.into(), source: None }
    }

    pub(crate) fn io(doing: impl fmt::Display, source: std::io::Error) -> Self {
        Error { sentence: format!("{doing}: {source}"), source: Some(source) }
    }
}

impl From<String> for Error {
    /// Wraps a caller's message about a configuration that it could not build.
    fn from(sentence: String) -> Self {
        Error::new(sentence)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
