//! Reads what the kernel and the environment tell.

use std::path::Path;

/// Reads a small file of the kernel; `None` if it does not exist or cannot be read.
pub(super) fn read(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Returns the names in a folder of the kernel, sorted.
pub(super) fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Returns the RDMA devices of this host.
pub(super) fn rdma_devices() -> Vec<String> {
    names("/sys/class/infiniband")
}

/// Returns the value of an environment variable, unless it is empty.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns `1.5 GiB`, `64 MiB` or `12 KiB`.
pub(crate) fn bytes(count: u64) -> String {
    let unit = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let (shift, name) = unit.into_iter().find(|(shift, _)| count >= 1 << shift).unwrap_or((0, "B"));
    let value = count as f64 / (1u64 << shift) as f64;
    match value.fract() < 0.05 || value >= 100.0 {
        true => format!("{} {name}", value as u64),
        false => format!("{value:.1} {name}"),
    }
}
