//! Shared by test programs over shared memory in two processes.

use std::time::Duration;

use kvx_core::{Options, Registry};
use kvx_testkit::{Check, Mode, Setup, run, serve_if_asked, skip};

const OPTIONS: &str = r#"{"libfabric": {"provider": "shm"}}"#;
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_libfabric::Libfabric).expect("one name");
    registry
}

/// Runs a program's one test, or skips it where libfabric is not.
pub(crate) fn check(name: &str, test: impl AsyncFnOnce(Setup) -> Check) -> Check {
    serve_if_asked(registry);
    match registry("").require("LIBFABRIC", &Options::parse(OPTIONS)?) {
        Ok(_) => {
            let setup = Setup::new(registry, "", "LIBFABRIC", Mode::TwoProcesses);
            run(test(Setup { options: OPTIONS.to_owned(), ..setup }))
        }
        Err(why) => {
            skip(name, &why.to_string(), "cargo xtask test --install on Debian 12");
            Ok(())
        }
    }
}
