#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

// The words are core's: a program needs no second crate. A backend of one's own is written against kvx-core itself.
#[cfg(feature = "connector")]
pub use kvx_connector as connector;
pub use kvx_core::transport::{Availability, Factory};
pub use kvx_core::{
    Agent, AutoOpen, BackendName, BackendStatus, Blocks, Builder, Canceller, Capabilities,
    Completion, Considered, Deadline, DeviceAccess, DeviceId, Error, ErrorKind, Generation, Grid,
    GridSet, HungPageScope, Identity, Idle, Incarnation, Indices, Isolation, Limits, MAX_NAME,
    Memory, MemoryKind, MemoryKinds, Metadata, Native, NextNotification, Notification, Op, Options,
    Peer, PeerRegion, PerOp, Place, Placement, Plan, Posting, Region, RegionId, RegionInfo,
    Registry, Report, Result, Revocation, Route, Secret, Sender, Size, Span, Table, Ticket,
    Transfer, TransferId, Unavailable, Verdict, describe_metrics, memory, nearest,
    quarantined_bytes,
};
#[cfg(all(target_os = "linux", feature = "cuda"))]
pub use kvx_cuda as cuda;
#[cfg(all(target_os = "linux", any(feature = "cuda", feature = "rocm")))]
pub use kvx_gpu as gpu;
#[cfg(all(target_os = "linux", feature = "libfabric"))]
pub use kvx_libfabric::{Libfabric, bound_kept_messages};
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

/// Every backend's name that a user may write, and the feature of this crate that compiles it in.
///
/// A backend without a feature is not in this release. For a registry of your own: `Registry::new().with_names(kvx::KNOWN)`.
pub const KNOWN: &[BackendName] = &[
    BackendName { name: "UCX", aliases: &[], feature: Some("ucx") },
    BackendName { name: "LIBFABRIC", aliases: &[], feature: Some("libfabric") },
    BackendName { name: "MOONCAKE", aliases: &[], feature: Some("mooncake") },
    BackendName { name: "RIXL", aliases: &["NIXL"], feature: Some("rixl") },
    BackendName { name: "SHM", aliases: &[], feature: Some("shm") },
    BackendName { name: "TCP", aliases: &[], feature: Some("tcp") },
];

/// The backends that are compiled in, and all [`KNOWN`] names. Add transports of your own to it.
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
    let mut registry = Registry::new().with_names(KNOWN);
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

/// What a vLLM configuration says of an agent.
pub trait BuilderExt {
    /// Takes the options of `config`, and whether device memory goes through the host (`kv_buffer_device`).
    fn config(self, config: &config::KvTransferConfig) -> Self;
}

impl BuilderExt for Builder {
    fn config(self, config: &config::KvTransferConfig) -> Self {
        let staged = config.buffer_device() == config::BufferDevice::Cpu;
        self.options(Options::from_json(config.extra().clone())).stage_device_memory(staged)
    }
}

// The guide's code is compiled like that of every example.
#[cfg(doctest)]
#[doc = include_str!("../docs/life-of-a-transfer.md")]
struct LifeOfATransfer;
