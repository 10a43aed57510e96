//! Shared by test programs in two processes.

use std::time::Duration;

use kvx_core::{Options, Registry};
use kvx_testkit::{Check, Mode, Setup, run, serve_if_asked, skip};

pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_libfabric::Libfabric).expect("one name");
    registry
}

/// Options that name a provider.
pub(crate) fn options(provider: &str) -> String {
    format!(r#"{{"libfabric": {{"provider": "{provider}"}}}}"#)
}

/// Runs a program's one test over a provider, or skips it where libfabric is not.
pub(crate) fn check(name: &str, provider: &str, test: impl AsyncFnOnce(Setup) -> Check) -> Check {
    serve_if_asked(registry);
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
