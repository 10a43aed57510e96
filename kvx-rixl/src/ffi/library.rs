//! The NIXL that this process has loaded.

use std::ffi::CStr;
use std::path::{Path, PathBuf};

use kvx_backend::loader::{self, BoundLibrary, FunctionTable as _, OpenOnce, Search};
use kvx_backend::version::Version;
use kvx_core::backend::Unavailable;

use super::bindings::Functions;

/// The environment variable that names the library.
pub(crate) const VARIABLE: &str = "KVX_RIXL_LIB";
const NAMES: &[&str] = &["libnixl_capi.so"];
pub(crate) const CURE: &str = "install NIXL 1.x (from PyPI: nixl-cu12, without its dependencies) and set KVX_RIXL_LIB to its \
     libnixl_capi.so, which `kvx backends --find` finds; the package called rixl there is another product";
/// Where the images of ROCm and NVIDIA have the library, below the root of the file system.
const PREFIXES: &[&str] = &[
    "usr/local/rixl",
    "opt/rixl",
    "sgl-workspace/rixl",
    "usr/local/nixl",
    "opt/nixl",
    "opt/nvidia/nvda_nixl",
];
#[cfg(target_arch = "x86_64")]
const FOLDERS: [&str; 3] = ["lib/x86_64-linux-gnu", "lib64", "lib"];
#[cfg(not(target_arch = "x86_64"))]
const FOLDERS: [&str; 3] = ["lib/aarch64-linux-gnu", "lib64", "lib"];

/// Returns the libraries of images that exist.
fn in_images(root: &Path) -> impl Iterator<Item = PathBuf> {
    let folders = PREFIXES
        .iter()
        .flat_map(move |prefix| FOLDERS.map(|folder| root.join(prefix).join(folder)));
    folders.map(|folder| folder.join(NAMES[0])).filter(|file| file.exists())
}

/// The system library of which wheels contain a copy with their UCX. That copy's symbols become
/// global, and the wheel then loads the system's library as well: their symbols mix, and the
/// process crashes when it exits. If the system's is loaded first, it keeps its own symbols.
const SYSTEM_LIBNL: &str = "libnl-route-3.so.200";

/// Returns whether kvx supports a version: the functions that it calls are those of the header.
/// Compared: the sources of NIXL 1.0, 1.1, 1.4 and later, and of RIXL. Run: 1.1.0 and 1.5.1 by the
/// tests, 1.4.0 by hand; no RIXL.
fn is_supported(version: Version) -> bool {
    version.major == 1
}

/// A loaded libnixl_capi, with its version if files beside it tell: the C interface does not report
/// it.
pub(crate) type Library = BoundLibrary<Functions, Option<Version>>;

/// The library of this process: only the first one that was requested is used.
static OPENED: OpenOnce<Library> = OpenOnce::new();

/// Loads the library that `KVX_RIXL_LIB` names, otherwise `libnixl_capi.so`, otherwise that of a
/// known image.
///
/// # Errors
/// The candidates that were tried, and the remedy. The next call tries again.
pub(crate) fn open(any_version: bool) -> Result<&'static Library, Unavailable> {
    let library = OPENED.open(|| load(Path::new("/")))?;
    match library.version() {
        Some(version) if !any_version && !is_supported(version) => Err(Unavailable::because(
            format!(
                "{} is NIXL {version}, and kvx supports 1.0 and later 1.x",
                library.path().display()
            ),
            format!("{CURE}; or set rixl.any_version to use it anyway"),
        )),
        _ => Ok(library),
    }
}

fn load(root: &Path) -> Result<Library, Unavailable> {
    loader::with_signals_kept(|| {
        loader::preload(SYSTEM_LIBNL).ok(); // if it is absent, nothing conflicts
        let library = Search::new(VARIABLE, NAMES, CURE).files(in_images(root)).open()?;
        let find = |name: &'static CStr| library.address(name);
        // SAFETY: the loader returns the symbol of that name. The name, which no other library
        // uses, and the version, which `open` checks, guarantee that it is the function in the
        // header.
        let functions = unsafe { Functions::find(find) }?;
        let version = Version::of_wheel(library.path());
        Ok(BoundLibrary::new(library, functions, version))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::wheel;

    /// Tests that the first library of an image with several is loaded.
    fn of_an_image() {
        let ours = wheel::library().expect("this process was started because it is installed");
        let root = std::env::temp_dir().join(format!("kvx-rixl-image-{}", std::process::id()));
        let places = ["usr/local/rixl/lib64", "usr/local/nixl/lib", "opt/nvidia/nvda_nixl/lib64"];
        let places = places.map(|place| root.join(place));
        for place in &places {
            std::fs::create_dir_all(place.parent().expect("below the root")).expect("a new folder");
            symlink(ours.parent().expect("a folder"), place).expect("a new name");
        }
        let found: Vec<_> = in_images(&root).collect();
        let opened = load(&root);
        std::fs::remove_dir_all(&root).expect("it was made here");
        assert_eq!(found, places.map(|place| place.join(NAMES[0])));
        let opened = opened.map(|library| library.path().to_owned()).map_err(|why| why.to_string());
        assert_eq!(opened.as_ref(), Ok(&found[0]));
    }

    #[test]
    fn the_library_of_an_image_is_found_in_its_place() {
        const NAME: &str = "ffi::library::tests::the_library_of_an_image_is_found_in_its_place";
        // An empty value counts as unset.
        wheel::alone_with(NAME, &[(VARIABLE, Path::new(""))], of_an_image);
    }
}
