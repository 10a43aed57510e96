//! The shared secret of a fleet.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

use crate::identity::random_key;
use crate::{Error, ErrorKind, Result};

/// The prefix of the line in a secret's file.
const PREFIX: &str = "kvx-secret-1:";
/// The maximum number of bytes that are read. A longer file is not a secret's.
const LONGEST: u64 = 256;

/// A random key of 32 bytes that all agents of a fleet share. Transports that can authenticate use
/// it. `Debug` does not print it.
///
/// `kvx secret FILE` and [`create`](Secret::create) generate it and write a file that only its
/// owner can read. The file's one line consists of `kvx-secret-1:`, the key in hexadecimal, `:` and
/// the CRC-32 of the key, so that a truncated or edited file is rejected.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; Secret::LEN]);

impl Secret {
    /// The length of a secret in bytes.
    pub const LEN: usize = 32;

    /// Creates a secret from bytes, for programs that store keys elsewhere. The bytes must be
    /// random: an attacker who records a handshake can guess a key that a person can remember.
    pub const fn from_bytes(bytes: [u8; Secret::LEN]) -> Self {
        Secret(bytes)
    }

    /// Generates a secret and writes it to a new file that only its owner can read.
    ///
    /// # Errors
    /// `Native` if the file exists or cannot be written, or if the operating system gives no random
    /// bytes.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let (path, secret) = (path.as_ref(), Secret(random_key()?));
        let failed = |error: std::io::Error| {
            let cure = match error.kind() {
                std::io::ErrorKind::AlreadyExists => {
                    ": it exists, and is never overwritten; choose another name"
                }
                _ => "",
            };
            Error::os(
                format!("the shared secret's file {} cannot be made{cure}", path.display()),
                error,
            )
        };
        let mut file = new_file(path).map_err(failed)?;
        if let Err(error) = file.write_all(secret.line().as_bytes()).and_then(|()| file.sync_all())
        {
            std::fs::remove_file(path).ok(); // incomplete, so of no use
            return Err(failed(error));
        }
        Ok(secret)
    }

    /// Reads the secret from a file that [`create`](Secret::create) wrote.
    ///
    /// # Errors
    /// `Native` if the file cannot be read; `Invalid` if others can access it, or if it does not
    /// contain exactly one complete secret.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |error: std::io::Error| {
            let cure = match error.kind() {
                std::io::ErrorKind::NotFound => {
                    ": make it by `kvx secret FILE`, once for the fleet"
                }
                _ => "",
            };
            Error::os(
                format!("the shared secret's file {} cannot be read{cure}", path.display()),
                error,
            )
        };
        let refused = |why: String| {
            ErrorKind::Invalid.because(format!("the shared secret's file {} {why}", path.display()))
        };
        // Opening a pipe would block until it has a writer.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(refused(
                "is no regular file: copy what `kvx secret FILE` made into one".into(),
            ));
        }
        let file = File::open(path).map_err(failed)?;
        check_owner_alone(&file.metadata().map_err(failed)?).map_err(refused)?;
        let mut text = Vec::new();
        file.take(LONGEST).read_to_end(&mut text).map_err(failed)?;
        Secret::parse(&text).ok_or_else(|| {
            refused(
                "holds no whole secret: make one by `kvx secret FILE` and copy it to every engine \
                 unchanged"
                    .into(),
            )
        })
    }

    /// Reads the secret from the file that `KVX_SECRET_FILE` names; `None` if the variable is not
    /// set.
    ///
    /// # Errors
    /// As for [`from_file`](Secret::from_file): a secret that is configured but cannot be read is
    /// never ignored. `Invalid` if `KVX_SECRET` is set, because a key does not belong in the
    /// environment.
    pub fn from_environment() -> Result<Option<Self>> {
        if std::env::var_os("KVX_SECRET").is_some() {
            let why = "KVX_SECRET is set, but a secret comes only from a file: make one by \
                       `kvx secret FILE`, set KVX_SECRET_FILE to its path, and unset KVX_SECRET";
            return Err(ErrorKind::Invalid.because(why));
        }
        std::env::var_os("KVX_SECRET_FILE").map(Secret::from_file).transpose()
    }

    /// Returns the secret's bytes.
    pub const fn bytes(&self) -> &[u8; Secret::LEN] {
        &self.0
    }

    pub(crate) fn line(&self) -> String {
        let key = self.0.map(|byte| format!("{byte:02x}")).concat();
        format!("{PREFIX}{key}:{:08x}\n", crc32(&self.0))
    }

    /// Parses what [`line`](Secret::line) writes, and nothing else; the newline may be missing.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let key = text.strip_prefix(PREFIX)?.get(..2 * Secret::LEN)?;
        let mut bytes = [0; Secret::LEN];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(key.get(2 * at..2 * at + 2)?, 16).ok()?;
        }
        let secret = Secret(bytes);
        let line = secret.line();
        (text == line || text == line.trim_end()).then_some(secret)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Returns the CRC-32 of gzip and Ethernet.
