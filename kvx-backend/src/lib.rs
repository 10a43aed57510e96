#![cfg(target_os = "linux")]
#![doc = include_str!("../README.md")]

#[cfg(feature = "baseline")]
pub mod baseline;
pub mod capabilities;
pub mod checksum;
pub mod control;
pub mod devices;
pub mod elf;
pub mod error;
pub mod fabric;
#[doc(hidden)]
pub mod fuzz;
pub mod loader;
pub mod process;
pub mod rate_limit;
pub mod reactor;
pub mod registrations;
pub mod threads;
pub mod version;
