//! The machine that measures, as reports and comparisons show it.

use std::sync::OnceLock;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// The hardware, the kernel and the build of kvx behind a figure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Machine {
    /// The version of kvx, with a note for a debug build.
    pub(crate) kvx: String,
    pub(crate) cpu: String,
    /// The cores that this process may use.
    pub(crate) cores: usize,
    /// Bytes of memory.
    pub(crate) memory: u64,
    pub(crate) kernel: String,
}

impl Machine {
    /// Describes this machine.
    pub(crate) fn here() -> &'static Machine {
        static HERE: OnceLock<Machine> = OnceLock::new();
        HERE.get_or_init(|| {
            let read = |path| std::fs::read_to_string(path).unwrap_or_default();
            let version = env!("CARGO_PKG_VERSION");
            let build = if cfg!(debug_assertions) { " (a debug build, which is slow)" } else { "" };
            Machine {
                kvx: format!("{version}{build}"),
                cpu: model(&read("/proc/cpuinfo")),
                cores: std::thread::available_parallelism().map_or(1, usize::from),
                memory: memory(&read("/proc/meminfo")),
                kernel: format!("Linux {}", read("/proc/sys/kernel/osrelease").trim()),
            }
        })
    }
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(field, _)| field.trim() == name).map(|(_, value)| value.trim())
}

/// Returns the model of the processor, or its architecture where the kernel names no model.
fn model(cpuinfo: &str) -> String {
    field(cpuinfo, "model name").unwrap_or(std::env::consts::ARCH).to_owned()
}

fn memory(meminfo: &str) -> u64 {
    let total = field(meminfo, "MemTotal").and_then(|total| total.strip_suffix(" kB"));
    total.and_then(|total| total.trim().parse::<u64>().ok()).map_or(0, |total| total << 10)
}

/// Returns the seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Formats a time as `2026-12-01 02:30 UTC`.
pub(crate) fn date(unix_time: u64) -> String {
    let (hour, minute) = (unix_time / 3600 % 24, unix_time / 60 % 60);
    let (mut day, mut year) = (unix_time / 86_400, 1970);
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < days {
            break;
        }
        day -= days;
        month += 1;
    }
    format!("{year}-{month:02}-{:02} {hour:02}:{minute:02} UTC", day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_399), "2000-02-28 23:59 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_798_761_599), "2026-12-31 23:59 UTC");
    }

    #[test]
    fn the_machine_is_described() {
        let here = Machine::here();
        assert!(here.cores > 0 && here.memory > 1 << 20 && !here.cpu.is_empty(), "{here:?}");
        assert!(here.kernel.len() > "Linux ".len() && here.kvx.starts_with("0."), "{here:?}");
        assert_eq!(model("processor : 0\nBogoMIPS : 50\n"), std::env::consts::ARCH);
        assert_eq!(model("model name\t: A & B\n"), "A & B");
        assert_eq!(memory("MemFree: 1 kB\nMemTotal:       2048 kB\n"), 2 << 20);
        assert_eq!(memory("nonsense"), 0);
    }
}
