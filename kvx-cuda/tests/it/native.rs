//! The contract's suites over a maker's devices and the embedded transports.

use kvx_core::Registry;
use kvx_testkit::{Backing, DeviceSource, Suite, Tier};

pub(crate) fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).and_then(|registry| registry.add(kvx_native::Tcp)).expect("two names");
    registry
}

/// Every clause, in one process and in two, with device memory on both sides and, the whole way through, on one.
pub(crate) fn suites(device: DeviceSource, all: bool) -> Vec<Suite> {
    use Backing::{Device, Owned, Pool};
    let over =
        |backend, label, near, far| Suite { label, near, far, device: Some(device), ..Suite::over(backend) };
    let mut suites =
        vec![over("SHM", "SHM-device", Device, Device), over("TCP", "TCP-device", Device, Device)];
    if all {
        let on_one = [
            over("SHM", "SHM-from-device", Pool, Device),
            over("SHM", "SHM-to-device", Device, Pool),
            over("TCP", "TCP-from-device", Pool, Device),
            over("TCP", "TCP-to-device", Device, Owned),
        ];
        suites.extend(on_one.map(|suite| Suite { tier: Tier::Whole, ..suite }));
    }
    suites
}
