//! Shared memory of processes that were killed.
//!
//! For each endpoint libfabric's `shm` keeps a file of about 4 MB, which it removes when the endpoint is closed: that of a process that
//! was killed stays, and a container has 64 MB. The number in its name does not say whether the process lives, as in another PID
//! namespace it is another's. But the kernel knows whether anybody has the file open, or mapped, wherever they are: it grants
//! a lease for reading only on a file that nobody has open for writing.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// Where libfabric keeps them.
pub(crate) const FOLDER: &str = "/dev/shm";
/// The most files that are looked at.
const MOST: usize = 4096;
/// `fcntl`'s command that says by which signal somebody learns that a lease is in another's way.
const F_SETSIG: i32 = 10;

/// Removes the files below `folder` that libfabric's shared memory keeps for endpoints of this user, and that nobody has open.
pub(crate) fn sweep(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten().take(MOST) {
        if let Some(process) = entry.file_name().to_str().and_then(process_of)
            && test_kill_process(process) == Err(Errno::SRCH)
            && let Ok(true) = remove(&entry.path(), process)
        {
            tracing::info!(file = %entry.path().display(), "removed the shared memory of a process that was killed");
        }
    }
}

/// The process of a file of this name: `<process>:<user>:<endpoint>`.
fn process_of(name: &str) -> Option<Pid> {
    let mut numbers = name.split(':').map(|number| number.parse::<u32>().ok());
    let process = numbers.next()??;
    (numbers.next()?.is_some() && numbers.next()?.is_some() && numbers.next().is_none())
        .then(|| Pid::from_raw(process.cast_signed()))?
}

/// Removes a file, if it is of that process and nobody has it open. Says whether it did.
fn remove(path: &Path, process: Pid) -> std::io::Result<bool> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path)?;
    let (found, mut start) = (file.metadata()?, [0; 8]);
    file.read_exact_at(&mut start, 0)?;
    // It begins with versions and flags, and the number of the process.
    let owner = i32::from_ne_bytes([start[4], start[5], start[6], start[7]]);
    if !found.is_file() || owner != process.as_raw_nonzero().get() || !is_unused(&file) {
        return Ok(false);
    }
    // Whoever opens it by its name from now on waits until it is closed here.
    let still = std::fs::symlink_metadata(path)?;
    let same = (still.dev(), still.ino()) == (found.dev(), found.ino());
    if same {
        std::fs::remove_file(path)?;
    }
    Ok(same)
}

/// Takes a lease on a file, which ends when it is closed: nobody has it open for writing. A file of another user, or a kernel that
/// gives no leases, says no.
fn is_unused(file: &File) -> bool {
    let set = |descriptor: RawFd, command: i32, value: i32| {
        // SAFETY: the descriptor is open, and both commands take a number.
        unsafe { libc::fcntl(descriptor, command, value) == 0 }
    };
    let descriptor = file.as_raw_fd();
    // Who opens it meanwhile has this process told, by a signal that does nothing; the usual one would end it.
    set(descriptor, F_SETSIG, libc::SIGURG) && set(descriptor, libc::F_SETLEASE, libc::F_RDLCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_has_open_and_no_living_process_is_named_by_is_removed() {
        let folder = Path::new(FOLDER).join(format!("kvx-leftovers-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (dead, here) = (child.id(), std::process::id());
        let make = |name: String, process: u32| {
            let start = [[4, 0, 1, 0], process.to_ne_bytes()];
            std::fs::write(folder.join(&name), start.as_flattened()).unwrap();
            name
        };
        let unused = make(format!("{dead}:0:0"), dead);
        let open = make(format!("{dead}:0:1"), dead);
        let kept = [
            make(format!("{here}:0:0"), here),
            make(format!("{dead}:0:2"), here), // another's in fact
            make(format!("{dead}:0"), dead),
            make(format!("{dead}:0:0:0"), dead),
            make("psm2_shm.1".to_owned(), dead),
        ];
        let is_there = |name: &String| folder.join(name).exists();
        let writing = OpenOptions::new().write(true).open(folder.join(&open)).unwrap();
        sweep(&folder);
        assert!(!is_there(&unused) && is_there(&open) && kept.iter().all(is_there));
        drop(writing);
        sweep(&folder);
        assert!(!is_there(&open) && kept.iter().all(is_there));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
