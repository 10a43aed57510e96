//! The devices of this process.

use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, PoisonError};

use kvx_core::{DeviceId, MemoryKind, Unavailable};
use kvx_gpu::{Device, DeviceInfo};

use crate::driver::Cuda;
use crate::ffi::{self, DeviceNumber, Status};
use crate::library::Library;

static DEVICES: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());

/// The NVIDIA devices that this process sees, in the driver's order; each time the same ones.
///
/// Nothing is started on a device before it is used. What the process sees is `CUDA_VISIBLE_DEVICES`' choice, as of the
/// first call.
///
/// # Errors
/// Why there are none: no driver, one that is too old or does not start, or no device; with what to do. Asked again, it
/// tries again.
pub fn devices() -> Result<Vec<Arc<Device>>, Unavailable> {
    let library = Library::open()?;
    let mut known = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if known.is_empty() {
        *known = found(library)?;
    }
    Ok(known.clone())
}

fn found(library: &'static Library) -> Result<Vec<Arc<Device>>, Unavailable> {
    let table = &library.table;
    let refused = |call: &'static str, status: Status| {
        let (name, text) = library.explained(status);
        Unavailable::because(
            format!("{call} of {} says {name}: {text}", library.path),
            "see what nvidia-smi lists",
        )
    };
    let check =
        |call, status| if status == ffi::SUCCESS { Ok(()) } else { Err(refused(call, status)) };
    let mut count = 0;
    // SAFETY: a place for one number.
    check("cuDeviceGetCount", unsafe { (table.cuDeviceGetCount)(&raw mut count) })?;
    if count < 1 {
        return Err(refused("cuDeviceGetCount", ffi::NO_DEVICE));
    }
    let mut abouts = Vec::new();
    for ordinal in 0..count {
        let mut number: DeviceNumber = 0;
        let mut id = [0; 16];
        // SAFETY: a place for one number; then for one UUID of a device that the driver has named.
        unsafe {
            check("cuDeviceGet", (table.cuDeviceGet)(&raw mut number, ordinal))?;
            check("cuDeviceGetUuid", (table.cuDeviceGetUuid_v2)(&raw mut id, number))?;
        }
        let about = DeviceInfo {
            kind: MemoryKind::Cuda,
            driver: "CUDA",
            id: DeviceId(id),
            ordinal: ordinal.cast_unsigned(),
            name: told(table.cuDeviceGetName, number),
            bus: told(table.cuDeviceGetPCIBusId, number),
            version: library.shown(),
        };
        abouts.push((about, number));
    }
    let all: Arc<[_]> = abouts.iter().map(|(about, number)| (about.id, *number)).collect();
    let device = |(about, number)| {
        Device::new(Arc::new(Cuda::new(library, number, about, Arc::clone(&all))))
    };
    Ok(abouts.into_iter().map(device).collect())
}

/// A text that the driver has for a device; empty if it has none.
fn told(
    function: unsafe extern "C" fn(*mut c_char, c_int, DeviceNumber) -> Status,
    number: DeviceNumber,
) -> String {
    let mut text = [0u8; 256];
    // SAFETY: as many bytes as is said, and the last stays NUL.
    unsafe { function(text.as_mut_ptr().cast(), text.len() as c_int - 1, number) };
    CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy().into_owned()
}
