//! Memory for other processes and for other makers' cards.

use std::ffi::{c_int, c_uint};
use std::os::fd::RawFd;

use super::context::current;
use crate::argument::{Out, answer};
use crate::code::Code;
use crate::ipc::MemHandle;
use crate::mapping::page;
use crate::memory::{memory, memory_mut};

#[unsafe(no_mangle)]
extern "C" fn cuIpcGetMemHandle(handle: Out<MemHandle>, address: u64) -> c_int {
    answer("cuIpcGetMemHandle", || {
        current()?;
        handle.set(memory().share(address)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenMemHandle_v2(address: Out<u64>, handle: MemHandle, flags: c_uint) -> c_int {
    answer("cuIpcOpenMemHandle_v2", || {
        current()?;
        // The driver knows one flag, and wants it.
        if flags != 1 {
            return Err(Code::INVALID_VALUE);
        }
        address.set(memory_mut().open(&handle)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: u64) -> c_int {
    answer("cuIpcCloseMemHandle", || {
        current()?;
        memory_mut().close(address)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetHandleForAddressRange(
    descriptor: Out<RawFd>,
    address: u64,
    len: usize,
    kind: c_int,
    _flags: u64,
) -> c_int {
    answer("cuMemGetHandleForAddressRange", || {
        current()?;
        let aligned = address.is_multiple_of(page() as u64) && len.is_multiple_of(page());
        if kind != 1 || !aligned {
            return Err(Code::INVALID_VALUE);
        }
        descriptor.set(memory().descriptor(address, len)?)
    })
}
