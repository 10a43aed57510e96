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

/// The generated bindings to libucp, for programs that drive UCX themselves: no part of kvx, and
/// without its promises.
///
/// [`Functions`](raw::Functions) is filled by the program that opened the library. Types and
/// constants are those of UCX 1.13; [`sgl`](raw::sgl) is what the scatter-gather datatype of 1.22
/// adds.
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
