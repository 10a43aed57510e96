//! The releases of NIXL that tests run on: wheels below cargo's target folder.
//!
//! A process can load only one of them, which `KVX_RIXL_LIB` names. So tests start their program
//! again with that variable set.
#![allow(dead_code, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvx_testkit::Tier;

/// The reason and remedy if it is not installed.
pub(crate) const ABSENT: (&str, &str) =
    ("a wheel of nixl-cu12 is not installed", "cargo xtask test --install");

/// The release that most tests run on, and whose Python is the peer of some: the folder of its
/// environment, as `cargo xtask test --install` names it.
pub(crate) const NEWEST: &str = "nixl";
/// A release with exactly RIXL's C interface: all errors have the same code.
pub(crate) const AS_RIXL: &str = "nixl-1.1";

/// Returns the releases that this run's tier includes.
pub(crate) fn of_this_run() -> impl Iterator<Item = &'static str> {
    [(NEWEST, Tier::Fast), (AS_RIXL, Tier::Whole)]
        .into_iter()
        .filter_map(|(release, tier)| tier.runs_or_says(release).then_some(release))
}

fn environments(release: &str) -> impl Iterator<Item = PathBuf> {
    let program = std::env::current_exe().expect("the running program has a path");
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let targets: Vec<PathBuf> = program.ancestors().map(Path::to_owned).chain([usual]).collect();
    targets.into_iter().map(move |target| target.join("peers").join(release).join("venv"))
}

/// Returns its `libnixl_capi.so`.
pub(crate) fn library() -> Option<PathBuf> {
    library_of(NEWEST)
}

fn library_of(release: &str) -> Option<PathBuf> {
    environments(release).find_map(|environment| {
        let pythons = std::fs::read_dir(environment.join("lib")).ok()?.flatten();
        let mut files = pythons.map(|python| {
            python.path().join("site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so")
        });
        files.find(|file| file.exists())
    })
}

/// Returns its Python.
pub(crate) fn python() -> Option<PathBuf> {
    environments(NEWEST)
        .map(|environment| environment.join("bin/python"))
        .find(|python| python.exists())
}

/// Returns a command that starts this program over a library.
fn again(library: &Path) -> Command {
    let mut again = Command::new(std::env::current_exe().expect("the running program has a path"));
    // The tests themselves check how peers end, so NIXL and UCX need not log it.
    again.env("KVX_RIXL_LIB", library).env("NIXL_LOG_LEVEL", "fatal").env("UCX_LOG_LEVEL", "fatal");
    again
}

/// Returns a command that starts this program over a release.
///
/// # Errors
/// Reason and remedy if its wheel is not installed.
pub(crate) fn command(release: &str) -> Result<Command, (&'static str, &'static str)> {
    library_of(release).map(|library| again(&library)).ok_or(ABSENT)
}

/// Set in a process that [`alone`] has started.
const ALONE: &str = "KVX_RIXL_TEST_ALONE";
/// The time limit of such a process.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns whether this process is one of those.
pub(crate) fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs `body`, of the test with this full name, with NIXL in its own process.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    alone_with(test, &[], body);
}

/// Works like [`alone`], with these variables.
pub(crate) fn alone_with(test: &str, variables: &[(&str, &Path)], body: impl FnOnce()) {
    alone_over(&[NEWEST], test, variables, body);
}

/// Works like [`alone`], over each release of this run's tier.
pub(crate) fn alone_on_each(test: &str, body: impl FnOnce()) {
    alone_over(&Vec::from_iter(of_this_run()), test, &[], body);
}

fn alone_over(releases: &[&str], test: &str, variables: &[(&str, &Path)], body: impl FnOnce()) {
    if is_alone() {
        return body();
    }
    for release in releases {
        let mut again = match command(release) {
            Ok(again) => again,
            Err((reason, cure)) => {
                kvx_testkit::skip(test, reason, cure);
                continue;
            }
        };
        again.args(["--exact", test, "--nocapture", "--test-threads=1"]);
        again.env(ALONE, "1").envs(variables.iter().copied());
        if let Err(failure) = kvx_testkit::run_one_test(test, &mut again, LIMIT) {
            panic!("{test} over {release}: {failure}");
        }
    }
}
