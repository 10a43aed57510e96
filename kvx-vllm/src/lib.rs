#![cfg_attr(feature = "protocol", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "protocol"),
    doc = "vLLM's KV transfer protocol, without I/O: the parts that the enabled features compile in."
)]
//!
//! # Layers
//!
//! Each module imports only those before it:
//!
//! 1. [`Version`], [`ids`] and [`time`]
//! 2. `params`: `kv_transfer_params`, and the recipes of proxies; without kvx-core
//! 3. `msgpack` and `zmtp`: the encodings of vLLM's sockets; without kvx-core (feature `events`)
//! 4. `events`: what engines have cached; without kvx-core
//! 5. `config`: `KVTransferConfig`
//! 6. `wire`: messages between engines
//! 7. `mapping`: which bytes move between which ranks
//! 8. `engine`: scheduler and worker as state machines
//! 9. `group`: messages between a kvx engine and its ranks in other processes
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

#[cfg(feature = "events")]
mod decode_error;
pub mod ids;
pub mod time;
mod version;

#[cfg(feature = "params")]
pub mod params;

#[cfg(feature = "events")]
pub mod msgpack;
#[cfg(feature = "events")]
pub mod zmtp;

#[cfg(feature = "events")]
pub mod events;

#[cfg(feature = "config")]
pub mod config;

#[cfg(feature = "protocol")]
pub mod wire;

#[cfg(feature = "protocol")]
pub mod mapping;

#[cfg(feature = "protocol")]
pub mod engine;

#[cfg(feature = "protocol")]
#[doc(hidden)]
pub mod group;

#[cfg(feature = "events")]
pub use decode_error::{DecodeError, DecodeErrorKind};
pub use version::Version;
