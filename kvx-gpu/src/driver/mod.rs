//! The driver of a vendor's devices. The shared code is here; a vendor's crate provides the names
//! of its functions and other data ([`Vendor`]), and the calls that differ between drivers
//! ([`VendorCalls`]).

mod compiler;
mod device_driver;
mod functions;
mod library;
mod types;
mod vendor;
mod virtual_memory;

pub(crate) use device_driver::Driver;
pub use functions::{CallResult, CompilerNames, Failure, FunctionNames, VirtualMemoryNames};
#[cfg(test)]
pub(crate) use functions::{CompilerFunctions, Functions, VirtualMemoryFunctions};
pub(crate) use library::Library;
pub(crate) use types::MappedMemory;
pub use types::{
    Address, Context, CopyDirection, DeviceInfo, DeviceNumber, EventHandle, FunctionHandle,
    Location, ModuleHandle, PointerInfo, PointerPlace, Rows, Status, StreamHandle, status,
};
pub use vendor::{CompilerLibrary, LibraryFile, Vendor, VendorCalls};
