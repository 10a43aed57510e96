//! Kernels that move blocks within and between devices: their source and their launches. Their
//! reference in plain Rust is in the crate of the stand-in for a driver, `testing/stand-in`.
//!
//! One source serves CUDA and HIP. `cargo xtask kernels` compiles it to the PTX in this folder,
//! which any driver of CUDA 12.0 or newer loads on any device with compute capability 7.0 or newer.
//! For HIP, hipRTC compiles it at run time.
//!
//! The kernels move bytes in the widest unit of 16, 8, 4, 2 or 1 bytes to which the addresses are
//! aligned, so they support elements of every size. They trust their arguments: the caller checks
//! the bounds.

mod launch;
mod swap;

pub use launch::{DeviceGrid, ENTRIES, Launch, LaunchBlocks, THREADS, encode_grids, encode_hops};
pub use swap::Swap;

/// The source, for NVRTC and hipRTC.
pub const SOURCE: &str = include_str!("kernels.cu");

/// The source compiled for CUDA.
pub const PTX: &str = include_str!("kernels.ptx");
