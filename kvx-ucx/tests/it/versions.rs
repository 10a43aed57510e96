//! The versions of UCX that tests run on: Debian's 1.13, the wheel's 1.22, and 1.23 from NIXL's
//! wheel; over RDMA, 1.20 from another wheel.
//!
//! A process can load only one UCX, the one that `KVX_UCX_LIB` names at that time. So a test
//! program starts itself once per version, with that variable and [`CHILD`] set.

#![allow(dead_code, reason = "each program that shares this uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvx_testkit::Tier;

/// Set in a child: the version's label.
const CHILD: &str = "KVX_UCX_TEST_VERSION";

/// A version that tests run on.
pub(crate) struct Version {
    /// The label in test names.
    pub(crate) label: &'static str,
    /// Major and minor number as `ucp_get_version` reports them.
    pub(crate) number: (u32, u32),
    /// True if its process crashes in exit handlers after a success. The network library that
    /// NIXL's wheel includes for its card modules does that when it is loaded without NIXL.
    pub(crate) ends_badly: bool,
    /// The lowest tier that includes it; `None` if only `cargo xtask rdma` runs its suites.
    tier: Option<Tier>,
    cure: &'static str,
    file: fn() -> Option<PathBuf>,
}

/// The label of the version that runs over RDMA cards.
pub(crate) const VERBS: &str = "UCX-verbs";

const INSTALL: &str = "cargo xtask test --install";

pub(crate) const VERSIONS: &[Version] = &[
    Version {
        label: "UCX-1.13",
        number: (1, 13),
        ends_badly: false,
        tier: Some(Tier::Whole),
        cure: INSTALL,
        file: debian,
    },
    Version {
        label: "UCX-1.22",
        number: (1, 22),
        ends_badly: false,
        tier: Some(Tier::Usual),
        cure: INSTALL,
        file: wheel,
    },
    Version {
        label: "UCX-1.23",
        number: (1, 23),
        ends_badly: true,
        tier: Some(Tier::Whole),
        cure: INSTALL,
        file: nixl,
    },
    // From the wheel mpich, with RDMA.
    Version {
        label: VERBS,
        number: (1, 20),
        ends_badly: false,
        tier: None,
        cure: "cargo xtask rdma",
        file: named,
    },
];

/// Returns the versions that this run's tier includes.
pub(crate) fn of_this_run() -> impl Iterator<Item = &'static Version> {
    VERSIONS
        .iter()
        .filter(|version| version.tier.is_some_and(|tier| tier.runs_or_says(version.label)))
}

/// Returns the version that this process was started for; `None` in the parent.
pub(crate) fn chosen() -> Option<&'static Version> {
    let label = std::env::var(CHILD).ok()?;
    Some(
        VERSIONS
            .iter()
            .find(|version| version.label == label)
            .expect("a child's label is one of the list"),
    )
}

impl Version {
    /// Returns its `libucp.so.0`.
    ///
    /// # Errors
    /// Reason and remedy if it is missing.
    pub(crate) fn library(&self) -> Result<PathBuf, (String, &'static str)> {
        (self.file)()
            .ok_or_else(|| (format!("{}: its library is not installed", self.label), self.cure))
    }

    /// Returns a command that starts this test program on this version; the caller adds arguments.
    ///
    /// # Errors
    /// Reason and remedy if the library is missing.
    pub(crate) fn command(&self) -> Result<Command, (String, &'static str)> {
        let file = self.library()?;
        let mut command =
            Command::new(std::env::current_exe().expect("the running program has a path"));
        command.env(CHILD, self.label).env("KVX_UCX_LIB", file);
        Ok(command)
    }
}

/// Calls `body` for each version that is installed and exits cleanly. Reports the others as skipped
/// parts of `test`.
pub(crate) fn with_each_installed(test: &str, body: impl Fn(&Version)) {
    for version in of_this_run().filter(|version| !version.ends_badly) {
        match version.command() {
            Ok(_) => body(version),
            Err((reason, cure)) => kvx_testkit::skip(test, &reason, cure),
        }
    }
}

/// The time limit of a test on one version.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs `test`, the full name of a test, in a process for each version; that process calls `body`.
pub(crate) fn on_each(test: &str, body: impl FnOnce(&Version)) {
    if let Some(version) = chosen() {
        return body(version);
    }
    for version in of_this_run() {
        match version.command() {
            Ok(mut command) => {
                // UCX logs on standard output by default, into the middle of the harness's lines.
                let child = command.env("UCX_LOG_FILE", "stderr");
                let child = child.args(["--exact", test, "--nocapture", "--test-threads=1"]);
                if let Err(failure) = kvx_testkit::run_one_test(test, child, LIMIT) {
                    let told = failure.to_string();
                    // Its process may crash after the test.
                    let passed =
                        version.ends_badly && told.contains(kvx_testkit::DIED_AFTER_PASSING);
                    assert!(passed, "{test} on {}: {told}", version.label);
                }
            }
            Err((reason, cure)) => kvx_testkit::skip(test, &reason, cure),
        }
    }
}

/// Returns the system's library: 1.13 on Debian 12. Other systems may have other versions.
fn debian() -> Option<PathBuf> {
    let folders =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    folders.iter().map(|folder| Path::new(folder).join("libucp.so.0")).find(|file| file.exists())
}

/// Returns the library that the process was started with.
fn named() -> Option<PathBuf> {
    std::env::var_os("KVX_UCX_LIB").map(PathBuf::from)
}

/// Returns the wheel's library.
fn wheel() -> Option<PathBuf> {
    in_environment("ucx", "libucx/lib", "libucp.so.0")
}

/// Returns the library in NIXL's wheel, which has another name.
fn nixl() -> Option<PathBuf> {
    in_environment("nixl", "nixl_cu12.libs", "libucp-")
}

/// Returns the file in the environment of `peer` that `cargo xtask test --install` created below
/// cargo's target folder.
fn in_environment(peer: &str, folder: &str, name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let targets = program.ancestors().chain([usual.as_path()]);
    let mut environments = targets.map(|target| target.join("peers").join(peer).join("venv/lib"));
    environments.find_map(|environment| {
        let pythons = std::fs::read_dir(environment).ok()?.flatten();
        let folders = pythons.filter_map(|python| {
            std::fs::read_dir(python.path().join("site-packages").join(folder)).ok()
        });
        let mut files = folders.flatten().flatten().map(|entry| entry.path());
        files.find(|file| {
            file.file_name().is_some_and(|found| found.to_string_lossy().starts_with(name))
        })
    })
}
