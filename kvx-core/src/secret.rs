//! The shared secret of a fleet.

use std::path::Path;
use std::sync::Arc;

use crate::{Error, Kind, Result};

/// A secret that all agents of a fleet share: with it, transports that can authenticate do. Not printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<[u8]>);

impl Secret {
    /// The fewest bytes that a secret has.
    pub const MIN: usize = 16;

    /// Errors: `Invalid` below 16 bytes.
    pub fn new(bytes: impl Into<Arc<[u8]>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.len() < Self::MIN {
            let (len, min) = (bytes.len(), Self::MIN);
            return Err(Error::new(
                Kind::Invalid,
                format!("a shared secret of {len} bytes: use at least {min}"),
            ));
        }
        Ok(Secret(bytes))
    }

    /// The content of a file, without a newline at its end. Errors: what the system says of the file; `Invalid` below
    /// 16 bytes.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|error| {
            Error::os(format!("the shared secret's file {} cannot be read", path.display()), error)
        })?;
        Secret::new(bytes.trim_ascii_end())
    }

    /// From the file that `KVX_SECRET_FILE` names, else from `KVX_SECRET` itself; `None` when neither is set. Errors:
    /// as [`from_file`](Secret::from_file); a secret that is asked for and cannot be had is never left out.
    pub fn from_environment() -> Result<Option<Self>> {
        if let Some(path) = std::env::var_os("KVX_SECRET_FILE") {
            return Secret::from_file(path).map(Some);
        }
        match std::env::var_os("KVX_SECRET") {
            Some(value) => Secret::new(value.into_encoded_bytes()).map(Some),
            None => Ok(None),
        }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_comes_from_a_file_and_is_not_printed() {
        let path = std::env::temp_dir().join(format!("kvx-secret-{}", std::process::id()));
        std::fs::write(&path, "correct horse battery staple\n").unwrap();
        let secret = Secret::from_file(&path).unwrap();
        std::fs::write(&path, "short\n").unwrap();
        let short = Secret::from_file(&path).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(secret.bytes(), b"correct horse battery staple");
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        assert_eq!(short.kind(), Kind::Invalid);
        let missing = Secret::from_file(&path).unwrap_err();
        assert!(missing.to_string().contains("cannot be read"), "{missing}");
    }
}
