//! What a library must leave alone in its host process.

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
        use std::os::unix::ffi::OsStringExt as _;
        // The C library takes a signal for itself when a process starts its first thread: that is not kvx's doing.
        std::thread::spawn(|| ()).join().ok();
        let variables = std::env::vars_os().map(|(name, value)| (name.into_vec(), value.into_vec()));
        Surroundings {
            signals: (1..=64).map(disposition).collect(),
            variables: variables.collect(),
            threads: threads(),
        }
    }
}

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

fn threads() -> Vec<String> {
    let main = std::process::id().to_string();
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    let others = tasks.flatten().filter(|task| task.file_name().to_str() != Some(&*main));
    // A thread that ends meanwhile has no name any more.
    let names = others.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    let mut names: Vec<_> = names.map(|name| name.trim_end().to_owned()).collect();
    names.sort();
    names
}
