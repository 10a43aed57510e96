//! The NIXL that tests run on: the wheel below the folder that cargo builds in.
#![allow(dead_code, reason = "each test program uses its part")]

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Why nothing runs without it, and what to do.
pub(crate) const ABSENT: (&str, &str) =
    ("the wheel nixl-cu12 is not installed", "cargo xtask test --install");

fn environments() -> impl Iterator<Item = PathBuf> {
    let program = std::env::current_exe().expect("the running program has a path");
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let targets: Vec<PathBuf> = program.ancestors().map(Path::to_owned).chain([usual]).collect();
    targets.into_iter().map(|target| target.join("peers/nixl/venv"))
}

/// Its `libnixl_capi.so`.
pub(crate) fn library() -> Option<PathBuf> {
    environments().find_map(|environment| {
        let pythons = std::fs::read_dir(environment.join("lib")).ok()?.flatten();
        let mut files =
            pythons.map(|python| python.path().join("site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so"));
        files.find(|file| file.exists())
    })
}

/// Its Python.
pub(crate) fn python() -> Option<PathBuf> {
    environments().map(|environment| environment.join("bin/python")).find(|python| python.exists())
}

/// Starts this program again with `KVX_RIXL_LIB` set, unless it is. Call it first in `main`. `false`: there is no wheel.
pub(crate) fn chosen() -> bool {
    if std::env::var_os("KVX_RIXL_LIB").is_some() {
        return true;
    }
    let Some(library) = library() else { return false };
    let program = std::env::current_exe().expect("the running program has a path");
    let mut again = Command::new(program);
    again.args(std::env::args_os().skip(1)).env("KVX_RIXL_LIB", library);
    // NIXL and UCX talk; what they say of the ends of peers is what the tests are about.
    again.env("NIXL_LOG_LEVEL", "fatal").env("UCX_LOG_LEVEL", "fatal");
    panic!("this program cannot be started again: {}", again.exec());
}

/// Set in a process that [`alone`] has started.
const ALONE: &str = "KVX_RIXL_TEST_ALONE";
/// How long such a process may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs `body`, that of the test of this full name, with NIXL in a process of its own.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    alone_with(test, &[], body);
}

/// The same with these variables.
pub(crate) fn alone_with(test: &str, variables: &[(&str, &Path)], body: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let Some(library) = library() else { return kvx_testkit::skip(test, ABSENT.0, ABSENT.1) };
    let program = std::env::current_exe().expect("the running program has a path");
    let mut again = Command::new(program);
    again.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    again.env(ALONE, "1").env("KVX_RIXL_LIB", library).envs(variables.iter().copied());
    again.env("NIXL_LOG_LEVEL", "fatal").env("UCX_LOG_LEVEL", "fatal");
    let output = kvx_testkit::output(&mut again, LIMIT);
    let (told, wrong) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && told.contains("1 passed"), "{test}:\n{told}\n{wrong}");
}
