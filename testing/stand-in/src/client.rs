//! The Rust API for tests: the library's path, and its commands.

use std::ffi::{CString, OsString, c_char};
use std::fmt;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Returns the path of the library, for `KVX_CUDA_LIB` and `KVX_HIP_LIB`. Cargo puts it next to the
/// programs that depend on this crate.
///
/// # Panics
/// Panics if the library is not there, because cargo has not built this program.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a program has a path");
    let folders = program.ancestors().skip(1).take(3);
    let mut places = folders.flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    let name = Path::new("libkvx_stand_in.so");
    let found = places.find_map(|folder| Some(folder.join(name)).filter(|path| path.is_file()));
    found.unwrap_or_else(|| panic!("no {} near {}", name.display(), program.display()))
}

/// Replaces a vendor's driver by the library in a process to start. Each of `variables` is set to
/// its path. `folder`, which is created if necessary and precedes the folders of `LD_LIBRARY_PATH`,
/// contains it under the names with which other programs open NVIDIA's driver.
///
/// # Panics
/// Panics if the folder cannot be written.
pub fn stand_in(process: &mut Process, variables: &[&str], folder: &Path) {
    let library = library();
    std::fs::create_dir_all(folder).expect("the folder for tests is writable");
    for name in ["libcuda.so", "libcuda.so.1"] {
        let name = folder.join(name);
        std::fs::remove_file(&name).ok(); // left by an earlier process with the same id
        symlink(&library, name).expect("the name is not in the folder yet");
    }
    let mut folders = OsString::from(folder);
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH").filter(|others| !others.is_empty()) {
        folders.push(":");
        folders.push(others);
    }
    process
        .env("LD_LIBRARY_PATH", folders)
        .envs(variables.iter().map(|variable| (variable, &library)));
}

/// Starts this program again with the library in place of a vendor's driver. Returns at once if the
/// first of `variables` is set, because then the test is about that library. `folder` is the test's
/// `CARGO_TARGET_TMPDIR`.
///
/// # Panics
/// Panics if the folder cannot be written, or the program cannot be started.
pub fn start_again(variables: &[&str], folder: &str) {
    if std::env::var_os(variables[0]).is_some() {
        return;
    }
    let mut again = Process::new(std::env::current_exe().expect("a program has a path"));
    again.args(std::env::args_os().skip(1));
    stand_in(
        &mut again,
        variables,
        &Path::new(folder).join(format!("names-{}", std::process::id())),
    );
    panic!("cannot start this program again: {}", again.exec());
}

/// The library's commands, in this process. The crate's documentation lists them.
///
/// There is only one at a time, because one test's delays and faults would affect another. Tests of
/// a process that use the library hold one each, and wait for each other. Dropping it restores the
/// initial state, except for memory.
pub struct Control {
    command: Command,
    _alone: MutexGuard<'static, ()>,
}

type Command = unsafe extern "C" fn(*const c_char) -> i64;

impl Control {
    /// Opens the library, which from then on is also `libcuda.so.1` in this process.
    ///
    /// # Panics
    /// Panics if the library does not open.
    pub fn open() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = library();
        let path =
            CString::new(library.as_os_str().as_encoded_bytes()).expect("a path has no zero byte");
        // SAFETY: the path is a C string, and the library has no initialisers. It stays open.
        let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!opened.is_null(), "{} opens", library.display());
        // SAFETY: the library is open, and the name is a C string.
        let found = unsafe { libc::dlsym(opened, c"kvx_stand_in_control".as_ptr()) };
        assert!(!found.is_null(), "{} is not a stand-in", library.display());
        // SAFETY: the symbol is not null and has the type `Command`.
        let command = unsafe { std::mem::transmute::<*mut libc::c_void, Command>(found) };
        Control { command, _alone: alone }
    }

    /// Executes a command and returns its answer.
    ///
    /// # Panics
    /// Panics if there is no such command.
    pub fn command(&self, command: &str) -> i64 {
        let text = CString::new(command).expect("commands have no zero byte");
        // SAFETY: the function takes a C string and does not keep it.
        let answer = unsafe { (self.command)(text.as_ptr()) };
        assert!(answer >= 0, "there is no command `{command}`");
        answer
    }

    /// Makes the next calls of a function fail.
    pub fn fail(&self, function: &str, code: i32, times: u32) {
        self.command(&format!("fail {function} {code} {times}"));
    }

    /// Returns how often a function was called.
    pub fn calls(&self, function: &str) -> u64 {
        self.command(&format!("calls {function}")) as u64
    }

    /// Returns how often a function was called by threads whose name begins with `thread`.
    pub fn calls_by(&self, function: &str, thread: &str) -> u64 {
        self.command(&format!("calls {function} {thread}")) as u64
    }

    /// Returns how often memory was misused: used after it was freed, freed twice, or used out of
    /// bounds.
    pub fn faults(&self) -> u64 {
        self.command("faults") as u64
    }

    /// Returns the bytes of device memory that were allocated and not freed.
    pub fn allocated(&self) -> u64 {
        self.command("allocated") as u64
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.command("reset");
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Control")
    }
}
