//! The devices of this process.

use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, PoisonError};

use kvx_core::{DeviceId, MemoryKind, Unavailable};
use kvx_gpu::{Device, DeviceInfo};

use crate::driver::Hip;
use crate::ffi::{self, Status};
use crate::library::Library;

static DEVICES: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());

/// The AMD devices that this process sees, in the runtime's order; each time the same ones.
///
/// Nothing is started on a device before it is used. What the process sees is the choice of `ROCR_VISIBLE_DEVICES` and
/// `HIP_VISIBLE_DEVICES`, as of the first call.
///
/// # Errors
/// Why there are none: no runtime, one that is too old, or no device; with what to do. Asked again, it tries again.
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
    let mut abouts = Vec::new();
    for ordinal in 0..library.devices {
        let mut number = 0;
        // SAFETY: a place for one number.
        let status = unsafe { (table.hipDeviceGet)(&raw mut number, ordinal) };
        if status != ffi::SUCCESS {
            let (name, text) = library.explained(status);
            return Err(Unavailable::because(
                format!("hipDeviceGet of device {ordinal} says {name}: {text}"),
                "see what rocminfo lists",
            ));
        }
        let mut uuid = [0; 16];
        // SAFETY: a place for one UUID.
        let status = unsafe { (table.hipDeviceGetUuid)(&raw mut uuid, number) };
        let bus = told(table.hipDeviceGetPCIBusId, number);
        let about = DeviceInfo {
            kind: MemoryKind::Rocm,
            driver: "HIP",
            id: id((status == ffi::SUCCESS).then_some(uuid), &bus),
            ordinal: ordinal.cast_unsigned(),
            name: told(table.hipDeviceGetName, number),
            bus,
            version: library.shown(),
        };
        abouts.push((about, number));
    }
    let all: Arc<[_]> = abouts.iter().map(|(about, number)| (about.id, *number)).collect();
    let device =
        |(about, number)| Device::new(Arc::new(Hip::new(library, number, about, Arc::clone(&all))));
    Ok(abouts.into_iter().map(device).collect())
}

/// The UUID of a device; for those that have none, which say nothing or `XX`, the address on the bus.
fn id(uuid: Option<[u8; 16]>, bus: &str) -> DeviceId {
    match uuid {
        Some(uuid) if uuid != [0; 16] && !uuid.starts_with(b"XX") => DeviceId(uuid),
        _ => {
            let mut id = [0; 16];
            id.iter_mut().zip(bus.bytes()).for_each(|(id, byte)| *id = byte);
            DeviceId(id)
        }
    }
}

/// A text that the runtime has for a device; empty if it has none.
fn told(
    function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Status,
    number: c_int,
) -> String {
    let mut text = [0u8; 256];
    // SAFETY: as many bytes as is said, and the last stays NUL.
    unsafe { function(text.as_mut_ptr().cast(), text.len() as c_int - 1, number) };
    CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_without_a_uuid_is_known_by_its_bus() {
        let bus = "0000:c3:00.0";
        for none in [None, Some([0; 16]), Some(*b"XX\0\0\0\0\0\0\0\0\0\0\0\0\0\0")] {
            assert_eq!(&id(none, bus).0[..12], bus.as_bytes());
        }
        assert_eq!(id(Some([7; 16]), bus), DeviceId([7; 16]));
    }
}
