//! Rejects a second UCX: a process cannot load two libraries of one name.
//!
//! The dynamic linker serves a library's dependencies by name. A second `libucp.so.0` from another
//! folder would therefore run on the `libucs.so.0` that is there already, of another version, and
//! crash.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use kvx_backend::loader;
use kvx_core::backend::Unavailable;

/// The parts that are shared by name.
const PARTS: &[&str] = &["libucp.so.0", "libucs.so.0", "libuct.so.0", "libucm.so.0"];

/// Refuses `wanted` (a path) if a UCX of the same names from another folder is loaded.
pub(super) fn check(wanted: &Path, cure: &str) -> Result<(), Unavailable> {
    // A bare name finds the loaded library; NIXL's wheel renames the files of its copy, which
    // therefore cannot conflict.
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
            "{} cannot be opened beside {}, which this process has loaded",
            wanted.display(),
            other.display()
        ),
        cure.to_owned(),
    ))
}

/// Returns whether `file` has the name of a part, with or without the rest of its version.
fn is_part(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().as_bytes();
    PARTS.iter().any(|part| name.starts_with(part.as_bytes()))
}
