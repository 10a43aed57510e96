//! Device memory that NIXL's plugin does not reach.

mod wheel;

use std::process::ExitCode;

use kvx_core::Registry;
use kvx_testkit::device::goes_elsewhere;
use kvx_testkit::skip;
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let name = "memory_that_nixl_does_not_reach_is_refused_and_goes_over_tcp";
    if !wheel::chosen() {
        skip(name, wheel::ABSENT.0, wheel::ABSENT.1);
        return ExitCode::SUCCESS;
    }
    let test = Trial::test(name, || {
        let mut registry = Registry::new();
        registry.add(kvx_rixl::Rixl)?.add(kvx_native::Tcp)?;
        let options = r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo"}}}"#;
        Ok(goes_elsewhere(&registry, "RIXL", "TCP", options).map_err(|why| why.to_string())?)
    });
    libtest_mimic::run(&Arguments::from_args(), vec![test]).exit_code()
}
