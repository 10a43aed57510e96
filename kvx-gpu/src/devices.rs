//! The devices of a vendor in this process.

use std::sync::Arc;

use kvx_backend::loader::OpenOnce;
use kvx_core::backend::Unavailable;
use kvx_core::backend::sync::Mutex;

use super::device::Device;
use crate::driver::{Driver, Library, Vendor};

/// The devices of a vendor in this process: a static of the vendor's crate.
pub struct Devices {
    vendor: &'static Vendor,
    library: OpenOnce<Library>,
    devices: Mutex<Vec<Arc<Device>>>,
}

impl Devices {
    /// Creates an empty list without loading anything.
    pub const fn new(vendor: &'static Vendor) -> Self {
        Devices { vendor, library: OpenOnce::new(), devices: Mutex::new(Vec::new()) }
    }

    /// Returns the devices in the driver's order; each call returns the same ones. The first call
    /// loads the driver, but does nothing on a device.
    ///
    /// # Errors
    /// The reason why there are none: no library, one that is too old or fails to initialise, or no
    /// device; and what to do. The next call tries again.
    pub fn list(&'static self) -> Result<Vec<Arc<Device>>, Unavailable> {
        let library = self.library.open(|| Library::load(self.vendor))?;
        let mut devices = self.devices.lock();
        if devices.is_empty() {
            *devices = Driver::all(library)?.into_iter().map(Device::new).collect();
        }
        Ok(devices.clone())
    }
}
