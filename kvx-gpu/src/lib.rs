#![cfg(target_os = "linux")]
#![doc = include_str!("../README.md")]
//! GPU memory: one machine for every maker's devices.
//!
//! `kvx-cuda` and `kvx-rocm` give a [`Driver`]: the calls of their maker's library for one device, thin. [`Device`]
//! does everything else once, for both: it is the [`DeviceAccess`](kvx_core::DeviceAccess) that agents take, makes
//! pools and adopts memory of other programs, recognises grids in lists of copies, settles tickets when events have
//! come, shares memory between processes and launches the [`kernels`].
//!
//! A device has one thread, and only that talks to the device's streams: posting a copy is a push on a queue, the
//! contexts of the program's own threads stay as they are, and a driver that blocks blocks nobody else. It is asleep
//! while nothing is in flight.
//!
//! Copies of different calls run in the order of their calls in each direction, and in none between directions. They do
//! not wait for what the program has put on streams of its own: wait for that first, with [`Device::after`] or with the
//! program's own means.

mod compiler;
mod copies;
mod device;
mod driver;
mod flights;
mod imports;
pub mod kernels;
mod memory;
#[cfg(test)]
mod panics;
mod symbols;
mod tables;
mod thread;

pub use compiler::Compiler;
pub use device::{BlocksAt, Chosen, Device};
pub use driver::{
    CopyDirection, Current, DeviceInfo, Driver, EventHandle, FunctionHandle, Mapped, Pointer,
    PointerPlace, Rows, StreamHandle,
};
pub use memory::{DevicePoolBuilder, DevicePtr};
pub use symbols::symbols;

// What `symbols!` writes into the crates that call it.
#[doc(hidden)]
pub use kvx_backend::loader::NativeLibrary;
#[doc(hidden)]
pub use kvx_core::Unavailable;
