//! The kinds of memory for regions.

use std::sync::Arc;

use kvx_core::{ErrorKind, Memory};
use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::pattern;

/// A kind of memory for regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// A kvx pool.
    Pool,
    /// Host memory of the program.
    Owned,
    /// Memory of the setup's device.
    Device,
    /// Host memory with a constant content, which peers may only read.
    Shared,
}

impl Backing {
    /// Allocates `len` bytes with content `seed`, or zeros. Device memory comes from `device`.
    ///
    /// # Errors
    /// `Invalid` if device memory is requested without a device; an error of the allocation.
    pub(crate) fn memory(
        self,
        len: usize,
        seed: Option<u64>,
        device: Option<&dyn Device>,
    ) -> kvx_core::Result<Memory> {
        let memory = match (self, device) {
            (Backing::Pool, _) => Memory::pool(len).build()?,
            (Backing::Owned | Backing::Shared, _) => Memory::owned(vec![0; len]),
            (Backing::Device, Some(device)) => device.allocate(len)?,
            (Backing::Device, None) => {
                return Err(ErrorKind::Invalid.because("the setup has no device"));
            }
        };
        if let Some(seed) = seed {
            pattern::fill(&memory, seed)?;
        }
        if self != Backing::Shared {
            return Ok(memory);
        }
        // SAFETY: the new memory keeps the old one alive, and nothing writes to its bytes from now
        // on.
        Ok(unsafe { Memory::adopt_shared(memory.as_ptr(), len, memory) })
    }
}

/// A function that returns the device of this process, the same one at each call.
pub type DeviceSource = fn() -> kvx_core::Result<Arc<dyn Device>>;
