//! Describes the machine that a table of figures comes from.

use std::fs;

/// The device, the CPU, the kernel: one line.
pub(crate) fn description(device: &str) -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let model = model.trim_start_matches([' ', '\t', ':']);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{device}; {cores} CPUs ({model}), Linux {}", kernel.trim())
}
