#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

use kvx_core::backend::BackendName;

// Programs need only this crate. Implement your own backends with kvx_core::backend.
#[cfg(feature = "connector")]
pub use kvx_connector as connector;
pub use kvx_core::{
    Agent, AgentBuilder, BackendStatus, Canceller, Capabilities, Completion, Deadline, DeviceId,
    Error, ErrorKind, Grid, GridSet, HugePages, Identity, Indices, Limits, Memory, MemoryKind,
    NextNotification, Notification, Op, Options, Peer, PeerRegion, Place, Plan, Region, Registry,
    Report, Result, Route, Secret, Span, Transfer, TransferBuilder, describe_metrics,
    quarantined_bytes,
};
#[cfg(all(target_os = "linux", feature = "cuda"))]
pub use kvx_cuda as cuda;
#[cfg(all(target_os = "linux", feature = "libfabric"))]
pub use kvx_libfabric::Libfabric;
#[cfg(all(target_os = "linux", feature = "mooncake"))]
pub use kvx_mooncake::Mooncake;
#[cfg(all(target_os = "linux", feature = "shm"))]
pub use kvx_native::Shm;
#[cfg(all(target_os = "linux", feature = "tcp"))]
pub use kvx_native::Tcp;
#[cfg(feature = "proxy")]
pub use kvx_proxy as proxy;
#[cfg(all(target_os = "linux", feature = "rixl"))]
pub use kvx_rixl::Rixl;
#[cfg(all(target_os = "linux", feature = "rocm"))]
pub use kvx_rocm as rocm;
#[cfg(all(target_os = "linux", feature = "ucx"))]
pub use kvx_ucx::Ucx;
pub use kvx_vllm::config;

/// The names of all backends, and the features that compile them in.
const NAMES: &[BackendName] = &[
    BackendName { name: "UCX", aliases: &[], feature: Some("ucx") },
    BackendName { name: "LIBFABRIC", aliases: &[], feature: Some("libfabric") },
    BackendName { name: "MOONCAKE", aliases: &[], feature: Some("mooncake") },
    BackendName { name: "RIXL", aliases: &["NIXL"], feature: Some("rixl") },
    BackendName { name: "SHM", aliases: &[], feature: Some("shm") },
    BackendName { name: "TCP", aliases: &[], feature: Some("tcp") },
];

/// Returns a builder for an agent of this name, with all backends that are compiled in.
///
/// The name has 1 to 255 bytes. Use the same name after a restart.
///
/// ```no_run
/// let agent = kvx::agent("prefill-0").build()?;
/// let region = agent.register("kv", kvx::Memory::pool(1 << 30).build()?)?;
/// # Ok::<(), kvx::Error>(())
/// ```
pub fn agent(name: impl Into<String>) -> AgentBuilder {
    Agent::builder(name).registry(registry())
}

/// Returns a registry of the backends that are compiled in; it also knows the names of the others.
/// Add your own transports to it.
///
/// ```
/// let registry = kvx::registry();
/// let error = registry.require("UXC", &kvx::Options::new()).err().unwrap();
/// assert_eq!(
///     error.to_string(),
///     "backend \"UXC\" is unknown; did you mean UCX? known: UCX, LIBFABRIC, MOONCAKE, RIXL, SHM, TCP"
/// );
/// ```
pub fn registry() -> Registry {
    #[cfg_attr(
        not(all(
            target_os = "linux",
            any(
                feature = "shm",
                feature = "tcp",
                feature = "ucx",
                feature = "libfabric",
                feature = "mooncake",
                feature = "rixl"
            )
        )),
        allow(unused_mut)
    )]
    let mut registry = Registry::new().with_names(NAMES);
    #[cfg(all(target_os = "linux", feature = "shm"))]
    registry.add(Shm).expect("SHM is added once");
    #[cfg(all(target_os = "linux", feature = "tcp"))]
    registry.add(Tcp).expect("TCP is added once");
    #[cfg(all(target_os = "linux", feature = "ucx"))]
    registry.add(Ucx).expect("UCX is added once");
    #[cfg(all(target_os = "linux", feature = "libfabric"))]
    registry.add(Libfabric).expect("LIBFABRIC is added once");
    #[cfg(all(target_os = "linux", feature = "mooncake"))]
    registry.add(Mooncake::new()).expect("MOONCAKE is added once");
    #[cfg(all(target_os = "linux", feature = "rixl"))]
    registry.add(Rixl).expect("RIXL is added once");
    registry
}

// Compiles the guide's code blocks as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/life-of-a-transfer.md")]
struct LifeOfATransfer;
