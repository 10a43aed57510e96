#![cfg(target_os = "linux")]
#![doc = include_str!("../README.md")]

pub mod control;
pub mod fabric;
pub mod loader;
pub mod process;
pub mod reactor;
pub mod sealed;
