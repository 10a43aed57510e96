//! Keys from the environment, which `Debug` does not print.

/// A key that `Debug` does not print.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey(String);

impl ApiKey {
    /// Creates a key.
    pub fn new(text: impl Into<String>) -> Self {
        ApiKey(text.into())
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

/// The secret that all engines of a fleet share. `Debug` does not print it.
#[derive(Clone, PartialEq, Eq)]
pub struct FleetSecret([u8; 32]);

impl FleetSecret {
    /// Creates a secret from its bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        FleetSecret(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl std::fmt::Debug for FleetSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FleetSecret(…)")
    }
}
