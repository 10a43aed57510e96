//! Memory of this process and of other processes.

use std::ffi::{c_int, c_uint};
use std::os::fd::RawFd;

use super::both;
use crate::argument::Out;
use crate::code::Code;
use crate::devices::Maker;
use crate::handles::Handle;
use crate::ipc::MemHandle;
use crate::mapping::page;
use crate::memory::{Origin, memory, memory_mut};
use crate::settings::settings;
use crate::stream;

both! {
    cuMemAlloc_v2, hipMalloc(address: Out<u64>, len: usize) |current| {
        address.set(memory_mut().allocate(current()?, len, Origin::Plain)?)
    }

    cuMemAllocAsync, hipMallocAsync(address: Out<u64>, len: usize, stream: Handle) |current| {
        let device = current()?;
        stream::of(stream, device)?;
        address.set(memory_mut().allocate(device, len, Origin::Pool)?)
    }

    cuMemFreeAsync, hipFreeAsync(address: u64, stream: Handle) |current| {
        let stream = stream::of(stream, current()?)?;
        memory().range(address, 1)?;
        stream.push(Box::new(move || memory_mut().free(address, |origin| origin == Origin::Pool)));
        Ok(())
    }

    cuMemHostAlloc, hipHostMalloc(address: Out<u64>, len: usize, _flags: c_uint) |current| {
        current()?;
        address.set(memory_mut().pin(len)?)
    }

    cuMemFreeHost, hipHostFree(address: u64) |current| {
        current()?;
        memory_mut().unpin(address)
    }

    cuMemGetAddressRange_v2, hipMemGetAddressRange(base: Out<u64>, len: Out<usize>, address: u64) |current| {
        current()?;
        let memory = memory();
        let (start, found) = memory.around(address).ok_or(Code::NOT_FOUND)?;
        if found.hides_its_range(1) {
            return Err(Code::INVALID_VALUE);
        }
        base.set_if_wanted(start);
        len.set_if_wanted(found.len);
        Ok(())
    }

    cuMemGetHandleForAddressRange, hipMemGetHandleForAddressRange(
        descriptor: Out<RawFd>,
        address: u64,
        len: usize,
        kind: c_int,
        _flags: u64,
    ) |current, maker| {
        current()?;
        // HIP has this function since 7.0.
        if maker == Maker::Hip && settings().hip_version < 70_000_000 {
            return Err(Code::NOT_SUPPORTED);
        }
        let aligned = address.is_multiple_of(page() as u64) && len.is_multiple_of(page());
        if kind != 1 || !aligned {
            return Err(Code::INVALID_VALUE);
        }
        descriptor.set(memory().descriptor(address, len)?)
    }

    cuIpcGetMemHandle, hipIpcGetMemHandle(handle: Out<MemHandle>, address: u64) |current| {
        current()?;
        handle.set(memory().share(address)?)
    }

    cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle(address: Out<u64>, handle: MemHandle, flags: c_uint) |current| {
        current()?;
        // Both drivers define and require exactly this flag.
        if flags != 1 {
            return Err(Code::INVALID_VALUE);
        }
        address.set(memory_mut().open(&handle)?)
    }

    cuIpcCloseMemHandle, hipIpcCloseMemHandle(address: u64) |current| {
        current()?;
        memory_mut().close(address)
    }
}
