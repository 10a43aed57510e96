//! Tests device memory that UCX cannot access, on each version.

use kvx_testkit::device::goes_elsewhere;
use kvx_testkit::test;

use crate::{registry, versions};

#[test]
fn memory_that_ucx_does_not_reach_is_refused_and_goes_over_tcp() {
    versions::on_each(
        "devices::memory_that_ucx_does_not_reach_is_refused_and_goes_over_tcp",
        |_| {
            let mut registry = registry("");
            registry.add(kvx_native::Tcp).unwrap();
            goes_elsewhere(&registry, "UCX", "TCP", "{}").unwrap();
        },
    );
}
