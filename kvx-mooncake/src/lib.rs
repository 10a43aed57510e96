#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod adapter;
mod address;
mod batches;
mod blocking_calls;
mod capabilities;
mod config;
mod error;
mod fabric;
mod factory;
mod ffi;
mod frames;
mod memory;
mod peers;

pub use factory::Mooncake;

/// The generated bindings, for programs that drive the engine themselves: no part of kvx, and
/// without its promises.
#[cfg(feature = "raw")]
pub mod raw {
    pub use crate::ffi::bindings::*;

    /// What only the adapter over a wheel has.
    pub mod adapter {
        pub use crate::ffi::adapter_bindings::*;
    }
}
