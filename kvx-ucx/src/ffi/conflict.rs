//! Rejects a second UCX: a process cannot load two libraries of one name.
//!
//! The dynamic linker serves a library's dependencies by name. A second `libucp.so.0` from another
//! folder would therefore run on the `libucs.so.0` that is there already, of another version, and
//! crash.

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use kvx_core::backend::Unavailable;

/// The parts that are shared by name.
const PARTS: &[&str] = &["libucp.so.0", "libucs.so.0", "libuct.so.0", "libucm.so.0"];

/// Refuses `wanted` (a path) if a UCX of the same names from another folder is loaded.
pub(super) fn check(wanted: &Path, cure: &str) -> Result<(), Unavailable> {
    // A bare name finds what is loaded; NIXL's wheel gives its copy names of its own, which disturb
    // nobody.
    let Ok(wanted) = wanted.canonicalize() else { return Ok(()) };
    let is_shared = PARTS.iter().any(|part| has_name(&wanted, part));
    let Some(other) =
        loaded_files().into_iter().find(|other| is_shared && other.parent() != wanted.parent())
    else {
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

/// Returns whether `file` is a library of the name `part`, with or without the rest of its version.
fn has_name(file: &Path, part: &str) -> bool {
    file.file_name().is_some_and(|name| name.as_bytes().starts_with(part.as_bytes()))
}

/// The files of UCX that this process has loaded.
fn loaded_files() -> Vec<PathBuf> {
    unsafe extern "C" fn note(
        info: *mut libc::dl_phdr_info,
        _: usize,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the linker passes an entry whose name is a C string, and what `loaded_files`
        // passed, below.
        let (name, found) =
            unsafe { (CStr::from_ptr((*info).dlpi_name), &mut *found.cast::<Vec<PathBuf>>()) };
        let path = Path::new(OsStr::from_bytes(name.to_bytes()));
        if PARTS.iter().any(|part| has_name(path, part)) {
            found.extend(path.canonicalize());
        }
        0
    }
    let mut found = Vec::new();
    // SAFETY: `note` takes what is passed for a list of paths, which it is, for as long as the call
    // lasts.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut found).cast()) };
    found
}
