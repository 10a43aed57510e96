//! What a model says when it cannot be opened or run.

/// A sentence that says what is wrong and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelError(String);

/// What the model's functions return.
pub type Result<T> = std::result::Result<T, ModelError>;

impl ModelError {
    /// The sentence.
    pub fn new(sentence: impl Into<String>) -> ModelError {
        ModelError(sentence.into())
    }

    /// With the words of another error.
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
