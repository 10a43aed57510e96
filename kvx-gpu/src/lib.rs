#![cfg(target_os = "linux")]
#![doc = include_str!("../README.md")]
//! GPU memory: one implementation for the devices of every vendor.
//!
//! `kvx-cuda` and `kvx-rocm` provide the data of their vendor's driver, and the few calls that
//! differ ([`driver`]). Everything else is implemented here: loading and calling the driver, and
//! [`Device`], which is the [`DeviceAccess`](kvx_core::DeviceAccess) that agents take. It creates
//! pools and adopts memory of other programs, recognises grids in lists of copies, settles tickets
//! when events are reached, shares memory between processes, and launches the [`kernels`].
//!
//! A device has one thread for copies, and only that thread uses the device's streams. Posting a
//! copy only adds it to the thread's queue, and the contexts of the program's own threads stay
//! unchanged. If a driver call blocks on that thread, posting does not block, but all later copies
//! of the device wait in the queue, and their tickets settle only after the call has returned.
//! A second thread makes the calls that may wait for all work of the device: it allocates, frees,
//! pins, opens and closes memory. Dropping memory only queues its release. Creating, pinning and
//! opening memory wait for that thread; adopting and sharing memory call the driver on the caller's
//! thread. Dropping the device waits for its queued copies. Both threads sleep while they have
//! nothing to do.
//!
//! Copies of different calls run in the order of their calls in each direction, and in no order
//! between directions. They do not wait for work that the program has put on its own streams: wait
//! for that first, with [`Device::after`] or with the program's own means.

mod calls;
mod copies;
mod device;
mod devices;
pub mod driver;
mod exports;
mod flights;
#[doc(hidden)]
pub mod fuzz;
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
