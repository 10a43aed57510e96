//! Libraries that came in a Python wheel: their version, which their interface may not tell, the wheel's folder does.

use std::fmt;
use std::path::Path;

/// As the wheel's name has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WheelVersion {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
    /// The third.
    pub patch: u32,
}

impl fmt::Display for WheelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl WheelVersion {
    /// The version of the wheel that brought the library: `.nixl_cu12.mesonpy.libs/libnixl.so` lies beside
    /// `nixl_cu12-1.5.1.dist-info`. `None` for one that was built from source.
    pub fn of_library(library: &Path) -> Option<Self> {
        let folder = library.parent()?;
        let wheel =
            folder.file_name()?.to_str()?.strip_prefix('.')?.strip_suffix(".mesonpy.libs")?;
        let entries = std::fs::read_dir(folder.parent()?).ok()?.flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| WheelVersion::of_record(&name, wheel)).max()
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
        Some(WheelVersion { major, minor: part(), patch: part() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheels_record_tells_the_version() {
        let of = |name| WheelVersion::of_record(name, "nixl_cu12");
        assert_eq!(
            of("nixl_cu12-1.5.1.dist-info"),
            Some(WheelVersion { major: 1, minor: 5, patch: 1 })
        );
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
    fn a_library_outside_a_wheel_tells_none() {
        assert_eq!(WheelVersion::of_library(Path::new("/usr/local/nixl/lib/libnixl.so")), None);
    }
}
