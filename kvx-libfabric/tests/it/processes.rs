//! Helpers for tests of two processes.

use std::time::Duration;

use kvx_core::Options;
use kvx_testkit::{Check, Mode, Setup, run, skip};

use crate::registry;

pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Returns options that name a provider.
pub(crate) fn options(provider: &str) -> String {
    format!(r#"{{"libfabric": {{"provider": "{provider}"}}}}"#)
}

/// Runs the named test over a provider, or skips it if libfabric is not installed.
pub(crate) fn check(name: &str, provider: &str, test: impl AsyncFnOnce(Setup) -> Check) -> Check {
    let options = options(provider);
    match registry("").require("LIBFABRIC", &Options::parse(&options)?) {
        Ok(_) => {
            let setup = Setup::new(registry, "", "LIBFABRIC", Mode::TwoProcesses);
            run(test(Setup { options, ..setup }))
        }
        Err(why) => {
            skip(name, &why.to_string(), "cargo xtask test --install on Debian 12");
            Ok(())
        }
    }
}
