//! The limit of a GPU: bare copies by its driver.
//!
//! This module uses none of the library's code, which could slow the limit down or speed it up.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::io::{Error, Result};
use std::ptr::null_mut;

type DriverStatus = c_int;
/// A context, a stream, or an address of the host.
type DriverHandle = *mut c_void;

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BareCopyDirection {
    ToDevice,
    ToHost,
    Within,
}

/// The driver of the first GPU, with a stream on it. Only one thread uses it.
pub(crate) struct BareDriver {
    stream: DriverHandle,
    copy: Copy,
    wait: unsafe extern "C" fn(DriverHandle) -> DriverStatus,
}

enum Copy {
    Cuda {
        to_device: unsafe extern "C" fn(u64, *const c_void, usize, DriverHandle) -> DriverStatus,
        to_host: unsafe extern "C" fn(DriverHandle, u64, usize, DriverHandle) -> DriverStatus,
        within: unsafe extern "C" fn(u64, u64, usize, DriverHandle) -> DriverStatus,
    },
    Hip(
        unsafe extern "C" fn(
            DriverHandle,
            *const c_void,
            usize,
            c_int,
            DriverHandle,
        ) -> DriverStatus,
    ),
}

/// `CU_STREAM_NON_BLOCKING`, and HIP's: it does not wait for the null stream.
const NON_BLOCKING: c_uint = 1;

impl BareDriver {
    /// Opens the driver of NVIDIA's first device, and makes the device current on this thread.
    pub(crate) fn cuda() -> Result<Self> {
        let library = open("KVX_CUDA_LIB", "libcuda.so.1")?;
        // SAFETY: the signatures are those of the driver's interface, which keeps them for a name.
        unsafe {
            let device: unsafe extern "C" fn(*mut c_int, c_int) -> DriverStatus =
                symbol(library, c"cuDeviceGet")?;
            let context: unsafe extern "C" fn(*mut DriverHandle, c_int) -> DriverStatus =
                symbol(library, c"cuDevicePrimaryCtxRetain")?;
            let enter: unsafe extern "C" fn(DriverHandle) -> DriverStatus =
                symbol(library, c"cuCtxSetCurrent")?;
            let stream: unsafe extern "C" fn(*mut DriverHandle, c_uint) -> DriverStatus =
                symbol(library, c"cuStreamCreate")?;
            let (mut number, mut ours, mut made) = (0, null_mut(), null_mut());
            check("cuDeviceGet", device(&raw mut number, 0))?;
            check("cuDevicePrimaryCtxRetain", context(&raw mut ours, number))?;
            check("cuCtxSetCurrent", enter(ours))?;
            check("cuStreamCreate", stream(&raw mut made, NON_BLOCKING))?;
            let copy = Copy::Cuda {
                to_device: symbol(library, c"cuMemcpyHtoDAsync_v2")?,
                to_host: symbol(library, c"cuMemcpyDtoHAsync_v2")?,
                within: symbol(library, c"cuMemcpyDtoDAsync_v2")?,
            };
            Ok(BareDriver { stream: made, copy, wait: symbol(library, c"cuStreamSynchronize")? })
        }
    }

    /// Opens the driver of AMD's first device, and makes the device current on this thread.
    pub(crate) fn hip() -> Result<Self> {
        let library = open("KVX_HIP_LIB", "libamdhip64.so")?;
        // SAFETY: the signatures are those of HIP's interface, which keeps them for a name.
        unsafe {
            let enter: unsafe extern "C" fn(c_int) -> DriverStatus =
                symbol(library, c"hipSetDevice")?;
            let stream: unsafe extern "C" fn(*mut DriverHandle, c_uint) -> DriverStatus =
                symbol(library, c"hipStreamCreateWithFlags")?;
            let mut made = null_mut();
            check("hipSetDevice", enter(0))?;
            check("hipStreamCreateWithFlags", stream(&raw mut made, NON_BLOCKING))?;
            let copy = Copy::Hip(symbol(library, c"hipMemcpyAsync")?);
            Ok(BareDriver { stream: made, copy, wait: symbol(library, c"hipStreamSynchronize")? })
        }
    }

    /// Starts a copy.
    ///
    /// # Safety
    /// Both sides are valid memory of the kinds that `way` names until [`wait`](BareDriver::wait)
    /// has returned, and no references into the destination exist.
    pub(crate) unsafe fn copy(
        &self,
        way: BareCopyDirection,
        from: u64,
        to: u64,
        len: usize,
    ) -> Result<()> {
        let (source, destination) = (from as *const c_void, to as DriverHandle);
        // SAFETY: the caller guarantees that both sides are valid memory; the stream lives as long
        // as this.
        let status = unsafe {
            match (&self.copy, way) {
                (Copy::Cuda { to_device, .. }, BareCopyDirection::ToDevice) => {
                    to_device(to, source, len, self.stream)
                }
                (Copy::Cuda { to_host, .. }, BareCopyDirection::ToHost) => {
                    to_host(destination, from, len, self.stream)
                }
                (Copy::Cuda { within, .. }, BareCopyDirection::Within) => {
                    within(to, from, len, self.stream)
                }
                (Copy::Hip(copy), way) => {
                    let kind = match way {
                        BareCopyDirection::ToDevice => 1,
                        BareCopyDirection::ToHost => 2,
                        BareCopyDirection::Within => 3,
                    };
                    copy(destination, source, len, kind, self.stream)
                }
            }
        };
        check("a copy", status)
    }

    /// Waits until all copies have ended.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the stream lives as long as this.
        check("waiting for the stream", unsafe { (self.wait)(self.stream) })
    }
}

fn check(what: &str, status: DriverStatus) -> Result<()> {
    if status == 0 {
        Ok(())
    } else {
        Err(Error::other(format!("{what}: the driver returned {status}")))
    }
}

/// Opens the driver's library, which the process has loaded already: the file that the variable
/// names, or else `name`.
fn open(variable: &str, name: &str) -> Result<DriverHandle> {
    let name = std::env::var(variable).unwrap_or_else(|_| name.to_owned());
    let path = CString::new(name.as_str())?;
    // SAFETY: a string of the C library's; what it opens has run its initialisers already.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if library.is_null() { Err(Error::other(format!("{name} does not open"))) } else { Ok(library) }
}

/// # Safety
/// The function has this type.
unsafe fn symbol<F: std::marker::Copy>(library: DriverHandle, name: &CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<DriverHandle>()) };
    // SAFETY: an open library and a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() {
        return Err(Error::other(format!("the driver has no {}", name.to_string_lossy())));
    }
    // SAFETY: the caller guarantees that the function has this type; a function pointer has the
    // size of `found`.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}
