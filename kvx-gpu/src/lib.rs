#![cfg(target_os = "linux")]
#![doc = include_str!("../README.md")]
//! GPU memory: one implementation for the devices of every vendor.
//!
//! `kvx-cuda` and `kvx-rocm` give the data of their vendor's driver, and the few calls that have
//! another form in each ([`driver`]). Everything else is written once, here: opening and calling
//! the driver, and [`Device`], which is the [`DeviceAccess`](kvx_core::DeviceAccess) that agents
//! take. It makes pools and adopts memory of other programs, recognises grids in lists of copies,
//! settles tickets when events are reached, shares memory between processes and launches the
//! [`kernels`].
//!
//! A device has one thread, and only that thread uses the device's streams: posting a copy pushes
//! it on a queue, the contexts of the program's own threads stay as they are, and a driver that
//! blocks blocks no other thread. It sleeps while nothing is in flight.
//!
//! Copies of different calls run in the order of their calls in each direction, and in none between
//! directions. They do not wait for what the program has put on streams of its own: wait for that
//! first, with [`Device::after`] or with the program's own means.

mod copies;
mod device;
mod devices;
pub mod driver;
mod flights;
mod imports;
mod kernel_tables;
pub mod kernels;
mod memory;
#[cfg(test)]
mod panics;
mod pinned;
mod strided;
mod thread;

pub use device::Device;
pub use devices::Devices;
pub use driver::{DeviceInfo, StreamHandle};
pub use memory::DevicePoolBuilder;
pub use strided::{BlockSelection, DevicePtr, StridedBlocks};
