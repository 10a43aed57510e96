//! The devices: those that a program sees, their names, and whether they work.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::code::{Answer, Code};
use crate::settings::{note_fault, settings};

/// The vendor whose driver the caller uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Maker {
    Cuda,
    Hip,
}

/// A device of the machine, independent of the ordinals in programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Device(pub(crate) usize);

/// The error that each call to a broken device returns; 0 for working devices.
static BROKEN: [AtomicI32; 16] = [const { AtomicI32::new(0) }; 16];

/// Repairs all devices.
pub(crate) fn mend() {
    for broken in &BROKEN {
        broken.store(0, Ordering::Release);
    }
}

impl Maker {
    /// Returns the devices that this process sees, by ordinal.
    fn visible(self) -> &'static [Device] {
        static CUDA: OnceLock<Vec<Device>> = OnceLock::new();
        static HIP: OnceLock<Vec<Device>> = OnceLock::new();
        let (once, variable) = match self {
            Maker::Cuda => (&CUDA, "CUDA_VISIBLE_DEVICES"),
            Maker::Hip => (&HIP, "HIP_VISIBLE_DEVICES"),
        };
        once.get_or_init(|| {
            let all = settings().devices;
            match std::env::var(variable) {
                Ok(list) => self.chosen(&list, all),
                Err(_) => (0..all).map(Device).collect(),
            }
        })
    }

    /// Returns the devices of a list, up to the first that does not exist.
    fn chosen(self, list: &str, all: usize) -> Vec<Device> {
        let named = |name: &str| match name.strip_prefix("GPU-") {
            Some(uuid) => {
                (0..all).map(Device).find(|device| self.uuid_text(*device).starts_with(uuid))
            }
            None => name.parse().ok().filter(|number| *number < all).map(Device),
        };
        list.split(',').map_while(|name| named(name.trim())).collect()
    }

    pub(crate) fn count(self) -> usize {
        self.visible().len()
    }

    /// Returns a device. Fails with `INVALID_DEVICE`.
    pub(crate) fn device(self, ordinal: i32) -> Answer<Device> {
        let at = usize::try_from(ordinal).map_err(|_| Code::INVALID_DEVICE)?;
        self.visible().get(at).copied().ok_or(Code::INVALID_DEVICE)
    }

    /// Returns the ordinal of a device in this process, or -2 if the process does not see it, like
    /// CUDA.
    pub(crate) fn ordinal(self, device: Device) -> i32 {
        self.visible().iter().position(|seen| *seen == device).map_or(-2, |at| at as i32)
    }

    pub(crate) fn uuid(self, device: Device) -> [u8; 16] {
        let mut uuid = match self {
            Maker::Cuda => *b"kvx-stand-in-cu\0",
            Maker::Hip => *b"kvx-stand-in-hi\0",
        };
        uuid[15] = device.0 as u8;
        uuid
    }

    fn uuid_text(self, device: Device) -> String {
        let hex: String = self.uuid(device).iter().map(|byte| format!("{byte:02x}")).collect();
        let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        parts.join("-")
    }

    pub(crate) fn name(self, device: Device) -> String {
        format!("kvx stand-in {}", device.0)
    }

    pub(crate) fn bus(self, device: Device) -> String {
        let domain = match self {
            Maker::Cuda => 0,
            Maker::Hip => 1,
        };
        format!("{domain:04x}:{:02x}:00.0", device.0 + 1)
    }
}

impl Device {
    /// Fails with the error that broke the device.
    pub(crate) fn works(self) -> Answer {
        match BROKEN[self.0].load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Breaks the device: work on it has done something that a device does not survive. All later
    /// calls fail.
    pub(crate) fn break_down(self, code: Code) {
        note_fault();
        _ = BROKEN[self.0].compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }
}
