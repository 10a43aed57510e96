//! The exports of `libamdhip64`, hipRTC with it, and one function of `libhsa-runtime64`. Names,
//! arguments and numbers are the driver's.
#![allow(non_snake_case)]

mod compiler;
mod copying;
mod device;
mod kernels;
mod memory;
mod shared;

pub(crate) use device::current;
