#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod blob;
mod config;
mod fabric;
mod ffi;
mod flow;
mod loads;
mod loss;
mod memory;
mod pace;
mod peers;
mod prepared;
mod reach;
mod slicing;
mod threads;
mod transport;
mod turnstile;
mod wakes;

pub use transport::Rixl;

/// The generated bindings, for programs that drive NIXL themselves: no part of kvx, and without its promises.
#[cfg(feature = "raw")]
pub mod raw {
    pub use crate::ffi::bindings::*;
}

#[cfg(test)]
#[path = "../tests/wheel/mod.rs"]
mod wheel;
