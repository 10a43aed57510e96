//! Devices for the suite: a simple one made of host memory, and those of vendors.

mod access;
mod allocation;
mod gpu;
mod test_device;
mod unreached;

pub use self::access::Device;
pub use self::gpu::first;
pub use self::test_device::{CopyCounters, CopyOrder, CopyOutcome, TestDevice};
pub use self::unreached::goes_elsewhere;
