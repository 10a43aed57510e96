//! Tests device memory that NIXL's plugin cannot access.

use kvx_testkit::device::goes_elsewhere;
use libtest_mimic::Trial;

use crate::{Outcome, registry, with_nixl};

pub(crate) fn trials() -> [Trial; 1] {
    const TITLE: &str = "devices::memory_that_nixl_does_not_reach_is_refused_and_goes_over_tcp";
    [with_nixl(TITLE.to_owned(), memory_that_nixl_does_not_reach_is_refused_and_goes_over_tcp)]
}

fn memory_that_nixl_does_not_reach_is_refused_and_goes_over_tcp() -> Outcome {
    let mut registry = registry("");
    registry.add(kvx_native::Tcp)?;
    let options = r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo"}}}"#;
    Ok(goes_elsewhere(&registry, "RIXL", "TCP", options)?)
}