fn crc32(bytes: &[u8]) -> u32 {
    let byte = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 * (crc & 1)))
    };
    !bytes.iter().fold(!0, byte)
}

#[cfg(unix)]
fn new_file(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(not(unix))]
fn new_file(_path: &Path) -> std::io::Result<File> {
    Err(std::io::Error::new(
        std::io::ErrorKind::Unsupported,
        "kvx cannot restrict access to a file on this system",
    ))
}

/// Checks that only the file's owner, who must be this user or root, can read or change it.
/// Otherwise returns the reason.
#[cfg(unix)]
fn check_owner_alone(file: &std::fs::Metadata) -> std::result::Result<(), String> {
    use std::os::unix::fs::MetadataExt as _;
    check_access(file.mode() & 0o7777, file.uid(), this_user())
}

/// Checks a file's mode and owner for this user. A file of root may also be readable by a group,
/// to which root has then added the process: Kubernetes and systemd give secrets to processes so.
#[cfg(unix)]
fn check_access(mode: u32, owner: u32, user: Option<u32>) -> std::result::Result<(), String> {
    let is_given_by_root = owner == 0 && mode & 0o077 == 0o040;
    if mode & 0o077 != 0 && !is_given_by_root {
        return Err(format!(
            "is open to others (mode {mode:03o}): chmod 600 it, and make a new one if they read it"
        ));
    }
    match user {
        Some(user) if owner != user && owner != 0 => Err(format!(
            "belongs to user {owner}, but this process runs as user {user}: chown it to user \
             {user} or to root"
        )),
        _ => Ok(()),
    }
}

#[cfg(not(unix))]
fn check_owner_alone(_file: &std::fs::Metadata) -> std::result::Result<(), String> {
    Err("may be open to others, which kvx cannot check on this system: pass the key to \
         Secret::from_bytes"
        .into())
}

#[cfg(all(target_os = "linux", not(kvx_portable)))]
fn this_user() -> Option<u32> {
    Some(rustix::process::geteuid().as_raw())
}

