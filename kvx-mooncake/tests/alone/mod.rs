//! Tests that need a process of their own: a process opens one library, has one environment, and keeps one log of the
//! engine.

use std::ffi::OsStr;
use std::process::Command;
use std::time::Duration;

/// Set in such a process.
const ALONE: &str = "KVX_MOONCAKE_TEST_ALONE";
/// How long it may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Whether this process is one.
pub(crate) fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs the test of this name in a process with these variables, and no others that choose a library.
pub(crate) fn run_alone(test: &str, variables: &[(&str, &OsStr)]) {
    let mut again = Command::new(std::env::current_exe().expect("a program knows where it lies"));
    again.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    again.env_remove("KVX_MOONCAKE_LIB").env_remove("KVX_MOONCAKE_ENGINE");
    again.env(ALONE, "1").envs(variables.iter().copied());
    let output = kvx_testkit::output(&mut again, LIMIT);
    let (told, wrong) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && told.contains("1 passed"), "{test}:\n{told}\n{wrong}");
}
