//! The functions that CUDA and HIP share under different names. A vendor provides the names, by
//! which the functions are resolved in its library.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use kvx_backend::loader::NativeLibrary;
use kvx_core::Error;
use kvx_core::backend::Unavailable;

use super::types::{
    Access, Address, DeviceNumber, EventHandle, FunctionHandle, IpcMemoryHandle, ModuleHandle,
    PhysicalMemory, Status, StreamHandle, status,
};

/// The reason why a call of a driver failed.
#[derive(Debug)]
pub enum Failure {
    /// A function returned a status other than success.
    Status(&'static CStr, Status),
    /// The driver or the device lacks something: the rest of a sentence that begins with "this
    /// device has".
    Missing(String),
    /// An error outside the driver.
    Other(Error),
}

/// The result of a call of a driver.
pub type CallResult<T = ()> = Result<T, Failure>;

impl Failure {
    /// Converts the status that `function` returned to a result.
    pub fn check(function: &'static CStr, status: Status) -> CallResult {
        match status {
            status::SUCCESS => Ok(()),
            status => Err(Failure::Status(function, status)),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Other(error)
    }
}

/// Declares the names of functions, and a table of the resolved functions. Calling a function of
/// the table checks its status.
macro_rules! functions {
    (
        $(#[$about_names:meta])* names $Names:ident
        $(#[$about_table:meta])* table $Table:ident
        $($(#[$about:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?);)*
    ) => {
        $(#[$about_names])*
        #[derive(Clone, Copy, Debug)]
        pub struct $Names { $($(#[$about])* pub $name: &'static CStr,)* }

        #[cfg(test)]
        impl $Names {
            /// Placeholders for a table that is not resolved by name.
            pub(crate) const UNUSED: Self = $Names { $($name: c"",)* };
        }

        $(#[$about_table])*
        #[derive(Clone, Copy)]
        pub(crate) struct $Table {
            $($name: (&'static CStr, unsafe extern "C" fn($($type),*) -> Status),)*
        }

        impl $Table {
            /// Resolves all functions. Errors: the first one that the library lacks.
            ///
            /// # Safety
            /// The library's functions of these names have these signatures.
            pub(crate) unsafe fn find(
                library: &NativeLibrary,
                names: &$Names,
            ) -> Result<Self, Unavailable> {
                // SAFETY: the caller guarantees the signatures.
                Ok($Table { $($name: (names.$name, unsafe { library.symbol(names.$name) }?),)* })
            }

            /// Returns functions that succeed and do nothing.
            #[cfg(test)]
            pub(crate) fn idle() -> Self {
                $Table {
                    $($name: {
                        extern "C" fn idle($(_: $type),*) -> Status { status::SUCCESS }
                        (c"idle", idle)
                    },)*
                }
            }

            $(
                $(#[$about])*
                ///
                /// # Safety
                /// The arguments are valid for the driver's function.
                #[allow(clippy::too_many_arguments, reason = "the driver's")]
                pub(crate) unsafe fn $name(&self, $($argument: $type),*) -> CallResult {
                    let (name, function) = self.$name;
                    // SAFETY: the caller guarantees the arguments.
                    Failure::check(name, unsafe { function($($argument),*) })
                }
            )*
        }
    };
}

functions! {
    /// The names of a driver's functions.
    names FunctionNames
    /// A driver's functions.
    table Functions

    /// Counts the devices.
    fn device_count(count: *mut c_int);
    /// Gets the device of an ordinal.
    fn device(device: *mut DeviceNumber, ordinal: c_int);
    /// Gets a device's name.
    fn device_name(text: *mut c_char, len: c_int, device: DeviceNumber);
    /// Gets a device's UUID.
    fn device_uuid(uuid: *mut [u8; 16], device: DeviceNumber);
    /// Gets a device's address on the bus.
    fn device_bus(text: *mut c_char, len: c_int, device: DeviceNumber);
    /// Asks whether a device can access another one's memory.
    fn can_access_peer(answer: *mut c_int, device: DeviceNumber, other: DeviceNumber);
    /// Allocates device memory.
    fn allocate(address: *mut Address, len: usize);
    /// Frees device memory.
    fn free(address: Address);
    /// Allocates pinned host memory.
    fn allocate_pinned(base: *mut *mut c_void, len: usize, flags: c_uint);
    /// Frees pinned host memory.
    fn free_pinned(base: *mut c_void);
    /// Fills memory. CUDA takes a byte and HIP an int; kvx only passes zero.
    fn fill(address: Address, value: c_int, len: usize, stream: StreamHandle);
    /// Gets the allocation that contains an address.
    fn allocation(base: *mut Address, len: *mut usize, address: Address);
    /// Gets a handle of an allocation for other processes.
    fn share(handle: *mut IpcMemoryHandle, base: Address);
    /// Opens another process's allocation.
    fn open(address: *mut Address, handle: IpcMemoryHandle, flags: c_uint);
    /// Closes another process's allocation.
    fn close(address: Address);
    /// Creates a stream.
    fn create_stream(stream: *mut StreamHandle, flags: c_uint);
    /// Destroys a stream.
    fn destroy_stream(stream: StreamHandle);
    /// Creates an event.
    fn create_event(event: *mut EventHandle, flags: c_uint);
    /// Destroys an event.
    fn destroy_event(event: EventHandle);
    /// Records an event on a stream.
    fn record_event(event: EventHandle, stream: StreamHandle);
    /// Asks whether an event is reached.
    fn query_event(event: EventHandle);
    /// Loads a module.
    fn load_module(module: *mut ModuleHandle, image: *const c_void);
    /// Gets a kernel of a module.
    fn module_function(function: *mut FunctionHandle, module: ModuleHandle, name: *const c_char);
    /// Launches a kernel.
    fn launch(
        function: FunctionHandle,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_memory: c_uint,
        stream: StreamHandle,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
}

functions! {
    /// The names of a driver's functions for virtual memory.
    names VirtualMemoryNames
    /// A driver's functions for virtual memory.
    table VirtualMemoryFunctions

    /// Gets the granularity of lengths.
    fn granularity(len: *mut usize, memory: *const PhysicalMemory, kind: c_int);
    /// Reserves addresses.
    fn reserve(address: *mut Address, len: usize, align: usize, wish: Address, flags: u64);
    /// Frees addresses.
    fn free_addresses(address: Address, len: usize);
    /// Creates physical memory.
    fn create(handle: *mut u64, len: usize, memory: *const PhysicalMemory, flags: u64);
    /// Releases physical memory.
    fn release(handle: u64);
    /// Maps physical memory at addresses.
    fn map(address: Address, len: usize, offset: usize, handle: u64, flags: u64);
    /// Unmaps addresses.
    fn unmap(address: Address, len: usize);
    /// Lets a device access addresses.
    fn set_access(address: Address, len: usize, access: *const Access, count: usize);
    /// Exports physical memory as a descriptor.
    fn export(file: *mut c_int, handle: u64, kind: c_int, flags: u64);
    /// Imports physical memory.
    fn import(handle: *mut u64, file: *mut c_void, kind: c_int);
}

/// A compiler's program.
pub(crate) type Program = *mut c_void;
/// C strings.
pub(crate) type Strings = *const *const c_char;

functions! {
    /// The names of a run-time compiler's functions.
    names CompilerNames
    /// A run-time compiler's functions.
    table CompilerFunctions

    /// Creates a program.
    fn create(
        program: *mut Program,
        source: *const c_char,
        name: *const c_char,
        headers: c_int,
        header_sources: Strings,
        header_names: Strings,
    );
    /// Compiles a program.
    fn compile(program: Program, count: c_int, options: Strings);
    /// Gets the length of the log.
    fn log_size(program: Program, len: *mut usize);
    /// Gets the log.
    fn log(program: Program, text: *mut c_char);
    /// Gets the length of the code.
    fn code_size(program: Program, len: *mut usize);
    /// Gets the code.
    fn code(program: Program, code: *mut c_char);
    /// Destroys a program.
    fn destroy(program: *mut Program);
}
