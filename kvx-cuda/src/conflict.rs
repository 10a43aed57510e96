//! Rejects a second driver: one process must not use two copies of libcuda.
//!
//! Streams and addresses from one copy of libcuda are invalid in another. A library that loads
//! `libcuda.so.1` after kvx gets kvx's copy, because the dynamic linker resolves that name to the
//! loaded file. A framework that loaded another file before kvx keeps that file.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use kvx_backend::loader::{self, NativeLibrary};
use kvx_core::backend::Unavailable;

const CURE: &str = "one driver serves a process: unset KVX_CUDA_LIB, or set it to the file that the process has \
                    loaded; and take folders of stubs out of LD_LIBRARY_PATH";

/// Checks that the process has loaded no other driver than `opened`. Errors: the other file.
pub(crate) fn check(opened: &NativeLibrary) -> Result<(), Unavailable> {
    // If only the name is known, the dynamic linker has found the loaded file.
    let Ok(opened) = opened.path().canonicalize() else { return Ok(()) };
    let loaded = loader::loaded_files().into_iter().filter(|file| is_driver(file));
    let mut loaded = loaded.filter_map(|file| file.canonicalize().ok());
    let Some(other) = loaded.find(|other| *other != opened) else { return Ok(()) };
    let (opened, other) = (opened.display(), other.display());
    let why =
        format!("{opened} cannot be used together with {other}, which this process has loaded");
    Err(Unavailable::because(why, CURE))
}

/// Returns whether `file` has the name of a driver, with any version.
fn is_driver(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libcuda.so"))
}
