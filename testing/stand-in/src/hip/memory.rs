//! Frees memory, and returns attributes of addresses.

use std::ffi::{c_int, c_uint};

use super::device::{current, current_ordinal};
use crate::argument::{Out, answer};
use crate::code::{Answer, Code};
use crate::devices::Maker;
use crate::memory::{Origin, memory, memory_mut};
use crate::settings::settings;

#[unsafe(no_mangle)]
extern "C" fn hipFree(address: u64) -> c_int {
    answer("hipFree", || {
        current()?;
        // Freeing null is allowed here.
        if address == 0 {
            return Ok(());
        }
        memory_mut().free(address, |origin| matches!(origin, Origin::Plain | Origin::Pool))
    })
}

/// `hipPointerAttribute_t`.
#[repr(C)]
struct PointerAttributes {
    memory_type: c_int,
    ordinal: c_int,
    device_pointer: u64,
    host_pointer: u64,
    managed: c_int,
    flags: c_uint,
}

/// The numbers of `hipMemoryType`, which HIP 6 changed.
struct Types {
    /// `None` if an unknown address is an error.
    unregistered: Option<c_int>,
    host: c_int,
    device: c_int,
}

impl Types {
    fn of(version: i32) -> Self {
        if version < 60_000_000 {
            Types { unregistered: None, host: 0, device: 1 }
        } else {
            Types { unregistered: Some(0), host: 1, device: 2 }
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn hipPointerGetAttributes(attributes: Out<PointerAttributes>, address: u64) -> c_int {
    answer("hipPointerGetAttributes", || attributes.set(of_address(address)?))
}

fn of_address(address: u64) -> Answer<PointerAttributes> {
    let types = Types::of(settings().hip_version);
    let memory = memory();
    let nothing = PointerAttributes {
        memory_type: 0,
        ordinal: current_ordinal(),
        device_pointer: 0,
        host_pointer: 0,
        managed: 0,
        flags: 0,
    };
    if let Some((_, found)) = memory.around(address) {
        let ordinal = Maker::Hip.ordinal(found.device);
        return Ok(PointerAttributes {
            memory_type: types.device,
            ordinal,
            device_pointer: address,
            ..nothing
        });
    }
    if memory.pinned_around(address).is_some() {
        let (device_pointer, host_pointer) = (address, address);
        return Ok(PointerAttributes {
            memory_type: types.host,
            device_pointer,
            host_pointer,
            ..nothing
        });
    }
    let memory_type = types.unregistered.ok_or(Code::INVALID_VALUE)?;
    Ok(PointerAttributes { memory_type, ordinal: -2, ..nothing })
}

#[unsafe(no_mangle)]
extern "C" fn hipPointerGetAttribute(value: Out<usize>, name: c_int, address: u64) -> c_int {
    answer("hipPointerGetAttribute", || {
        let memory = memory();
        let (base, found) = memory.around(address).ok_or(Code::INVALID_VALUE)?;
        // kvx reads only these attributes: the range, and the pool.
        value.set(match name {
            11 | 12 if found.hides_its_range(2) => return Err(Code::INVALID_VALUE),
            11 => base as usize,
            12 => found.len,
            17 if found.origin == Origin::Pool => 0x0900_0000,
            17 => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    })
}
