//! Tests device memory that Mooncake's TCP cannot access.

use kvx_testkit::device::goes_elsewhere;
use kvx_testkit::test;

use crate::adapter;

#[test(own_process)]
fn memory_that_mooncake_does_not_reach_is_refused_and_goes_over_tcp() {
    if adapter::or_skip("memory_that_mooncake_does_not_reach_is_refused_and_goes_over_tcp")
        .is_none()
    {
        return;
    }
    let mut registry = adapter::registry("");
    registry.add(kvx_native::Tcp).unwrap();
    let options = r#"{"mooncake": {"mooncake_protocol": "tcp"}}"#;
    goes_elsewhere(&registry, "MOONCAKE", "TCP", options).unwrap();
}
