//! The socket at which the workers of an engine join its scheduler.

use std::fs::{DirBuilder, symlink_metadata};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use kvx::{ErrorKind, Result};

/// The longest path of a Unix socket.
const LONGEST: usize = 107;

/// Returns the path of the socket with this name, in a folder that only this user can enter. Both
/// halves call it, in whatever order.
pub(crate) fn path(name: &str) -> Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let (folder, variable) = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(runtime) if Path::new(&runtime).is_dir() => {
            (Path::new(&runtime).join("kvx"), "XDG_RUNTIME_DIR")
        }
        _ => (std::env::temp_dir().join(format!("kvx-{user}")), "TMPDIR"),
    };
    let shown = folder.display();
    if folder.as_os_str().len() + 1 + name.len() > LONGEST {
        return Err(ErrorKind::Invalid.because(format!(
            "the folder {shown} has a name that is too long for the workers' socket: set {variable} to \
             another folder"
        )));
    }
    match DirBuilder::new().mode(0o700).create(&folder) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => {
            return Err(ErrorKind::Native.because(format!(
                "cannot create the folder {shown} for the workers' socket: {error}; set {variable} to \
                 another folder"
            )));
        }
    }
    let is_private = symlink_metadata(&folder)
        .is_ok_and(|folder| folder.is_dir() && folder.uid() == user && folder.mode() & 0o077 == 0);
    if !is_private {
        return Err(ErrorKind::PermissionDenied.because(format!(
            "the folder {shown} belongs to another user or lets others in: remove it, or set \
             {variable} to another folder"
        )));
    }
    Ok(folder.join(name))
}
