//! Contexts, streams and events: by cudarc, so that a program which uses it too shares them in kind.
//!
//! Only what makes and ends them. cudarc holds statuses in an enumeration of its own, which has no value for those of a
//! newer driver; what is asked again and again, and may answer anything, goes through kvx's own table.

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUevent_flags, CUstream};
use kvx_core::{Error, ErrorKind, Result};
use kvx_gpu::{EventHandle, StreamHandle};

use crate::ffi::{DeviceNumber, Handle};
use crate::library::Library;

/// The primary context of a device, which all of a process shares. Held for the life of the process.
///
/// Errors: `Unavailable` if cudarc has opened another driver than kvx.
pub(crate) fn primary(library: &Library, device: DeviceNumber) -> Result<usize> {
    let table = &library.table;
    let mut ours: Handle = std::ptr::null_mut();
    // SAFETY: the device is one that the driver named; a place for one handle.
    let status = unsafe { (table.cuDevicePrimaryCtxRetain)(&raw mut ours, device) };
    library.check("cuDevicePrimaryCtxRetain", status)?;
    // SAFETY: the device is one that the driver named; the library is one that cudarc finds
    // (`Library::is_the_only_one`).
    let cudarcs = unsafe { result::primary_ctx::retain(device) };
    let theirs = cudarcs.as_ref().map_or(0, |context| *context as usize);
    if theirs != ours as usize {
        // SAFETY: retained above.
        unsafe { (table.cuDevicePrimaryCtxRelease_v2)(device) };
        return Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "cudarc has opened another driver than {}: one serves a process; set KVX_CUDA_LIB to the file that is called \
                 libcuda.so.1",
                library.path
            ),
        ));
    }
    // SAFETY: retained twice above; cudarc's own hold stays.
    unsafe { (table.cuDevicePrimaryCtxRelease_v2)(device) };
    Ok(theirs)
}

/// A stream that does not wait for the null stream.
pub(crate) fn stream(library: &Library) -> Result<StreamHandle> {
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
    stream
        .map(|stream| StreamHandle(stream as usize))
        .map_err(|error| told(library, "cuStreamCreate", error))
}

/// Ends it.
///
/// # Safety
/// It came from [`stream`] and is not used any more.
pub(crate) unsafe fn end_stream(
    library: &Library,
    StreamHandle(stream): StreamHandle,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { result::stream::destroy(stream as CUstream) }
        .map_err(|error| told(library, "cuStreamDestroy", error))
}

/// An event that measures no time.
pub(crate) fn event(library: &Library) -> Result<EventHandle> {
    let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING);
    event
        .map(|event| EventHandle(event as usize))
        .map_err(|error| told(library, "cuEventCreate", error))
}

/// Ends it.
///
/// # Safety
/// It came from [`event`] and is not used any more.
pub(crate) unsafe fn end_event(library: &Library, EventHandle(event): EventHandle) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { result::event::destroy(event as _) }
        .map_err(|error| told(library, "cuEventDestroy", error))
}

fn told(library: &Library, call: &'static str, error: DriverError) -> Error {
    library.error(call, error.0 as i32)
}
