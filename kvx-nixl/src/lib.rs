#![doc = include_str!("../README.md")]
// NIXL opens `libplugin_NAME.so`.
#![allow(non_snake_case, reason = "the name of the library is NIXL's rule")]

#[cfg(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
mod border;
#[cfg(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
mod devices;
#[cfg(all(target_os = "linux", target_pointer_width = "64", target_endian = "little"))]
mod engine;
mod handles;
pub mod installed;
mod log;
mod memory;
mod request;
mod settings;
pub mod sibling;
mod status;
pub mod version;
