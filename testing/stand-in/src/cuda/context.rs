//! Initialisation, errors, and each thread's stack of contexts.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::argument::{Out, answer};
use crate::code::{Answer, Code};
use crate::devices::{Device, Maker};
use crate::handles::Handle;
use crate::settings::settings;

static INITIALISED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static STACK: RefCell<Vec<Device>> = const { RefCell::new(Vec::new()) };
}

/// The first context handle; each device has one fixed context.
const FIRST: Handle = 0x0c00_0000;

/// Fails with `NOT_INITIALIZED` before initialisation.
pub(crate) fn initialised() -> Answer {
    if INITIALISED.load(Ordering::Acquire) { Ok(()) } else { Err(Code::NOT_INITIALIZED) }
}

/// Returns the device of the thread's current context, if the device works.
pub(crate) fn current() -> Answer<Device> {
    initialised()?;
    let device = STACK.with_borrow(|stack| stack.last().copied()).ok_or(Code::INVALID_CONTEXT)?;
    device.works()?;
    Ok(device)
}

pub(super) fn device(ordinal: c_int) -> Answer<Device> {
    initialised()?;
    Maker::Cuda.device(ordinal)
}

fn of_handle(handle: Handle) -> Answer<Device> {
    let ordinals = 0..Maker::Cuda.count() as c_int;
    let mut devices = ordinals.filter_map(|ordinal| Maker::Cuda.device(ordinal).ok());
    devices.find(|device| to_handle(*device) == handle).ok_or(Code::INVALID_CONTEXT)
}

/// Returns the handle of a device's primary context.
pub(super) fn to_handle(device: Device) -> Handle {
    FIRST + device.0 * 16
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> c_int {
    answer("cuInit", || {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if Maker::Cuda.count() == 0 {
            return Err(Code::NO_DEVICE);
        }
        INITIALISED.store(true, Ordering::Release);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> c_int {
    answer("cuDriverGetVersion", || version.set(settings().cuda_version))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: c_int, name: Out<*const c_char>) -> c_int {
    answer("cuGetErrorName", || text(Code(error).cuda_name(), name))
}

#[unsafe(no_mangle)]
extern "C" fn cuGetErrorString(error: c_int, string: Out<*const c_char>) -> c_int {
    answer("cuGetErrorString", || text(Code(error).text(), string))
}

fn text(found: Option<&'static CStr>, to: Out<*const c_char>) -> Answer {
    to.set(found.map_or(std::ptr::null(), CStr::as_ptr))?;
    found.map(|_| ()).ok_or(Code::INVALID_VALUE)
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRetain(context: Out<Handle>, ordinal: c_int) -> c_int {
    answer("cuDevicePrimaryCtxRetain", || context.set(to_handle(device(ordinal)?)))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) -> c_int {
    // Keeps the context: kvx does not depend on its end.
    answer("cuDevicePrimaryCtxRelease_v2", || device(ordinal).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> c_int {
    answer("cuCtxPushCurrent_v2", || {
        initialised()?;
        let device = of_handle(context)?;
        STACK.with_borrow_mut(|stack| stack.push(device));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(context: Out<Handle>) -> c_int {
    answer("cuCtxPopCurrent_v2", || {
        initialised()?;
        let device = STACK.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        context.set_if_wanted(to_handle(device));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: Handle) -> c_int {
    answer("cuCtxSetCurrent", || {
        initialised()?;
        let device = if context == 0 { None } else { Some(of_handle(context)?) };
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            stack.extend(device);
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxGetCurrent(context: Out<Handle>) -> c_int {
    answer("cuCtxGetCurrent", || {
        initialised()?;
        context.set(STACK.with_borrow(|stack| stack.last().map_or(0, |device| to_handle(*device))))
    })
}
