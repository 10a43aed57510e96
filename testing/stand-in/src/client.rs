//! The side of a test: where the library lies, and its commands.

use std::ffi::{CString, OsString, c_char};
use std::fmt;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The library, for `KVX_CUDA_LIB` and `KVX_HIP_LIB`. Cargo puts it beside the programs that depend
/// on this crate.
///
/// # Panics
/// Where it is not there: cargo has not built this program.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a program has a path");
    let folders = program.ancestors().skip(1).take(3);
    let mut places = folders.flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    let name = Path::new("libkvx_stand_in.so");
    let found = places.find_map(|folder| Some(folder.join(name)).filter(|path| path.is_file()));
    found.unwrap_or_else(|| panic!("no {} near {}", name.display(), program.display()))
}

/// Puts the library in the place of a maker's in a process that is to be started: each of
/// `variables` names it, and in `folder`, which is made if need be and goes before those of
/// `LD_LIBRARY_PATH`, it has the names by which others than kvx ask for NVIDIA's driver.
///
/// # Panics
/// Where the folder cannot be written.
pub fn stand_in(process: &mut Process, variables: &[&str], folder: &Path) {
    let library = library();
    std::fs::create_dir_all(folder).expect("the folder for tests is writable");
    for name in ["libcuda.so", "libcuda.so.1"] {
        let name = folder.join(name);
        std::fs::remove_file(&name).ok(); // of another run of this number, whose library may have gone
        symlink(&library, name).expect("the folder takes a name that it has not");
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

/// Starts this program again with the library in the place of a maker's. Comes back at once where
/// the first of `variables` is set: what it names is to be tested. `folder`: the test's own,
/// `CARGO_TARGET_TMPDIR`.
///
/// # Panics
/// Where the folder cannot be written, or the program not be started.
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
    panic!("this program cannot be started again: {}", again.exec());
}

/// The library's commands, in this process. The crate's front page lists them.
///
/// There is one at a time: what one test makes slow or broken, another would meet. Tests of a
/// process that use the library hold one each, and wait for each other. When it is dropped,
/// everything is as it was in the beginning, but for memory.
pub struct Control {
    command: Command,
    _alone: MutexGuard<'static, ()>,
}

type Command = unsafe extern "C" fn(*const c_char) -> i64;

impl Control {
    /// Opens the library, which from then on is also what `libcuda.so.1` means in this process.
    ///
    /// # Panics
    /// If it does not open.
    pub fn open() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let library = library();
        let path =
            CString::new(library.as_os_str().as_encoded_bytes()).expect("a path has no zero byte");
        // SAFETY: the path is a C string, and the library runs nothing when it is opened. It stays
        // open.
        let opened = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!opened.is_null(), "{} opens", library.display());
        // SAFETY: the library is open and the name a C string.
        let found = unsafe { libc::dlsym(opened, c"kvx_stand_in_control".as_ptr()) };
        assert!(!found.is_null(), "{} is a stand-in", library.display());
        // SAFETY: this is the function's type, and it is not null.
        let command = unsafe { std::mem::transmute::<*mut libc::c_void, Command>(found) };
        Control { command, _alone: alone }
    }

    /// Does one command; its answer.
    ///
    /// # Panics
    /// For one that there is not.
    pub fn command(&self, command: &str) -> i64 {
        let text = CString::new(command).expect("commands have no zero byte");
        // SAFETY: it takes a C string and keeps nothing of it.
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

    /// Returns how often memory was misused: used after it was freed, freed twice, or used out of
    /// bounds.
    pub fn faults(&self) -> u64 {
        self.command("faults") as u64
    }

    /// Bytes of device memory that were allocated and not freed.
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
