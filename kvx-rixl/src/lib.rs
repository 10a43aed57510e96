#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]

mod blob;
mod config;
mod fabric;
mod ffi;
mod loads;
mod memory;
mod pace;
mod peers;
mod prepared;
mod reach;
mod threads;
mod transport;
mod turnstile;
mod wakes;

pub use transport::Rixl;
