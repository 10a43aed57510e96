//! The UCX that this process has opened.

use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};

use kvx_backend::loader::{self, OpenOnce, Search};
use kvx_core::Unavailable;

use super::bindings_1_13::Functions;
use super::loaded;
use super::log::Log;

/// The variable that names the library.
pub(crate) const VARIABLE: &str = "KVX_UCX_LIB";
const NAMES: &[&str] = &["libucp.so.0"];
const CURE: &str = "install UCX 1.13 or newer (Debian: libucx0; from PyPI: libucx-cu12), or set KVX_UCX_LIB to its libucp.so.0";
const ONE_ONLY: &str = "unset KVX_UCX_LIB to use the one that is loaded, or set it to that file";

/// `ucp_get_version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) release: u32,
}

impl Version {
    const fn of(major: u32, minor: u32) -> Self {
        Version { major, minor, release: 0 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

/// The oldest version that the bindings fit.
const OLDEST: Version = Version::of(1, 13);
/// An open libucp, for the life of the process: the first that was asked for is the only one.
pub(crate) struct Library {
    functions: Functions,
    log: Option<Log>,
    version: Version,
    path: PathBuf,
}

static OPENED: OpenOnce<Library> = OpenOnce::new();

impl Library {
    /// Opens the library that `KVX_UCX_LIB` names, else `libucp.so.0`.
    ///
    /// # Errors
    /// What was tried and the cure; tried again at the next call.
    pub(crate) fn open() -> Result<&'static Library, Unavailable> {
        OPENED.open(Library::load)
    }

    /// The library, if it has been opened.
    pub(crate) fn opened() -> Option<&'static Library> {
        OPENED.opened()
    }

    fn load() -> Result<Library, Unavailable> {
        if let Some(wanted) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
            loaded::check(Path::new(&wanted), ONE_ONLY)?;
        }
        loader::with_signals_kept(|| {
            let library = Search::new(VARIABLE, NAMES, CURE).open()?;
            let find = |name: &'static CStr| library.address(name);
            // SAFETY: the loader answers with the symbol of that name; that it is the function which the headers of
            // this library declare is what its version says, below, and what its soname (libucp.so.0) promises.
            let functions = unsafe { Functions::find(find) }?;
            let mut version = Version::of(0, 0);
            // SAFETY: three integers to write to; may be called before anything else.
            unsafe {
                (functions.ucp_get_version)(
                    &mut version.major,
                    &mut version.minor,
                    &mut version.release,
                );
            }
            if version < OLDEST || version.major != OLDEST.major {
                return Err(Unavailable::because(
                    format!(
                        "{} is UCX {version}, and kvx needs 1.13 or a later 1.x",
                        library.path().display()
                    ),
                    CURE,
                ));
            }
            let log = Log::find(&library);
            Ok(Library { functions, log, version, path: library.path().to_owned() })
        })
    }

    /// The functions of 1.13.
    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// The functions of the library that is open: for whoever holds a handle of it.
    pub(super) fn functions_of_the_process() -> &'static Functions {
        &OPENED.opened().expect("a handle of UCX exists, so the library is open").functions
    }

    /// Its log, if it can be held back.
    pub(super) fn log(&self) -> Option<&Log> {
        self.log.as_ref()
    }

    /// Its version.
    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}
