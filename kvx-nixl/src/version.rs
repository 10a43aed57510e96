//! The releases of NIXL that KVX serves.

use kvx_backend::version::Version;

/// The releases that the tests of this crate run on: 1.5.0 each time, 1.1.0 by the whole run,
/// 0.10.1 and all of 1.5.1 where `KVX_NIXL_TEST_MORE` is set. Data that cross the border could lie
/// elsewhere in others, which no table of functions tells.
pub const TRIED: &[Version] =
    &[Version::new(0, 10, 1), Version::new(1, 1, 0), Version::new(1, 5, 0), Version::new(1, 5, 1)];

/// The variable that takes a version which is not among the [`TRIED`] ones.
pub const ANY: &str = "KVX_NIXL_ANY_VERSION";

/// Returns whether it is among those that were tried.
pub fn is_tried(version: Version) -> bool {
    TRIED.contains(&version)
}

/// The tried versions, for people.
pub fn tried() -> String {
    TRIED.iter().map(Version::to_string).collect::<Vec<_>>().join(", ")
}
