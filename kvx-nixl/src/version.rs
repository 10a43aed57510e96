//! The releases of NIXL that KVX supports.

use kvx_backend::version::Version;

/// The releases that this crate's tests run on: 1.5.0 in each run, 1.1.0 in the whole run, 0.10.1
/// and all of 1.5.1 if `KVX_NIXL_TEST_MORE` is set. Other releases may have other data layouts,
/// which no table of functions shows.
pub const TRIED: &[Version] =
    &[Version::new(0, 10, 1), Version::new(1, 1, 0), Version::new(1, 5, 0), Version::new(1, 5, 1)];

/// The variable that accepts a version which is not among the [`TRIED`] ones.
pub const ANY: &str = "KVX_NIXL_ANY_VERSION";

/// Returns whether a version is among the tested ones.
pub fn is_tried(version: Version) -> bool {
    TRIED.contains(&version)
}

/// Returns the tested versions as text.
pub fn tried() -> String {
    TRIED.iter().map(Version::to_string).collect::<Vec<_>>().join(", ")
}
