#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod address;
mod callbacks;
mod config;
mod error;
mod fabric;
mod factory;
mod ffi;
mod memory;
mod peers;
mod protocols;
mod route;

pub use factory::Ucx;

/// The generated bindings to libucp, for programs that call UCX directly. They are not part of
/// kvx's API, and kvx's guarantees do not cover them.
///
/// The program that loads the library fills [`Functions`](raw::Functions). Types and constants are
/// those of UCX 1.13; [`sgl`](raw::sgl) has the scatter-gather datatype of 1.22.
#[cfg(feature = "raw")]
pub mod raw {
    pub use crate::ffi::bindings_1_13::*;
    pub use crate::ffi::bindings_1_22 as sgl;
}

#[cfg(test)]
mod unauthenticated;
#[cfg(test)]
#[path = "../tests/it/versions.rs"]
mod versions;
