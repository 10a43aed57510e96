//! Virtual memory. It needs no context, as in the driver.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::RawFd;

use super::context::{device, initialised};
use crate::argument::{In, Out, answer};
use crate::code::{Answer, Code};
use crate::devices::Device;
use crate::handles::Handle;
use crate::memory::memory_mut;
use crate::virtual_memory::{GRANULARITY, PHYSICAL, Physical};

/// `CUmemLocation`: on a device is 1.
#[derive(Clone, Copy)]
#[repr(C)]
struct Location {
    kind: c_uint,
    ordinal: c_int,
}

impl Location {
    fn device(self) -> Answer<Device> {
        if self.kind == 1 { device(self.ordinal) } else { Err(Code::INVALID_VALUE) }
    }
}

/// `CUmemAllocationProp`: pinned memory is 1, a descriptor among the handles too.
#[derive(Clone, Copy)]
#[repr(C)]
struct Properties {
    kind: c_uint,
    handles: c_uint,
    location: Location,
    windows: *const c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`: for reading and writing is 3.
#[derive(Clone, Copy)]
#[repr(C)]
struct Access {
    location: Location,
    flags: c_uint,
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetAllocationGranularity(
    len: Out<usize>,
    properties: In<Properties>,
    _option: c_int,
) -> c_int {
    answer("cuMemGetAllocationGranularity", || {
        initialised()?;
        properties.get()?.location.device()?;
        len.set(GRANULARITY)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressReserve(
    address: Out<u64>,
    len: usize,
    align: usize,
    wish: u64,
    flags: u64,
) -> c_int {
    answer("cuMemAddressReserve", || {
        initialised()?;
        if flags != 0 || wish != 0 || align > crate::mapping::page() {
            return Err(Code::INVALID_VALUE);
        }
        address.set(memory_mut().reserve(len)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(address: u64, len: usize) -> c_int {
    answer("cuMemAddressFree", || {
        initialised()?;
        memory_mut().unreserve(address, len)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemCreate(handle: Out<Handle>, len: usize, properties: In<Properties>, flags: u64) -> c_int {
    answer("cuMemCreate", || {
        initialised()?;
        let Properties { kind, handles, location, .. } = properties.get()?;
        if kind != 1 || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(PHYSICAL.add(Physical::create(location.device()?, len, handles & 1 != 0)?))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: Handle) -> c_int {
    answer("cuMemRelease", || PHYSICAL.remove(handle).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(address: u64, len: usize, offset: usize, handle: Handle, flags: u64) -> c_int {
    answer("cuMemMap", || {
        initialised()?;
        if offset != 0 || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        memory_mut().map(address, len, &*PHYSICAL.get(handle)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(address: u64, len: usize) -> c_int {
    answer("cuMemUnmap", || {
        initialised()?;
        memory_mut().unmap(address, len)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemSetAccess(address: u64, len: usize, access: In<Access>, count: usize) -> c_int {
    answer("cuMemSetAccess", || {
        initialised()?;
        for at in 0..count {
            let Access { location, flags } = access.at(at)?;
            location.device()?;
            memory_mut().set_access(address, len, flags == 3)?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemExportToShareableHandle(
    descriptor: Out<RawFd>,
    handle: Handle,
    kind: c_int,
    flags: u64,
) -> c_int {
    answer("cuMemExportToShareableHandle", || {
        initialised()?;
        if kind != 1 || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        descriptor.set(PHYSICAL.get(handle)?.export()?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemImportFromShareableHandle(handle: Out<Handle>, descriptor: usize, kind: c_int) -> c_int {
    answer("cuMemImportFromShareableHandle", || {
        let ours = device(0)?;
        let descriptor = RawFd::try_from(descriptor).map_err(|_| Code::INVALID_VALUE)?;
        if kind != 1 {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(PHYSICAL.add(Physical::import(ours, descriptor)?))
    })
}
