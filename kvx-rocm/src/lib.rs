#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![deny(missing_docs)]

mod devices;
mod dma_buf;
mod driver;
mod ffi;
mod kernels;
mod library;
mod virtual_memory;

pub use devices::devices;
pub use kvx_gpu::{
    BlocksAt, Chosen, Device, DeviceInfo, DevicePoolBuilder, DevicePtr, StreamHandle,
};
