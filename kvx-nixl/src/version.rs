//! The releases of NIXL that KVX serves.

use kvx_backend::wheel::WheelVersion;

const fn version(major: u32, minor: u32, patch: u32) -> WheelVersion {
    WheelVersion { major, minor, patch }
}

/// The releases that the tests of this crate run on: 1.5.0 each time, 1.1.0 by the whole run, 0.10.1 and all of 1.5.1
/// where `KVX_NIXL_TEST_MORE` is set. Data that cross the border could lie elsewhere in others, which no table of
/// functions tells.
pub const TRIED: &[WheelVersion] =
    &[version(0, 10, 1), version(1, 1, 0), version(1, 5, 0), version(1, 5, 1)];

/// The variable that takes a version which is not among the [`TRIED`] ones.
pub const ANY: &str = "KVX_NIXL_ANY_VERSION";

/// Whether it is among those that were tried.
pub fn is_tried(version: WheelVersion) -> bool {
    TRIED.contains(&version)
}

/// The tried versions, for people.
pub fn tried() -> String {
    TRIED.iter().map(WheelVersion::to_string).collect::<Vec<_>>().join(", ")
}
