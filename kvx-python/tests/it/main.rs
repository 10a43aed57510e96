//! The integration tests of the Python module `kvx._kvx`: Python drives both halves of two engines,
//! as `kvx/vllm.py` does inside vLLM. `cargo xtask interop vllm --connector kvx` runs vLLM itself.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use kvx_testkit::{Child, harness_main, skip, test};

/// The limit of each test.
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    harness_main([])
}

/// The Python package with the library of this build, in a folder that is removed on drop.
struct Package(PathBuf);

impl Package {
    fn new(name: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let built = program.parent().unwrap().join("libkvx_python.so");
        let folder = std::env::temp_dir().join(kvx_testkit::unique(name));
        std::fs::create_dir_all(folder.join("kvx")).unwrap();
        symlink(built, folder.join("kvx/_kvx.abi3.so")).unwrap();
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/kvx");
        for entry in std::fs::read_dir(sources).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "py") {
                symlink(&path, folder.join("kvx").join(path.file_name().unwrap())).unwrap();
            }
        }
        Package(folder)
    }
}

impl Drop for Package {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Runs a function of `halves.py`.
fn python(name: &'static str) {
    let package = Package::new("py");
    let mut command = Command::new("python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/halves.py")).arg(name);
    command.env("PYTHONPATH", &package.0).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("TMPDIR", &package.0).env_remove("XDG_RUNTIME_DIR");
    let child = match Child::start(command) {
        Ok(child) => child,
        Err(why) => return skip(name, &format!("python3: {why}"), "install python3"),
    };
    let said = child.hear(LIMIT).unwrap();
    assert_eq!(said, format!("{name}: as expected"));
}

#[test]
fn a_prompt_moves_between_two_engines() {
    python("a_prompt_moves_between_two_engines");
}

#[test]
fn parameters_that_were_used_fail_the_second_load() {
    python("parameters_that_were_used_fail_the_second_load");
}

#[test]
fn an_expired_lease_fails_the_load_and_never_fills_blocks() {
    python("an_expired_lease_fails_the_load_and_never_fills_blocks");
}

#[test]
fn a_request_that_is_aborted_while_it_loads_is_reported_once() {
    python("a_request_that_is_aborted_while_it_loads_is_reported_once");
}

#[test]
fn parameters_of_the_wrong_form_are_not_used() {
    python("parameters_of_the_wrong_form_are_not_used");
}

#[test]
fn a_restarted_prefill_with_the_same_name_is_not_taken_for_the_old_one() {
    python("a_restarted_prefill_with_the_same_name_is_not_taken_for_the_old_one");
}

#[test]
fn a_forked_child_and_reports_of_another_version_are_refused() {
    python("a_forked_child_and_reports_of_another_version_are_refused");
}

#[test]
fn a_lost_worker_fails_its_engine() {
    python("a_lost_worker_fails_its_engine");
}

#[test]
fn a_producer_loads_nothing() {
    python("a_producer_loads_nothing");
}

#[test]
fn adopted_memory_works_as_a_pool_does() {
    python("adopted_memory_works_as_a_pool_does");
}

#[test]
fn an_idle_step_wakes_no_thread() {
    python("an_idle_step_wakes_no_thread");
}
