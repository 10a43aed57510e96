//! Virtual memory, which needs no current device.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::RawFd;

use super::both;
use crate::argument::{In, Out};
use crate::code::{Answer, Code};
use crate::devices::{Device, Maker};
use crate::handles::Handle;
use crate::memory::memory_mut;
use crate::settings::settings;
use crate::virtual_memory::{GRANULARITY, PHYSICAL, Physical};

/// `CUmemLocation` and `hipMemLocation`; kind 1 is a device.
#[derive(Clone, Copy)]
#[repr(C)]
struct Location {
    kind: c_uint,
    ordinal: c_int,
}

impl Location {
    fn device(self, maker: Maker) -> Answer<Device> {
        if self.kind == 1 { device(maker, self.ordinal) } else { Err(Code::INVALID_VALUE) }
    }
}

/// `CUmemAllocationProp` and `hipMemAllocationProp`; kind 1 is pinned memory, and handle type 1 a
/// descriptor.
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
}

/// `CUmemAccessDesc` and `hipMemAccessDesc`; flag 3 allows reads and writes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Access {
    location: Location,
    flags: c_uint,
}

/// Returns the device with this ordinal in the process.
fn device(maker: Maker, ordinal: c_int) -> Answer<Device> {
    ready(maker)?;
    maker.device(ordinal)
}

/// Fails if CUDA's driver has not been initialised.
fn ready(maker: Maker) -> Answer {
    match maker {
        Maker::Cuda => crate::cuda::initialised(),
        Maker::Hip => Ok(()),
    }
}

/// Returns the descriptor to import. HIP before 7.1 takes a pointer to it.
fn descriptor(maker: Maker, told: In<c_int>) -> Answer<RawFd> {
    match maker {
        Maker::Hip if settings().hip_version < 70_100_000 => told.get(),
        _ => RawFd::try_from(told.address()).map_err(|_| Code::INVALID_VALUE),
    }
}

both! {
    cuMemGetAllocationGranularity, hipMemGetAllocationGranularity(
        len: Out<usize>,
        properties: In<Properties>,
        _option: c_int,
    ) |_, maker| {
        properties.get()?.location.device(maker)?;
        len.set(GRANULARITY)
    }

    cuMemAddressReserve, hipMemAddressReserve(
        address: Out<u64>,
        len: usize,
        align: usize,
        wish: u64,
        flags: u64,
    ) |_, maker| {
        ready(maker)?;
        if flags != 0 || wish != 0 || align > crate::mapping::page() {
            return Err(Code::INVALID_VALUE);
        }
        address.set(memory_mut().reserve(len)?)
    }

    cuMemAddressFree, hipMemAddressFree(address: u64, len: usize) |_, maker| {
        ready(maker)?;
        memory_mut().unreserve(address, len)
    }

    cuMemCreate, hipMemCreate(handle: Out<Handle>, len: usize, properties: In<Properties>, flags: u64) |_, maker| {
        let Properties { kind, handles, location, .. } = properties.get()?;
        let device = location.device(maker)?;
        if kind != 1 || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(PHYSICAL.add(Physical::create(device, len, handles & 1 != 0)?))
    }

    cuMemRelease, hipMemRelease(handle: Handle) |_, _| { PHYSICAL.remove(handle).map(|_| ()) }

    cuMemMap, hipMemMap(address: u64, len: usize, offset: usize, handle: Handle, flags: u64) |_, maker| {
        ready(maker)?;
        if offset != 0 || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        memory_mut().map(address, len, &*PHYSICAL.get(handle)?)
    }

    cuMemUnmap, hipMemUnmap(address: u64, len: usize) |_, maker| {
        ready(maker)?;
        memory_mut().unmap(address, len)
    }

    cuMemSetAccess, hipMemSetAccess(address: u64, len: usize, access: In<Access>, count: usize) |_, maker| {
        for at in 0..count {
            let Access { location, flags } = access.at(at)?;
            location.device(maker)?;
            memory_mut().set_access(address, len, flags == 3)?;
        }
        Ok(())
    }

    cuMemExportToShareableHandle, hipMemExportToShareableHandle(
        shared: Out<RawFd>,
        handle: Handle,
        kind: c_int,
        flags: u64,
    ) |_, maker| {
        ready(maker)?;
        if kind != 1 || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        shared.set(PHYSICAL.get(handle)?.export()?)
    }

    cuMemImportFromShareableHandle, hipMemImportFromShareableHandle(
        handle: Out<Handle>,
        shared: In<c_int>,
        kind: c_int,
    ) |_, maker| {
        let ours = device(maker, 0)?;
        if kind != 1 {
            return Err(Code::INVALID_VALUE);
        }
        handle.set(PHYSICAL.add(Physical::import(ours, descriptor(maker, shared)?)?))
    }
}
