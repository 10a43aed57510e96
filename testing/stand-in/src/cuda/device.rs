//! Devices: their names and attributes.

use std::ffi::c_int;

use super::context::{current, device, initialised};
use crate::argument::{Out, answer};
use crate::code::Code;
use crate::devices::Maker;
use crate::settings::settings;

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> c_int {
    answer("cuDeviceGetCount", || {
        initialised()?;
        count.set(Maker::Cuda.count() as c_int)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGet(found: Out<c_int>, ordinal: c_int) -> c_int {
    answer("cuDeviceGet", || {
        device(ordinal)?;
        found.set(ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: Out<u8>, room: c_int, ordinal: c_int) -> c_int {
    answer("cuDeviceGetName", || name.text(&Maker::Cuda.name(device(ordinal)?), room))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, ordinal: c_int) -> c_int {
    answer("cuDeviceGetUuid_v2", || uuid.set(Maker::Cuda.uuid(device(ordinal)?)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetPCIBusId(name: Out<u8>, room: c_int, ordinal: c_int) -> c_int {
    answer("cuDeviceGetPCIBusId", || name.text(&Maker::Cuda.bus(device(ordinal)?), room))
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, ordinal: c_int) -> c_int {
    answer("cuDeviceGetAttribute", || {
        device(ordinal)?;
        value.set(match attribute {
            // The compute capability, major and minor.
            75 => 8,
            76 => 0,
            // The number of multiprocessors.
            16 => 4,
            // Unified addresses, virtual memory, its descriptors, RDMA to it, pools, dma-buf
            // descriptors.
            41 | 102 | 103 | 110 | 115 | 124 => 1,
            // Writes of network cards are flushed by the host, or are ordered for all devices.
            117 => 1,
            118 => {
                if settings().unordered_writes {
                    0
                } else {
                    200
                }
            }
            attribute if attribute > 0 => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFlushGPUDirectRDMAWrites(target: c_int, scope: c_int) -> c_int {
    answer("cuFlushGPUDirectRDMAWrites", || {
        current()?;
        // The current context, for its owner or for all devices.
        if target == 0 && [100, 200].contains(&scope) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceCanAccessPeer(can: Out<c_int>, ordinal: c_int, peer: c_int) -> c_int {
    answer("cuDeviceCanAccessPeer", || {
        let apart = device(ordinal)? != device(peer)?;
        can.set(c_int::from(apart && settings().peers))
    })
}
