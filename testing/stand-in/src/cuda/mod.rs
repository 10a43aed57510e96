//! The exports of `libcuda`, with the driver's names, arguments and numbers.
#![allow(non_snake_case)]

mod batch;
mod context;
mod copying;
mod device;
mod kernels;
mod memory;

pub(crate) use context::{current, initialised};
