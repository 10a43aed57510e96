//! Versions of native libraries.

use std::fmt;
use std::path::Path;

/// The version of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The major version.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
    /// The patch version.
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Version {
    /// Returns the version with these three numbers.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Version { major, minor, patch }
    }

    /// Returns the version of the Python wheel that contains `library`, for a library whose API
    /// does not report one: `.nixl_cu12.mesonpy.libs/libnixl.so` has `nixl_cu12-1.5.1.dist-info`
    /// next to its directory. Returns `None` for a library that was built from source.
    pub fn of_wheel(library: &Path) -> Option<Self> {
        let folder = library.parent()?;
        let wheel =
            folder.file_name()?.to_str()?.strip_prefix('.')?.strip_suffix(".mesonpy.libs")?;
        let entries = std::fs::read_dir(folder.parent()?).ok()?.flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| Version::of_record(&name, wheel)).max()
    }

    /// Parses `nixl_cu12-1.5.1.dist-info`, for the wheel `nixl_cu12`.
    fn of_record(name: &str, wheel: &str) -> Option<Self> {
        let version = name.strip_suffix(".dist-info")?.strip_prefix(wheel)?.strip_prefix('-')?;
        let mut parts = version.split('.').map(|part| {
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part[..digits].parse::<u32>()
        });
        let major = parts.next()?.ok()?;
        let mut part = || parts.next().and_then(Result::ok).unwrap_or(0);
        Some(Version::new(major, part(), part()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_a_wheels_record() {
        let of = |name| Version::of_record(name, "nixl_cu12");
        assert_eq!(of("nixl_cu12-1.5.1.dist-info"), Some(Version::new(1, 5, 1)));
        assert_eq!(of("nixl_cu12-1.6rc2.dist-info").unwrap().to_string(), "1.6.0");
        for other in [
            "nixl_cu13-1.5.1.dist-info",
            "nixl_cu12.libs",
            "nixl_cu12-.dist-info",
            "nixl_cu12-x.dist-info",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn a_library_outside_a_wheel_has_no_such_version() {
        assert_eq!(Version::of_wheel(Path::new("/usr/local/nixl/lib/libnixl.so")), None);
    }
}
