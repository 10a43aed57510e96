//! The libfabric that this process has loaded.

use std::ffi::CStr;
use std::fmt;
use std::path::PathBuf;

use kvx_backend::loader::{self, BoundLibrary, FunctionTable as _, ProcessLibrary, Search};
use kvx_core::backend::Unavailable;

use super::bindings_1_17::{FI_MAJOR_VERSION, FI_MINOR_VERSION, Functions};

/// The environment variable that names the library.
const VARIABLE: &str = "KVX_LIBFABRIC_LIB";
const NAMES: &[&str] = &["libfabric.so.1"];
/// The paths at which AWS's EFA installer puts its libfabric.
const FILES: &[&str] =
    &["/opt/amazon/efa/lib64/libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1"];
const CURE: &str = "install libfabric 1.17 or newer (Debian: libfabric1), or set KVX_LIBFABRIC_LIB to its libfabric.so.1";

/// The version of a library, or of the interface that a program requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

impl Version {
    pub(crate) const fn of(major: u32, minor: u32) -> Self {
        Version { major, minor }
    }

    /// Returns the version as libfabric encodes it.
    pub(crate) const fn packed(self) -> u32 {
        self.major << 16 | self.minor
    }

    pub(super) fn unpack(packed: u32) -> Self {
        Version { major: packed >> 16, minor: packed & 0xffff }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The version of the bindings, and the oldest supported one.
const OLDEST: Version = Version::of(FI_MAJOR_VERSION, FI_MINOR_VERSION);
/// The newest interface that kvx requests. Providers allow dma-buf registrations only to programs
/// that request 1.20. Programs that request 1.18 get EFA's hardware writes without a setting.
const NEWEST_INTERFACE: Version = Version::of(1, 20);

/// Returns the interface to request from a library of this version.
pub(crate) fn interface_of(library: Version) -> Version {
    library.min(NEWEST_INTERFACE)
}

/// Returns the version of a symbol whose structures match the bindings; newer libraries use others
/// by default.
#[cfg_attr(not(feature = "raw"), expect(unreachable_pub, reason = "public with the feature raw"))]
pub fn symbol_version(name: &CStr) -> &'static CStr {
    match name.to_bytes() {
        b"fi_getinfo" | b"fi_freeinfo" | b"fi_dupinfo" => c"FABRIC_1.3",
        b"fi_fabric" => c"FABRIC_1.1",
        _ => c"FABRIC_1.0",
    }
}

/// A loaded libfabric with the functions of 1.17 that are symbols.
pub(crate) type Library = BoundLibrary<Functions, Version>;

/// The library that `KVX_LIBFABRIC_LIB` names, otherwise `libfabric.so.1`.
pub(crate) static LIBRARY: ProcessLibrary<Functions, Version> = ProcessLibrary::new(load);

fn load() -> Result<Library, Unavailable> {
    loader::with_signals_kept(|| {
        let library =
            Search::new(VARIABLE, NAMES, CURE).files(FILES.iter().map(PathBuf::from)).open()?;
        let find = |name: &'static CStr| library.versioned_address(name, symbol_version(name));
        // SAFETY: the loader returns the symbol of that name and version, which is the function
        // that the headers of 1.17 declare.
        let functions = unsafe { Functions::find(find) }?;
        // SAFETY: it has no preconditions.
        let version = Version::unpack(unsafe { (functions.fi_version)() });
        if version < OLDEST {
            let path = library.path().display();
            let why = format!("{path} is libfabric {version}, and kvx needs {OLDEST} or newer");
            return Err(Unavailable::because(why, CURE));
        }
        Ok(BoundLibrary::new(library, functions, version))
    })
}
