#![cfg_attr(feature = "protocol", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "protocol"),
    doc = "Typed `kv_transfer_params` of vLLM's connectors and the recipes of proxies: the part of kvx-connector \
           for routers."
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "protocol")]
pub mod engine;
#[cfg(feature = "protocol")]
pub mod mapping;
#[cfg(feature = "protocol")]
pub mod nixl;
#[cfg(feature = "params")]
pub mod params;
#[cfg(feature = "runtime")]
pub mod runtime;
#[cfg(feature = "protocol")]
pub mod wire;

#[cfg(feature = "params")]
pub use params::Dialect;
