//! Devices, versions and errors.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int};

use crate::argument::{Out, answer};
use crate::code::{Answer, Code};
use crate::devices::{Device, Maker};
use crate::settings::settings;

thread_local! {
    static ORDINAL: Cell<c_int> = const { Cell::new(0) };
}

/// Returns the thread's current device, if it works.
pub(crate) fn current() -> Answer<Device> {
    let device = Maker::Hip.device(ORDINAL.get())?;
    device.works()?;
    Ok(device)
}

/// Returns the ordinal of the thread's current device.
pub(super) fn current_ordinal() -> c_int {
    ORDINAL.get()
}

#[unsafe(no_mangle)]
extern "C" fn hipGetDeviceCount(count: Out<c_int>) -> c_int {
    answer("hipGetDeviceCount", || {
        let found = Maker::Hip.count();
        count.set(found as c_int)?;
        if found == 0 { Err(Code::NO_DEVICE) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipRuntimeGetVersion(version: Out<c_int>) -> c_int {
    answer("hipRuntimeGetVersion", || version.set(settings().hip_version))
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorName(error: c_int) -> *const c_char {
    Code(error).hip_name().as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn hipGetErrorString(error: c_int) -> *const c_char {
    // HIP has texts since version 6.
    match settings().hip_version < 60_000_000 {
        true => Code(error).hip_name().as_ptr(),
        false => Code(error).text().map_or(c"unknown error".as_ptr(), CStr::as_ptr),
    }
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGet(found: Out<c_int>, ordinal: c_int) -> c_int {
    answer("hipDeviceGet", || {
        Maker::Hip.device(ordinal)?;
        found.set(ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetName(name: Out<u8>, room: c_int, ordinal: c_int) -> c_int {
    answer("hipDeviceGetName", || name.text(&Maker::Hip.name(Maker::Hip.device(ordinal)?), room))
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetUuid(uuid: Out<[u8; 16]>, ordinal: c_int) -> c_int {
    answer("hipDeviceGetUuid", || uuid.set(Maker::Hip.uuid(Maker::Hip.device(ordinal)?)))
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceGetPCIBusId(name: Out<u8>, room: c_int, ordinal: c_int) -> c_int {
    answer("hipDeviceGetPCIBusId", || name.text(&Maker::Hip.bus(Maker::Hip.device(ordinal)?), room))
}

#[unsafe(no_mangle)]
extern "C" fn hipDeviceCanAccessPeer(can: Out<c_int>, ordinal: c_int, peer: c_int) -> c_int {
    answer("hipDeviceCanAccessPeer", || {
        let apart = Maker::Hip.device(ordinal)? != Maker::Hip.device(peer)?;
        can.set(c_int::from(apart && settings().peers))
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipSetDevice(ordinal: c_int) -> c_int {
    answer("hipSetDevice", || {
        Maker::Hip.device(ordinal)?;
        ORDINAL.set(ordinal);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipGetDevice(ordinal: Out<c_int>) -> c_int {
    answer("hipGetDevice", || ordinal.set(current_ordinal()))
}
