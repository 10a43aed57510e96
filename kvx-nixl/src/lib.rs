#![doc = include_str!("../README.md")]
// NIXL loads `libplugin_NAME.so`.
#![allow(non_snake_case, reason = "the name of the library is NIXL's rule")]

mod confirmation;
#[cfg(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
mod devices;
#[cfg(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
mod engine;
#[cfg(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
mod ffi;
mod handles;
pub mod installation;
mod log;
mod memory;
mod request;
mod settings;
mod status;
pub mod version;
pub mod vtable;
