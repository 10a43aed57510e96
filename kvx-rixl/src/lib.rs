#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod address;
mod agent_lock;
mod blob;
mod config;
mod connection;
mod cpu_trials;
mod error;
mod fabric;
mod factory;
mod ffi;
mod memory;
mod peer_loader;
mod peers;
mod prepared_requests;
mod sleep_timer;
mod wake_set;

pub use factory::Rixl;

/// The generated bindings, for programs that call NIXL directly. They are not part of kvx's API,
/// and kvx's guarantees do not cover them.
#[cfg(feature = "raw")]
pub mod raw {
    pub use crate::ffi::bindings::*;
}

#[cfg(test)]
#[path = "../tests/it/wheel.rs"]
mod wheel;
