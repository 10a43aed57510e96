//! Snapshots of the state of the host process that a library must not change.

use serde::{Deserialize, Serialize};

/// The signals, environment and threads of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessState {
    /// The disposition of each signal from 1 to 64: handler, flags, restorer and mask, as the
    /// kernel reports them.
    pub signals: Vec<Vec<u64>>,
    /// The environment.
    pub variables: Vec<(Vec<u8>, Vec<u8>)>,
    /// The names of the threads except the main one, as the kernel reports them: truncated to 15
    /// bytes.
    pub threads: Vec<String>,
}

impl ProcessState {
    /// Returns the state of this process.
    pub fn of_this_process() -> Self {
        Self::of_this_process_beside(&[])
    }

    /// Returns the state of this process without these threads, which were not started by kvx.
    pub(crate) fn of_this_process_beside(others: &[Tid]) -> Self {
        use std::os::unix::ffi::OsStringExt as _;
        // When a process starts its first thread, the C library takes a signal for itself, which is
        // not kvx's doing. That thread may also stay in the list for a moment after its end.
        let first = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().to_string())
            .join()
            .ok();
        let variables =
            std::env::vars_os().map(|(name, value)| (name.into_vec(), value.into_vec()));
        let mut threads: Vec<_> = threads()
            .into_iter()
            .filter(|(tid, _)| !others.contains(tid) && first.as_ref() != Some(tid))
            .map(|(_, name)| name)
            .collect();
        threads.sort();
        ProcessState {
            signals: (1..=64).map(disposition).collect(),
            variables: variables.collect(),
            threads,
        }
    }
}

/// A thread's number, as the kernel writes it. Names do not distinguish threads, because a thread
/// gets its own name only once it runs.
pub(crate) type Tid = String;

/// Returns a signal's disposition by a direct system call: the C library hides the signals that it
/// uses.
fn disposition(signal: i32) -> Vec<u64> {
    // The kernel's `struct sigaction` has four words on some architectures, three on others.
    let mut action = [0_u64; 8];
    let none = std::ptr::null::<u64>();
    // SAFETY: without a new action, the kernel only writes the old one, which is smaller than
    // `action`; 8 is the size in bytes of its set of 64 signals.
    let rc = unsafe {
        libc::syscall(libc::SYS_rt_sigaction, signal, none, action.as_mut_ptr(), 8_usize)
    };
    assert_eq!(rc, 0, "signal {signal} has a disposition");
    action.to_vec()
}

/// Returns the threads of this process except the main one, with their names.
pub(crate) fn threads() -> Vec<(Tid, String)> {
    let main = std::process::id().to_string();
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let others = tasks
        .flatten()
        .filter_map(|task| Some((task.file_name().into_string().ok()?, task.path())));
    let others = others.filter(|(tid, _)| *tid != main);
    // A thread that has ended meanwhile has no name any more.
    others
        .filter_map(|(tid, path)| {
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            Some((tid, name.trim_end().to_owned()))
        })
        .collect()
}

/// Returns a number of `/proc/<pid>/status`, or 0 if it has none of this name.
pub(crate) fn number_of(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// The limited resources that a process uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceUsage {
    /// Open files.
    pub descriptors: u64,
    /// Threads, the main one included.
    pub threads: u64,
    /// Resident memory, in MiB.
    pub memory: u64,
    /// Mapped address ranges, of which a process can have at most 65,530.
    pub mappings: u64,
    /// Bytes that kvx keeps in quarantine.
    pub quarantined: u64,
}

impl ResourceUsage {
    /// Returns the usage of this process.
    ///
    /// # Errors
    /// The error of the operating system if there is no `/proc`.
    pub fn of_this_process() -> std::io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        Ok(ResourceUsage {
            descriptors: std::fs::read_dir("/proc/self/fd")?.count() as u64,
            threads: number_of(&status, "Threads:"),
            memory: number_of(&status, "VmRSS:") / 1024,
            mappings: std::fs::read_to_string("/proc/self/maps")?.lines().count() as u64,
            quarantined: kvx_core::quarantined_bytes(),
        })
    }

    /// Returns the maximum of each resource.
    pub(crate) fn most(self, other: Self) -> Self {
        self.each(other, u64::max)
    }

    /// Returns the minimum of each resource.
    pub(crate) fn least(self, other: Self) -> Self {
        self.each(other, u64::min)
    }

    fn each(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self {
        ResourceUsage {
            descriptors: of(self.descriptors, other.descriptors),
            threads: of(self.threads, other.threads),
            memory: of(self.memory, other.memory),
            mappings: of(self.mappings, other.mappings),
            quarantined: of(self.quarantined, other.quarantined),
        }
    }

    /// Returns the resource that exceeds `earlier` by more than work usually varies, if there is
    /// one.
    pub fn beyond(self, earlier: Self) -> Option<String> {
        let allowed = [
            ("descriptors", self.descriptors, earlier.descriptors + 8),
            ("threads", self.threads, earlier.threads + 4),
            ("MiB of memory", self.memory, earlier.memory + earlier.memory / 4 + 32),
            ("mappings", self.mappings, earlier.mappings + earlier.mappings / 4 + 64),
            ("bytes in quarantine", self.quarantined, earlier.quarantined),
        ];
        let beyond = allowed.into_iter().find(|(_, now, most)| now > most)?;
        Some(format!(
            "{} {} are held, {} were expected at most: {earlier:?} before",
            beyond.1, beyond.0, beyond.2
        ))
    }
}

impl std::fmt::Display for ResourceUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ResourceUsage { descriptors, threads, memory, mappings, quarantined } = self;
        write!(f, "{descriptors} | {threads} | {memory} | {mappings} | {quarantined}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_grown_is_named() {
        let before = ResourceUsage {
            descriptors: 20,
            threads: 5,
            memory: 100,
            mappings: 400,
            quarantined: 0,
        };
        assert_eq!(
            ResourceUsage { descriptors: 28, memory: 157, mappings: 564, ..before }.beyond(before),
            None
        );
        for (grown, name) in [
            (ResourceUsage { descriptors: 29, ..before }, "descriptors"),
            (ResourceUsage { threads: 10, ..before }, "threads"),
            (ResourceUsage { memory: 158, ..before }, "memory"),
            (ResourceUsage { mappings: 565, ..before }, "mappings"),
            (ResourceUsage { quarantined: 1, ..before }, "quarantine"),
        ] {
            assert!(grown.beyond(before).is_some_and(|why| why.contains(name)), "{name}");
        }
    }

    #[test]
    fn a_process_holds_something() {
        let held = ResourceUsage::of_this_process().unwrap();
        assert!(held.descriptors > 2 && held.threads > 0 && held.memory > 0);
    }
}
