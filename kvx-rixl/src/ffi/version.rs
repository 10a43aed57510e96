//! The version of a NIXL library, which its interface does not tell: a Python wheel's folder does.

use std::fmt;
use std::path::Path;

/// As the wheel's name has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl Version {
    /// Whether the functions that kvx calls are those of the header. Compared: NIXL's sources of 1.0, 1.1, 1.4 and
    /// after, and RIXL's. Run: 1.1.0 and 1.5.1 by the tests, 1.4.0 by hand; no RIXL.
    pub(crate) fn is_supported(self) -> bool {
        self.major == 1
    }

    /// The version of the wheel that brought the library: `.nixl_cu12.mesonpy.libs/libnixl_capi.so` lies beside
    /// `nixl_cu12-1.5.1.dist-info`. `None` for one that was built from source.
    pub(crate) fn beside(library: &Path) -> Option<Self> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheels_record_tells_the_version() {
        let of = |name| Version::of_record(name, "nixl_cu12");
        assert_eq!(of("nixl_cu12-1.5.1.dist-info"), Some(Version { major: 1, minor: 5, patch: 1 }));
        assert_eq!(of("nixl_cu12-1.6rc2.dist-info").unwrap().to_string(), "1.6.0");
        assert_eq!(of("nixl_cu13-1.5.1.dist-info"), None);
        assert_eq!(of("nixl_cu12.libs"), None);
        assert!(of("nixl_cu12-1.0.0.dist-info").unwrap().is_supported());
        assert!(!of("nixl_cu12-0.9.0.dist-info").unwrap().is_supported());
        assert!(!of("nixl_cu12-2.0.0.dist-info").unwrap().is_supported());
    }

    #[test]
    fn a_library_outside_a_wheel_tells_none() {
        assert_eq!(Version::beside(Path::new("/usr/local/nixl/lib/libnixl_capi.so")), None);
    }
}
