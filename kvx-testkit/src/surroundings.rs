//! Snapshots of the host process that a library must leave alone.

use serde::{Deserialize, Serialize};

/// Signals, environment and threads of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surroundings {
    /// What each signal from 1 to 64 does: handler, flags, restorer and mask, as the kernel has them.
    pub signals: Vec<Vec<u64>>,
    /// The environment.
    pub variables: Vec<(Vec<u8>, Vec<u8>)>,
    /// Names of the threads beside the main one, as the kernel has them: cut to 15 bytes.
    pub threads: Vec<String>,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_this_process() -> Self {
        Self::of_this_process_beside(&[])
    }

    /// The same without the threads that somebody else started.
    pub(crate) fn of_this_process_beside(others: &[Tid]) -> Self {
        use std::os::unix::ffi::OsStringExt as _;
        // The C library takes a signal for itself when a process starts its first thread: that is not kvx's doing. Nor
        // is that thread, which may be in the list for a moment after its end.
        let first = std::thread::spawn(|| rustix::thread::gettid().as_raw_nonzero().to_string()).join().ok();
        let variables = std::env::vars_os().map(|(name, value)| (name.into_vec(), value.into_vec()));
        let mut threads: Vec<_> = threads()
            .into_iter()
            .filter(|(tid, _)| !others.contains(tid) && first.as_ref() != Some(tid))
            .map(|(_, name)| name)
            .collect();
        threads.sort();
        Surroundings { signals: (1..=64).map(disposition).collect(), variables: variables.collect(), threads }
    }
}

/// A thread's number, as the kernel writes it. Names do not tell threads apart: a thread gets its own once it runs.
pub(crate) type Tid = String;

/// A signal's disposition by the system call itself: the C library hides the signals that it uses.
fn disposition(signal: i32) -> Vec<u64> {
    // The kernel's `struct sigaction`: four words on some architectures, three on others.
    let mut action = [0_u64; 8];
    let none = std::ptr::null::<u64>();
    // SAFETY: without a new action the kernel only writes the old one, which is smaller than `action`; 8 is the size
    // of its set of 64 signals.
    let rc = unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, none, action.as_mut_ptr(), 8_usize) };
    assert_eq!(rc, 0, "signal {signal} has a disposition");
    action.to_vec()
}

/// The threads of this process beside the main one, with their names.
pub(crate) fn threads() -> Vec<(Tid, String)> {
    let main = std::process::id().to_string();
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let others = tasks.flatten().filter_map(|task| Some((task.file_name().into_string().ok()?, task.path())));
    let others = others.filter(|(tid, _)| *tid != main);
    // A thread that ends meanwhile has no name any more.
    others
        .filter_map(|(tid, path)| {
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            Some((tid, name.trim_end().to_owned()))
        })
        .collect()
}
