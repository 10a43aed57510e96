//! kvx moves KV cache between LLM inference servers.
//!
//! A prefill server computes the keys and values of a prompt. A decode server reads them directly
//! from the prefill server's memory, block by block, and generates the answer. kvx is the part
//! between them: over UCX, libfabric, Mooncake or NIXL where they are installed, and over its own
//! shared memory and TCP where nothing is.
//!
//! # Moving blocks
//!
//! An [`Agent`] owns connections and registered memory. [`Agent::register`] makes a [`Region`] that
//! peers may access, and [`Agent::metadata`] describes the agent and its regions to them. The
//! metadata is an invitation: an agent accepts no peer that does not have it.
//!
//! A [`Grid`] divides a region into equal blocks. A [`Plan`] pairs local and remote blocks; it is
//! validated once and can be posted many times. [`Peer::post`] returns a [`Transfer`], a future that
//! runs under any async runtime. [`Transfer::wait_blocking`] waits for it without one.
//!
//! ```
//! use std::time::Duration;
//!
//! use kvx::{Grid, Memory, Plan, Result};
//!
//! fn main() -> Result<()> {
//!     let prefill = kvx::agent("prefill-0").build()?;
//!     let decode = kvx::agent("decode-0").build()?;
//!     let pool = prefill.register("kv", Memory::pool(16 << 20).build()?)?;
//!     let cache = decode.register("kv", Memory::pool(16 << 20).build()?)?;
//!     let grid = Grid::packed(64 << 10, 256); // 256 blocks of 64 KiB
//!     pool.copy_in(200 * (64 << 10), b"the keys and values of block 200")?;
//!
//!     let peer = decode.connect(prefill.metadata()?)?; // bytes: send them by any means
//!     let (ours, theirs) = (cache.grid(grid)?, peer.region("kv")?.grid(grid)?);
//!     // Block 200 into block 3, and block 17 into block 9.
//!     let plan = Plan::read(ours.blocks([3, 9]), theirs.blocks([200, 17]))?;
//!     let report = peer.post(&plan)?.wait_blocking(Duration::from_secs(5))?;
//!
//!     let mut got = [0; 32];
//!     cache.copy_out(3 * (64 << 10), &mut got)?;
//!     assert_eq!(&got, b"the keys and values of block 200");
//!     println!("{} bytes over {} in {:?}", report.bytes, report.backend, report.transfer_time);
//!     Ok(())
//! }
//! ```
//!
//! # Failures
//!
//! Every transfer has a deadline. After it, or when the peer is lost, the transfer *resolves* with
//! an [`Error`], but a network card may still write to its blocks. The memory is free again once
//! the transfer is *settled* ([`Transfer::settled`]). Memory whose remote access cannot be proven
//! to have ended is quarantined: kvx keeps it and never frees it ([`quarantined_bytes`]).
//! [`ErrorKind`] is what programs branch on; the sentence of an error says what to do next.
//!
//! # Engines
//!
//! With feature `connector`, the module `connector` makes an inference engine a prefill or decode
//! instance of a fleet, beside engines of its kind and beside vLLM. Its page starts with two engines
//! in one program. Module [`config`] has vLLM's `--kv-transfer-config`, read or built.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `shm`, `tcp` | yes | the embedded transports, which need nothing at run time |
//! | `ucx`, `libfabric`, `mooncake`, `rixl` | yes | a native library each, opened at run time |
//! | `cuda`, `rocm` | no | device memory: modules `cuda` and `rocm` |
//! | `connector` | no | vLLM's connectors for any engine |
//! | `proxy` | no | the router of a prefill/decode fleet |
//!
//! The package is `kvx-transfer`:
//! `kvx = { package = "kvx-transfer", path = "…", features = ["connector"] }`.
//!
//! kvx writes spans and events with [`tracing`](https://docs.rs/tracing) and values with
//! [`metrics`](https://docs.rs/metrics); [`describe_metrics`] names them.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

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

// The code of these pages is compiled and run like that of every example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
#[cfg(doctest)]
#[doc = include_str!("../docs/library/failures.md")]
struct FailuresAndDeadlines;
#[cfg(doctest)]
#[doc = include_str!("../docs/library/concepts.md")]
struct Concepts;
#[cfg(doctest)]
#[doc = include_str!("../docs/library/first-program.md")]
struct FirstProgram;
#[cfg(all(doctest, target_os = "linux"))]
#[doc = include_str!("../docs/library/memory.md")]
struct MemoryOfAnEngine;
#[cfg(doctest)]
#[doc = include_str!("../docs/library/notifications.md")]
struct Notifications;
#[cfg(doctest)]
#[doc = include_str!("../docs/library/observability.md")]
struct MetricsAndTracing;
#[cfg(all(doctest, target_os = "linux", feature = "cuda"))]
#[doc = include_str!("../docs/library/gpu.md")]
struct GpuMemory;
#[cfg(all(doctest, feature = "connector"))]
#[doc = include_str!("../docs/library/engines.md")]
struct PrefillAndDecodeEngines;
