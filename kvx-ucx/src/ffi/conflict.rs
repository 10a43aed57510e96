//! Rejects a second UCX: a process cannot load two libraries of the same name.
//!
//! The dynamic linker resolves a library's dependencies by name. A second `libucp.so.0` from
//! another folder would therefore use the loaded `libucs.so.0`, of another version, and crash.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use kvx_backend::loader;
use kvx_core::backend::Unavailable;

/// The libraries of UCX that the linker resolves by name.
const PARTS: &[&str] = &["libucp.so.0", "libucs.so.0", "libuct.so.0", "libucm.so.0"];

/// Rejects `wanted` (a path) if a UCX with the same library names from another folder is loaded.
pub(super) fn check(wanted: &Path, cure: &str) -> Result<(), Unavailable> {
    // A bare name finds the loaded library. NIXL's wheel renames the files of its copy, so that
    // copy cannot conflict.
    let Ok(wanted) = wanted.canonicalize() else { return Ok(()) };
    if !is_part(&wanted) {
        return Ok(());
    }
    let loaded = loader::loaded_files().into_iter().filter(|file| is_part(file));
    let mut loaded = loaded.filter_map(|file| file.canonicalize().ok());
    let Some(other) = loaded.find(|other| other.parent() != wanted.parent()) else {
        return Ok(());
    };
    Err(Unavailable::because(
        format!(
            "{} cannot be loaded: this process has loaded {} already",
            wanted.display(),
            other.display()
        ),
        cure.to_owned(),
    ))
}

/// Returns whether `file` has the name of one of UCX's libraries, with or without the rest of its
/// version.
fn is_part(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().as_bytes();
    PARTS.iter().any(|part| name.starts_with(part.as_bytes()))
}
