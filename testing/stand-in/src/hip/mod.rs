//! The exports of `libamdhip64`, of hipRTC and of one function of `libhsa-runtime64`, with the
//! driver's names, arguments and numbers.
#![allow(non_snake_case)]

mod compiler;
mod copying;
mod device;
mod kernels;
mod memory;
mod shared;

pub(crate) use device::current;
