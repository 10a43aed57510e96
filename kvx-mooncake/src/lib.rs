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

/// The generated bindings, for programs that call the engine directly. They are not part of kvx's
/// API, and kvx's guarantees do not cover them.
#[cfg(feature = "raw")]
pub mod raw {
    pub use crate::ffi::bindings::*;

    /// The functions that only the adapter over a wheel has.
    pub mod adapter {
        pub use crate::ffi::adapter_bindings::*;
    }
}
