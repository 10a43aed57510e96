//! The API keys of clients.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use hyper::header::{AUTHORIZATION, HeaderMap};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

use crate::error::{Error, Result};

/// Hashed keys: all have the same length, and are compared in constant time.
#[derive(Clone)]
pub struct Keys(Vec<[u8; 32]>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

/// Returns true if other users than root and the owner have access. A group may read a file of root.
fn is_open_to_others(mode: u32, owner: u32) -> bool {
    mode & 0o077 != 0 && !(owner == 0 && mode & 0o077 == 0o040)
}

fn hash(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

impl Keys {
    /// Reads a file with one key per line. Skips empty lines and lines that begin with `#`. Fails
    /// if other users have access to the file. A group may read a file of root: Kubernetes and
    /// systemd give secrets to processes so.
    pub(crate) fn from_file(path: &Path) -> Result<Self> {
        let failed = |error| {
            let path = path.display();
            let what = format_args!(
                "cannot read the clients' keys in {path} (one per line, mode 600; a relative path \
                 starts in the working directory)"
            );
            Error::io(what, error)
        };
        let mut file = File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let mode = metadata.mode() & 0o7777;
        if is_open_to_others(mode, metadata.uid()) {
            return Err(Error::new(format!(
                "{} has keys, but other users have access to it (mode {mode:03o}): chmod 600 it, and replace the keys if they were read",
                path.display()
            )));
        }
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(failed)?;
        let keys = Self::from_text(&text);
        match keys.len() {
            0 => Err(Error::new(format!("{} has no key; write one per line", path.display()))),
            _ => Ok(keys),
        }
    }

    fn from_text(text: &str) -> Self {
        let lines =
            text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self::new(lines.map(str::as_bytes))
    }

    /// Hashes these keys.
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a [u8]>) -> Self {
        Keys(keys.into_iter().map(hash).collect())
    }

    /// Hashes a single key.
    pub(crate) fn one(key: &str) -> Self {
        Self::new([key.as_bytes()])
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    fn has(&self, key: &[u8]) -> bool {
        let key = hash(key);
        // Compare all keys, so that the time does not depend on the match.
        self.0.iter().fold(Choice::from(0), |found, one| found | one.ct_eq(&key)).into()
    }

    /// Returns true if the client sent one of the keys as a bearer token.
    pub fn admit(&self, headers: &HeaderMap) -> bool {
        bearer(headers).is_some_and(|key| self.has(key))
    }

    /// Like [`admit`](Self::admit), but also accepts the key as `x-api-key`.
    pub(crate) fn admit_admin(&self, headers: &HeaderMap) -> bool {
        let named = headers.get("x-api-key").map(|value| value.as_bytes());
        named.or_else(|| bearer(headers)).is_some_and(|key| self.has(key))
    }
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_may_read_a_file_of_root_alone() {
        assert!(
            ![(0o600, 7), (0o400, 0), (0o440, 0), (0o640, 0)]
                .iter()
                .any(|(mode, owner)| is_open_to_others(*mode, *owner))
        );
        assert!(
            [(0o640, 7), (0o660, 0), (0o444, 0), (0o604, 0)]
                .iter()
                .all(|(mode, owner)| is_open_to_others(*mode, *owner))
        );
    }

    #[test]
    fn only_a_whole_key_opens() {
        let keys = Keys::from_text("# keys\n\n one \ntwo\n");
        assert_eq!(keys.len(), 2);
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().unwrap());
            headers
        };
        assert!(keys.admit(&with("Bearer one")) && keys.admit(&with("bearer  two")));
        for wrong in
            ["Bearer", "Bearer ", "Bearer on", "Bearer onee", "Basic one", "one", "Bearer # keys"]
        {
            assert!(!keys.admit(&with(wrong)), "{wrong}");
        }
        assert!(!keys.admit(&HeaderMap::new()));
        assert!(!format!("{keys:?}").contains("one"));
    }
}
