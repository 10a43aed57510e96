//! The libraries of the backends. Engines load them, and so does a child process that reports a
//! backend's status. The process of the tests never does, because one library brings another
//! version of a dependency of the next.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvx::Capabilities;
use kvx_core::Revocation;
use kvx_testkit::Child;
use serde::{Deserialize, Serialize};

use crate::engines::{adapter, wheel};

/// The environment variable of a child process that names the backend whose status it reports.
pub(crate) const VARIABLE: &str = "KVX_TEST_STANDING";
/// The time limit for loading a library.
const LIMIT: Duration = Duration::from_secs(60);

/// The properties of an available backend that the tests use.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Standing {
    pub(crate) version: String,
    /// Reads settle while the peer is stopped.
    pub(crate) reads_settle_alone: bool,
    /// Writes settle while the peer is stopped.
    pub(crate) writes_settle_alone: bool,
    /// True if the owner of memory can revoke it without the peer.
    pub(crate) owner_revokes: bool,
}

/// Returns the environment of a process that loads the tests' Mooncake and NIXL, unless the
/// environment of this process names others.
pub(crate) fn variables() -> Vec<(&'static str, OsString)> {
    let mut variables = Vec::new();
    let is_named = |name: &str| std::env::var_os(name).is_some();
    if let Some(adapter) = adapter::adapter().filter(|_| !is_named("KVX_MOONCAKE_LIB")) {
        variables.push(("KVX_MOONCAKE_LIB", adapter.into()));
    }
    if let Some(library) = wheel::library().filter(|_| !is_named("KVX_RIXL_LIB")) {
        // NIXL and UCX log the loss of peers, which these tests cause on purpose.
        let fatal = || OsString::from("fatal");
        variables.extend([("NIXL_LOG_LEVEL", fatal()), ("UCX_LOG_LEVEL", fatal())]);
        variables.push(("KVX_RIXL_LIB", library.into()));
    }
    variables
}

/// Returns whether a Python environment has all of these packages.
pub(crate) fn has_packages(environment: &Path, packages: [&str; 3]) -> bool {
    packages.into_iter().all(|package| {
        let pythons = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
        pythons.into_iter().any(|python| python.path().join("site-packages").join(package).exists())
    })
}

/// Returns the status of this backend in a child process that loads these libraries. The child
/// process runs once per backend.
///
/// # Errors
/// Returns the reason if the backend cannot be used.
pub(crate) fn status(backend: &str) -> Result<Standing, String> {
    static KNOWN: Mutex<Option<HashMap<String, Result<Standing, String>>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    known.entry(backend.to_owned()).or_insert_with(|| ask(backend)).clone()
}

fn ask(backend: &str) -> Result<Standing, String> {
    let program = std::env::current_exe().map_err(|why| why.to_string())?;
    let mut command = Command::new(program);
    command.env(VARIABLE, backend).envs(variables());
    let line = Child::start(command).and_then(|child| child.hear(LIMIT));
    let line =
        line.unwrap_or_else(|why| panic!("a process that loads the library of {backend}: {why}"));
    serde_json::from_str(&line).unwrap_or_else(|why| panic!("{backend}: {line}: {why}"))
}

/// Reports the status of a backend and exits.
pub(crate) fn answer(backend: &str) -> ! {
    let mut answers = kvx_testkit::answers_apart().expect("the standard output can be duplicated");
    let registry = kvx::registry();
    let standing = match registry.require(backend, &kvx::Options::default()) {
        Ok((_, found)) => {
            let Capabilities { settles_without_peer, revocation, .. } = found.capabilities;
            Ok(Standing {
                version: found.version.to_string(),
                reads_settle_alone: settles_without_peer.read,
                writes_settle_alone: settles_without_peer.write,
                owner_revokes: revocation == Revocation::Owner,
            })
        }
        Err(why) => Err(why.to_string()),
    };
    writeln!(answers, "{}", serde_json::to_string(&standing).expect("it is JSON")).ok();
    std::process::exit(0);
}
