//! The error of a model that cannot be opened or run.

/// An error message that names the problem and the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelError(String);

/// The result of the model's functions.
pub type Result<T> = std::result::Result<T, ModelError>;

impl ModelError {
    /// Returns an error with this message.
    pub fn new(sentence: impl Into<String>) -> ModelError {
        ModelError(sentence.into())
    }

    /// Returns an error with the message of another error.
    pub fn of(error: impl std::fmt::Display) -> ModelError {
        ModelError(error.to_string())
    }
}

impl std::fmt::Display for ModelError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ModelError {}
