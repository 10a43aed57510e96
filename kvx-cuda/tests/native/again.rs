//! Starts a test program again with the stand-in in the place of a maker's library.

use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// Under every name that the library is asked for by. Comes back at once where the first of `variables` is set: the
/// library that it names is to be tested.
pub(crate) fn with_the_stand_in(variables: &[&str]) {
    if std::env::var_os(variables[0]).is_some() {
        return;
    }
    let library = kvx_stand_in::library();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("names-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the folder for tests is writable");
    for name in ["libcuda.so", "libcuda.so.1"] {
        symlink(&library, folder.join(name)).expect("a new folder takes new names");
    }
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let mut command = Command::new(std::env::current_exe().expect("a program has a path"));
    command.args(std::env::args_os().skip(1));
    command.env("LD_LIBRARY_PATH", format!("{}:{path}", folder.display()));
    command.envs(variables.iter().map(|variable| (variable, &library)));
    panic!("this program cannot be started again: {}", command.exec());
}
