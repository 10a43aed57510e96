//! Device memory that UCX does not reach, on each version.

mod versions;

use kvx_core::Registry;
use kvx_testkit::device::goes_elsewhere;

#[test]
fn memory_that_ucx_does_not_reach_is_refused_and_goes_over_tcp() {
    versions::on_each("memory_that_ucx_does_not_reach_is_refused_and_goes_over_tcp", |_| {
        let mut registry = Registry::new();
        registry.add(kvx_ucx::Ucx).unwrap().add(kvx_native::Tcp).unwrap();
        goes_elsewhere(&registry, "UCX", "TCP", "{}").unwrap();
    });
}
