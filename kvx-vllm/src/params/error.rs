//! The error of invalid parameters: the key at fault, and what to do.

use std::fmt;

/// Parameters or a request body that cannot be used: the key at fault, and a message that says what
/// to do.
///
/// ```
/// # mod kvx { pub mod connector { pub use kvx_vllm::params::TransferParams; } }
/// use kvx::connector::TransferParams;
/// let error = TransferParams::from_value(&serde_json::json!({"remote_port": "5600"})).unwrap_err();
/// assert_eq!(error.key(), "remote_port");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamsError {
    key: &'static str,
    sentence: String,
}

impl ParamsError {
    pub(crate) fn new(key: &'static str, sentence: impl Into<String>) -> Self {
        ParamsError { key, sentence: sentence.into() }
    }

    /// Returns the key at fault, as it is written in JSON.
    pub fn key(&self) -> &'static str {
        self.key
    }
}

impl fmt::Display for ParamsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for ParamsError {}

#[cfg(feature = "protocol")]
impl From<ParamsError> for kvx_core::Error {
    fn from(error: ParamsError) -> Self {
        kvx_core::ErrorKind::Invalid.because(error.sentence)
    }
}
