//! The version of a NIXL library: its interface does not tell, the folder of a Python wheel does.

use std::fmt;
use std::path::Path;

/// As the wheel's name has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
    /// The third.
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The releases that the tests of this crate have run on; 1.1.0 and 1.5.1 each time, the others by hand
/// (`PYTHONPATH`). Data that cross the border could lie elsewhere in others, which no table of functions tells.
pub const TRIED: &[Version] = &[
    Version { major: 0, minor: 10, patch: 1 },
    Version { major: 1, minor: 1, patch: 0 },
    Version { major: 1, minor: 5, patch: 0 },
    Version { major: 1, minor: 5, patch: 1 },
];

/// The variable that takes a version which is not among the [`TRIED`] ones.
pub const ANY: &str = "KVX_NIXL_ANY_VERSION";

impl Version {
    /// Whether it is among those that were tried.
    pub fn is_tried(self) -> bool {
        TRIED.contains(&self)
    }

    /// The version of the wheel that brought the library: `.nixl_cu12.mesonpy.libs/libnixl.so` lies beside
    /// `nixl_cu12-1.5.1.dist-info`. `None` for one that was built from source.
    pub fn beside(library: &Path) -> Option<Self> {
        let folder = library.parent()?;
        let wheel = folder.file_name()?.to_str()?.strip_prefix('.')?.strip_suffix(".mesonpy.libs")?;
        let entries = std::fs::read_dir(folder.parent()?).ok()?.flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| Version::of_record(&name, wheel)).max()
    }

    /// `nixl_cu12-1.5.1.dist-info`, for the wheel `nixl_cu12`.
    fn of_record(name: &str, wheel: &str) -> Option<Self> {
        let version = name.strip_suffix(".dist-info")?.strip_prefix(wheel)?.strip_prefix('-')?;
        let mut parts = version.split('.').map(|part| {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part[..digits].parse::<u32>()
        });
        let major = parts.next()?.ok()?;
        let mut part = || parts.next().and_then(Result::ok).unwrap_or(0);
        Some(Version { major, minor: part(), patch: part() })
    }
}

/// The tried versions, for people.
pub fn tried() -> String {
    TRIED.iter().map(Version::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheels_record_tells_the_version() {
        let of = |name| Version::of_record(name, "nixl_cu12");
        assert_eq!(of("nixl_cu12-1.5.1.dist-info"), Some(Version { major: 1, minor: 5, patch: 1 }));
        assert_eq!(
            of("nixl_cu12-1.6rc2.dist-info").map(|version| version.to_string()).as_deref(),
            Some("1.6.0")
        );
        for other in
            ["nixl_cu13-1.5.1.dist-info", "nixl_cu12.libs", "nixl_cu12-.dist-info", "nixl_cu12-x.dist-info"]
        {
            assert_eq!(of(other), None, "{other}");
        }
        assert!(of("nixl_cu12-1.1.0.dist-info").is_some_and(Version::is_tried));
        assert!(!of("nixl_cu12-2.0.0.dist-info").is_some_and(Version::is_tried));
    }

    #[test]
    fn a_library_outside_a_wheel_tells_none() {
        assert_eq!(Version::beside(Path::new("/usr/local/nixl/lib/libnixl.so")), None);
    }
}