/// `None`: `std` does not provide the user's id. Only its owner can open a file that passed the
/// check of its mode, and this process has opened it.
#[cfg(all(unix, any(not(target_os = "linux"), kvx_portable)))]
fn this_user() -> Option<u32> {
    None
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;

    use super::*;

    /// A file name that no other test uses; the file is removed on drop.
    struct ScratchFile(PathBuf);

    impl ScratchFile {
        fn new(name: &str) -> Self {
            let place =
                std::env::temp_dir().join(format!("kvx-secret-{}-{name}", std::process::id()));
            std::fs::remove_file(&place).ok();
            ScratchFile(place)
        }

        fn write(&self, text: &[u8], mode: u32) {
            std::fs::write(&self.0, text).unwrap();
            std::fs::set_permissions(&self.0, std::fs::Permissions::from_mode(mode)).unwrap();
        }

        fn refusal(&self) -> String {
            let error = Secret::from_file(&self.0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            error.to_string()
        }
    }

    impl Drop for ScratchFile {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).ok();
        }
    }

    #[test]
    fn a_secret_is_made_once_read_back_and_not_printed() {
        let place = ScratchFile::new("made");
        let secret = Secret::create(&place.0).unwrap();
        assert_eq!(std::fs::metadata(&place.0).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Secret::from_file(&place.0).unwrap() == secret);
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        let again = Secret::create(&place.0).unwrap_err().to_string();
        assert!(again.contains("never overwritten"), "{again}");
        assert!(Secret::from_file(&place.0).unwrap() == secret, "it was overwritten");
        assert!(
            Secret::create(&ScratchFile::new("other").0).unwrap() != secret,
            "all secrets are equal"
        );
    }

    #[test]
    fn a_file_that_was_cut_or_edited_holds_no_secret() {
        let (place, secret) =
            (ScratchFile::new("edited"), Secret::from_bytes(std::array::from_fn(|at| at as u8)));
        let whole = secret.line();
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926, "not the standard CRC-32");
        place.write(whole.trim_end().as_bytes(), 0o600);
        assert!(Secret::from_file(&place.0).unwrap() == secret, "the newline is optional");
        let mut spoilt: Vec<_> =
            (0..whole.len() - 1).map(|len| whole.as_bytes()[..len].to_vec()).collect();
        spoilt.extend((0..whole.len()).map(|at| {
            let mut edited = whole.clone().into_bytes();
            edited[at] = if edited[at] == b'7' { b'8' } else { b'7' };
            edited
        }));
        spoilt.extend(
            [format!("{whole}{whole}"), format!(" {whole}"), whole.to_uppercase()]
                .map(String::into_bytes),
        );
        spoilt.extend([
            b"correct horse battery staple, and more".to_vec(),
            vec![b'a'; 32],
            vec![0xFF; 1 << 20],
        ]);
        for text in spoilt {
            place.write(&text, 0o600);
            let said = place.refusal();
            assert!(
                said.contains("holds no whole secret") && said.contains("`kvx secret FILE`"),
                "{said}"
            );
        }
    }

    #[test]
    fn a_file_that_others_can_read_is_refused() {
        let place = ScratchFile::new("open");
        let line = Secret::from_bytes([7; Secret::LEN]).line();
        for mode in [0o604, 0o620, 0o644, 0o660, 0o601, 0o777] {
            place.write(line.as_bytes(), mode);
            let said = place.refusal();
            assert!(
                said.contains(&format!("mode {mode:03o}")) && said.contains("chmod 600"),
                "{said}"
            );
        }
        for mode in [0o600, 0o400] {
            place.write(line.as_bytes(), mode);
            Secret::from_file(&place.0).unwrap();
        }
    }

    #[test]
    fn a_group_may_read_a_file_of_root_alone() {
        for (mode, owner, user) in [(0o440, 0, 7), (0o640, 0, 7), (0o440, 0, 0), (0o400, 7, 7)] {
            check_access(mode, owner, Some(user)).unwrap();
        }
        for (mode, owner, user) in
            [(0o440, 7, 7), (0o640, 7, 0), (0o444, 0, 7), (0o460, 0, 7), (0o450, 0, 7)]
        {
            let said = check_access(mode, owner, Some(user)).unwrap_err();
            assert!(said.contains("open to others"), "{mode:o} of {owner}: {said}");
        }
        let said = check_access(0o400, 8, Some(7)).unwrap_err();
        assert!(said.contains("chown it to user 7 or to root"), "{said}");
    }

    #[test]
    fn what_is_no_file_is_refused_at_once() {
        let error =
            Secret::from_file(ScratchFile::new("missing").0.as_path()).unwrap_err().to_string();
        assert!(error.contains("cannot be read") && error.contains("`kvx secret FILE`"), "{error}");
        let error = Secret::from_file(std::env::temp_dir()).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
    }
}
