//! The UCX that this process has loaded.

use std::ffi::CStr;
use std::path::Path;

use kvx_backend::loader::{self, BoundLibrary, FunctionTable as _, ProcessLibrary, Search};
use kvx_backend::version::Version;
use kvx_core::backend::Unavailable;

use super::bindings_1_13::Functions;
use super::conflict;

/// The environment variable that names the library.
pub(crate) const VARIABLE: &str = "KVX_UCX_LIB";
const NAMES: &[&str] = &["libucp.so.0"];
const CURE: &str = "install UCX 1.13 or newer, the same version on all hosts (Debian: libucx0; from PyPI: libucx-cu12), or set KVX_UCX_LIB to its libucp.so.0";
const ONE_ONLY: &str = "unset KVX_UCX_LIB to use the loaded library, or set it to that file";

/// The oldest supported version: the one that the bindings are generated from. Peers need not have
/// the same version: see `Address::check_keys`.
const OLDEST: Version = Version::new(1, 13, 0);

/// A loaded libucp with the functions of 1.13.
pub(crate) type Library = BoundLibrary<Functions, Version>;

/// The library that `KVX_UCX_LIB` names, otherwise `libucp.so.0`.
pub(crate) static LIBRARY: ProcessLibrary<Functions, Version> = ProcessLibrary::new(load);

fn load() -> Result<Library, Unavailable> {
    if let Some(wanted) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        conflict::check(Path::new(&wanted), ONE_ONLY)?;
    }
    loader::with_signals_kept(|| {
        let library = Search::new(VARIABLE, NAMES, CURE).open()?;
        let find = |name: &'static CStr| library.address(name);
        // SAFETY: the loader returns the symbol of that name. The soname (libucp.so.0) promises,
        // and the version check below confirms, that it is the function that the headers declare.
        let functions = unsafe { Functions::find(find) }?;
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: the call writes three integers, and is allowed before any other.
        unsafe { (functions.ucp_get_version)(&mut major, &mut minor, &mut patch) };
        let version = Version::new(major, minor, patch);
        if version < OLDEST || version.major != OLDEST.major {
            let path = library.path().display();
            let why = format!("{path} is UCX {version}, and kvx needs 1.13 or a later 1.x");
            return Err(Unavailable::because(why, CURE));
        }
        Ok(BoundLibrary::new(library, functions, version))
    })
}
