//! The GPUs whose memory NIXL's user may register. kvx uses the driver's device numbers, as NIXL
//! does.

use std::sync::Arc;

use kvx::MemoryKind;
use kvx_core::DeviceAccess as _;
use kvx_gpu::Device;

/// The GPUs of this process, at least one, or the reason why the backend offers none.
pub(crate) struct Devices(Result<Vec<Arc<Device>>, String>);

impl Devices {
    /// Returns the devices of NVIDIA's driver, otherwise those of AMD's: a NIXL is built for one
    /// vendor. Starts the driver, but nothing on a device.
    pub(crate) fn find() -> Devices {
        let found = kvx::cuda::devices().or_else(|cuda| {
            let rocm = |rocm: kvx_core::backend::Unavailable| {
                format!("NVIDIA: {}; AMD: {}", cuda.missing, rocm.missing)
            };
            kvx::rocm::devices().map_err(rocm)
        });
        Devices(found)
    }

    pub(crate) fn all(&self) -> &[Arc<Device>] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Offers no devices if no backend `reaches` their kind of memory: NIXL would take the memory
    /// as supported, and every registration would fail. `open` names the backends in the reason.
    pub(crate) fn only_if(self, reaches: impl Fn(MemoryKind) -> bool, open: &str) -> Devices {
        Devices(self.0.and_then(|all| {
            match all.iter().map(|device| device.kind()).find(|kind| !reaches(*kind)) {
                Some(kind) => Err(format!("no open backend reaches {kind} memory (open: {open})")),
                None => Ok(all),
            }
        }))
    }

    /// Describes the devices for a log line.
    pub(crate) fn describe(&self) -> String {
        match &self.0 {
            Err(why) => format!("memory of GPUs is not offered: {why}"),
            Ok(all) => {
                let named = |device: &Arc<Device>| {
                    let about = device.info();
                    format!("{} {} ({})", about.driver, about.ordinal, about.name)
                };
                let names: Vec<_> = all.iter().map(named).collect();
                format!("memory of GPUs is offered: {}", names.join(", "))
            }
        }
    }

    /// Returns the device with this number. Errors: it does not exist.
    pub(crate) fn of(&self, ordinal: u64) -> Result<&Arc<Device>, String> {
        let all = self.0.as_ref().map_err(|_| self.describe())?;
        let found = all.iter().find(|device| u64::from(device.info().ordinal) == ordinal);
        found.ok_or_else(|| {
            format!(
                "there is no device {ordinal}: this process sees devices 0 to {}",
                all.len() - 1
            )
        })
    }
}
