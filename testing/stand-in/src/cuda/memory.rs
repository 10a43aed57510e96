//! Frees memory, and returns attributes of addresses.

use std::ffi::{c_int, c_uint, c_void};

use super::context::{current, initialised, to_handle};
use crate::argument::{In, answer};
use crate::code::{Answer, Code};
use crate::devices::Maker;
use crate::mapping::is_of_device;
use crate::memory::{Origin, memory, memory_mut};
use crate::settings::settings;

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    answer("cuMemFree_v2", || {
        current()?;
        memory_mut().free(address, |origin| matches!(origin, Origin::Plain | Origin::Pool))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: In<c_int>,
    values: In<*mut c_void>,
    address: u64,
) -> c_int {
    answer("cuPointerGetAttributes", || {
        initialised()?;
        for at in 0..count as usize {
            attribute(attributes.at(at)?, values.at(at)?, address)?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(value: *mut c_void, name: c_int, address: u64) -> c_int {
    answer("cuPointerGetAttribute", || {
        initialised()?;
        let memory = memory();
        if memory.around(address).is_none() && memory.pinned_around(address).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        drop(memory);
        attribute(name, value, address)
    })
}

/// Writes one attribute of an address; unknown attributes are zero.
fn attribute(name: c_int, value: *mut c_void, address: u64) -> Answer {
    let memory = memory();
    let device = memory.around(address);
    let pinned = memory.pinned_around(address).filter(|_| !is_of_device(address));
    let origin = device.map(|(_, found)| found.origin);
    let ranged = device.filter(|(_, found)| !found.hides_its_range(2));
    match name {
        // The context; virtual memory and memory of pools has none.
        1 => put(
            value,
            match device {
                Some((_, found)) if !matches!(origin, Some(Origin::Virtual | Origin::Pool)) => {
                    let other = usize::from(settings().other_context);
                    to_handle(found.device) + other
                }
                _ => 0,
            },
        ),
        // The number of the allocation.
        7 => put(
            value,
            device.filter(|(_, found)| !found.hides_its_range(3)).map_or(0, |(base, _)| base),
        ),
        // The type of memory: 1 for the host, 2 for a device.
        2 => put(value, if device.is_some() { 2_u32 } else { u32::from(pinned.is_some()) }),
        // Whether the memory is managed; the size is that of a C++ bool.
        8 => put(value, 0_u8),
        9 => put(value, device.map_or(-2, |(_, found)| Maker::Cuda.ordinal(found.device))),
        10 => put(value, u8::from(origin == Some(Origin::Plain))),
        11 => {
            put(value, ranged.map(|(base, _)| base).or(pinned.map(|(base, _)| base)).unwrap_or(0))
        }
        12 => put(
            value,
            ranged.map(|(_, found)| found.len).or(pinned.map(|(_, len)| len)).unwrap_or(0),
        ),
        // The pool.
        17 => put(value, if origin == Some(Origin::Pool) { 0x0900_0000_usize } else { 0 }),
        _ => Err(Code::INVALID_VALUE),
    }
}

fn put<T>(to: *mut c_void, value: T) -> Answer {
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the pointer is not null, so by the contract of the driver's function it has space for
    // the attribute's type.
    unsafe { to.cast::<T>().write_unaligned(value) };
    Ok(())
}
