//! Kernels that move blocks within and between devices: their source, their launches, and what they
//! do in plain Rust.
//!
//! One source serves CUDA and HIP. `cargo xtask kernels` compiles it to the PTX beside it, which
//! any driver of CUDA 12.0 or newer loads on any device since compute capability 7.0; for HIP it is
//! compiled at run time by hipRTC.
//!
//! The kernels take bytes, and choose the widest unit of 16, 8, 4, 2 or 1 bytes that the addresses
//! are aligned to: elements of every size are served. They trust their arguments: who launches
//! checks the bounds.

mod launch;
pub mod reference;
mod swap;

pub use launch::{DeviceGrid, ENTRIES, Launch, LaunchBlocks, THREADS, encode_grids, encode_hops};
pub use swap::Swap;

/// The source, for NVRTC and hipRTC alike.
pub const SOURCE: &str = include_str!("kernels.cu");

/// The source compiled for CUDA.
pub const PTX: &str = include_str!("kernels.ptx");
