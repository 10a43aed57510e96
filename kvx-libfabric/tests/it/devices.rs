//! Tests device memory that libfabric's providers cannot access.

use kvx_core::{Options, Registry};
use kvx_testkit::device::goes_elsewhere;
use kvx_testkit::test;

#[test]
fn memory_that_a_provider_does_not_reach_is_refused_and_goes_over_tcp() {
    let mut registry = Registry::new();
    registry.add(kvx_libfabric::Libfabric).unwrap().add(kvx_native::Tcp).unwrap();
    for provider in ["tcp;ofi_rxm", "shm"] {
        let options = format!(r#"{{"libfabric": {{"provider": "{provider}"}}}}"#);
        if let Err(why) = registry.require("LIBFABRIC", &Options::parse(&options).unwrap()) {
            let test = "memory_that_a_provider_does_not_reach_is_refused_and_goes_over_tcp";
            return kvx_testkit::skip(
                test,
                &why.to_string(),
                "cargo xtask test --install on Debian 12",
            );
        }
        goes_elsewhere(&registry, "LIBFABRIC", "TCP", &options)
            .unwrap_or_else(|why| panic!("{provider}: {why}"));
    }
}
