//! The exports of `libcuda`. Names, arguments and numbers are the driver's.
#![allow(non_snake_case)]

mod batch;
mod context;
mod copying;
mod device;
mod kernels;
mod memory;
mod shared;

pub(crate) use context::{current, initialised};
