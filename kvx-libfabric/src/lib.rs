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
mod read_back;
mod subnets;
mod topology;
mod wake_socket;

pub use factory::Libfabric;

/// The generated bindings to libfabric, for programs that call it directly. They are not part of
/// kvx's API, and kvx's guarantees do not cover them.
///
/// The program that loads the library fills [`Functions`](raw::Functions). All other functions are
/// called through the tables in libfabric's objects. Types and constants are those of 1.17.
#[cfg(feature = "raw")]
pub mod raw {
    pub use crate::ffi::bindings_1_17::*;
    pub use crate::ffi::symbol_version;
}

#[cfg(test)]
mod unauthenticated;
