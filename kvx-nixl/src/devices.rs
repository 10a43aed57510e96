//! The GPUs whose memory NIXL's user may register, by the driver's own numbers for them: NIXL's
//! numbers are those.

use std::sync::Arc;

use kvx::MemoryKind;
use kvx_core::DeviceAccess as _;
use kvx_gpu::Device;

/// The GPUs of this process, which are some; or why none are offered.
pub(crate) struct Devices(Result<Vec<Arc<Device>>, String>);

impl Devices {
    /// Returns the devices of NVIDIA's driver, or else those of AMD's: a NIXL is built for one
    /// maker. Starts the driver, but nothing on a device.
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

    /// None of them where no backend `reaches` their kind of memory: NIXL would take it as served,
    /// and every registration of it would fail. `open`: the backends that were asked, for people.
    pub(crate) fn only_if(self, reaches: impl Fn(MemoryKind) -> bool, open: &str) -> Devices {
        Devices(self.0.and_then(|all| {
            match all.iter().map(|device| device.kind()).find(|kind| !reaches(*kind)) {
                Some(kind) => Err(format!("no open backend reaches {kind} memory (open: {open})")),
                None => Ok(all),
            }
        }))
    }

    /// Describes the devices, for a line of the log.
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

    /// The device of this number. Errors: there is none.
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
