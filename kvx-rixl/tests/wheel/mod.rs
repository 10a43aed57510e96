//! The releases of NIXL that tests run on: wheels below the folder that cargo builds in.
//!
//! A process opens one of them, which `KVX_RIXL_LIB` names: so tests start their program again with that variable set.
#![allow(dead_code, reason = "each test program uses its part")]

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use kvx_testkit::Tier;

/// Why nothing runs without it, and what to do.
pub(crate) const ABSENT: (&str, &str) =
    ("a wheel of nixl-cu12 is not installed", "cargo xtask test --install");

/// The release that most tests run on, and whose Python is the other end of some: the folder of its environment, as
/// `cargo xtask test --install` names it.
pub(crate) const NEWEST: &str = "nixl";
/// One with the C interface that RIXL has, to the letter: refusals of all kinds are one.
pub(crate) const AS_RIXL: &str = "nixl-1.1";

/// The releases that tests run on in this run's tier.
fn of_this_run() -> impl Iterator<Item = &'static str> {
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
        let mut files =
            pythons.map(|python| python.path().join("site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so"));
        files.find(|file| file.exists())
    })
}

/// Its Python.
pub(crate) fn python() -> Option<PathBuf> {
    environments(NEWEST).map(|environment| environment.join("bin/python")).find(|python| python.exists())
}

/// This program, over a library.
fn again(library: &Path) -> Command {
    let mut again = Command::new(std::env::current_exe().expect("the running program has a path"));
    // NIXL and UCX talk; what they say of the ends of peers is what the tests are about.
    again.env("KVX_RIXL_LIB", library).env("NIXL_LOG_LEVEL", "fatal").env("UCX_LOG_LEVEL", "fatal");
    again
}

/// Starts this program again with `KVX_RIXL_LIB` set, unless it is. Call it first in `main`. `false`: there is no
/// wheel.
pub(crate) fn chosen() -> bool {
    if std::env::var_os("KVX_RIXL_LIB").is_some() {
        return true;
    }
    let Some(library) = library() else { return false };
    let mut again = again(&library);
    panic!("this program cannot be started again: {}", again.args(std::env::args_os().skip(1)).exec());
}

/// Set in a process that [`on_each`] has started: the release.
const RELEASE: &str = "KVX_RIXL_TEST_RELEASE";

/// Whether this process was started for this release.
pub(crate) fn is_for(release: &str) -> bool {
    std::env::var(RELEASE).is_ok_and(|chosen| chosen == release)
}

/// Starts this program again over each release of this run's tier, with the arguments that it was given; one that
/// hangs is killed after `limit`.
pub(crate) fn on_each(program: &str, limit: Duration) -> ExitCode {
    let mut all = ExitCode::SUCCESS;
    for release in of_this_run() {
        let Some(library) = library_of(release) else {
            kvx_testkit::skip(&format!("{program} over {release}"), ABSENT.0, ABSENT.1);
            continue;
        };
        let mut again = again(&library);
        again.args(std::env::args_os().skip(1)).env(RELEASE, release);
        let mut child = again.spawn().expect("this program starts again");
        kvx_testkit::kill_after(&child, limit);
        if !child.wait().expect("it is our child").success() {
            all = ExitCode::FAILURE;
        }
    }
    all
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
    alone_over(&[NEWEST], test, variables, body);
}

/// The same over each release of this run's tier.
pub(crate) fn alone_on_each(test: &str, body: impl FnOnce()) {
    alone_over(&Vec::from_iter(of_this_run()), test, &[], body);
}

fn alone_over(releases: &[&str], test: &str, variables: &[(&str, &Path)], body: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    for release in releases {
        let Some(library) = library_of(release) else {
            kvx_testkit::skip(test, ABSENT.0, ABSENT.1);
            continue;
        };
        let mut again = again(&library);
        again.args(["--exact", test, "--nocapture", "--test-threads=1"]);
        again.env(ALONE, "1").envs(variables.iter().copied());
        let output = kvx_testkit::output(&mut again, LIMIT);
        let [told, wrong] = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said));
        let passed = output.status.success() && told.contains("1 passed");
        assert!(passed, "{test} over {release}:\n{told}\n{wrong}");
    }
}
