#![cfg_attr(feature = "protocol", doc = include_str!("../README.md"))]
#![cfg_attr(
    not(feature = "protocol"),
    doc = "What vLLM says about KV transfers, without I/O: the parts that the chosen features compile in."
)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "config")]
pub mod config;
#[cfg(feature = "protocol")]
pub mod engine;
#[cfg(feature = "protocol")]
pub mod mapping;
#[cfg(feature = "params")]
pub mod params;
#[cfg(feature = "protocol")]
pub mod wire;

#[cfg(feature = "params")]
pub use params::Dialect;
