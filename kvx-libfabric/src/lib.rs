#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod address;
mod bell;
mod config;
mod error;
mod ffi;
mod host;
mod knock;
mod link;
mod memory;
mod neighbours;
mod operations;
mod posting;
mod progress;
mod providers;
mod rail;
mod sealed;
#[cfg(test)]
mod shuffling;
mod topology;
mod transport;

pub use transport::Libfabric;

/// The generated bindings to libfabric, for programs that drive it themselves: no part of kvx, and without its promises.
///
/// [`Functions`](raw::Functions) is filled by whoever opened the library; everything else is called through the tables of
/// functions that libfabric's objects carry. Types and constants are those of 1.17.
#[cfg(feature = "raw")]
pub mod raw {
    pub use crate::ffi::bindings_1_17::*;
}
