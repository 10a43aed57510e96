#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod address;
mod config;
mod connections;
mod error;
mod fabric;
mod factory;
mod ffi;
mod keys;
mod memory;
mod neighbours;
mod operations;
mod peer_probe;
mod peers;
mod posting;
mod process_copy;
mod providers;
mod rail;
mod topology;
mod wake_socket;

pub use factory::Libfabric;

/// The generated bindings to libfabric, for programs that drive it themselves: no part of kvx, and
/// without its promises.
///
/// [`Functions`](raw::Functions) is filled by the program that opened the library; everything else
/// is called through the tables of functions that libfabric's objects carry. Types and constants
/// are those of 1.17.
#[cfg(feature = "raw")]
pub mod raw {
    pub use crate::ffi::bindings_1_17::*;
    pub use crate::ffi::symbol_version;
}

#[cfg(test)]
mod unauthenticated;
