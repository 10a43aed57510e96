#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod nixl;
pub mod runtime;

pub use kvx_vllm::{Dialect, engine, mapping, params, wire};
