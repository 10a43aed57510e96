//! The releases of NIXL that tests run on: wheels below the folder that cargo builds in.
//!
//! A process opens one of them, which `KVX_RIXL_LIB` names: so tests start their program again with
//! that variable set.
#![allow(dead_code, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvx_testkit::Tier;

/// Why nothing runs without it, and what to do.
pub(crate) const ABSENT: (&str, &str) =
    ("a wheel of nixl-cu12 is not installed", "cargo xtask test --install");

/// The release that most tests run on, and whose Python is the other end of some: the folder of its
/// environment, as `cargo xtask test --install` names it.
pub(crate) const NEWEST: &str = "nixl";
/// One with the C interface that RIXL has, to the letter: refusals of all kinds are one.
pub(crate) const AS_RIXL: &str = "nixl-1.1";

/// The releases that tests run on in this run's tier.
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

/// Its `libnixl_capi.so`.
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

/// Its Python.
pub(crate) fn python() -> Option<PathBuf> {
    environments(NEWEST)
        .map(|environment| environment.join("bin/python"))
        .find(|python| python.exists())
}

/// This program, over a library.
fn again(library: &Path) -> Command {
    let mut again = Command::new(std::env::current_exe().expect("the running program has a path"));
    // NIXL and UCX talk; what they say of the ends of peers is what the tests are about.
    again.env("KVX_RIXL_LIB", library).env("NIXL_LOG_LEVEL", "fatal").env("UCX_LOG_LEVEL", "fatal");
    again
}

/// This program again, to run over a release.
///
/// # Errors
/// Reason and cure when its wheel is not installed.
pub(crate) fn command(release: &str) -> Result<Command, (&'static str, &'static str)> {
    library_of(release).map(|library| again(&library)).ok_or(ABSENT)
}

/// Set in a process that [`alone`] has started.
const ALONE: &str = "KVX_RIXL_TEST_ALONE";
/// How long such a process may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns whether this process is one of those.
pub(crate) fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs `body`, that of the test of this full name, with NIXL in a process of its own.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    alone_with(test, &[], body);
}

/// The same with these variables.
pub(crate) fn alone_with(test: &str, variables: &[(&str, &Path)], body: impl FnOnce()) {
    alone_over(&[NEWEST], test, variables, body);
}

/// The same over each release of this run's tier.
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
