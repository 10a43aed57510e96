#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(any(feature = "shm", feature = "tcp"))]
mod clock;
mod described;
#[doc(hidden)]
pub mod fuzz;
#[cfg(feature = "shm")]
mod shm;
#[cfg(feature = "tcp")]
mod staging;
#[cfg(feature = "tcp")]
mod tcp;

#[cfg(feature = "shm")]
pub use shm::Shm;
#[cfg(feature = "tcp")]
pub use tcp::Tcp;

/// A ticket, and the result with which to settle it.
#[cfg(any(feature = "shm", feature = "tcp"))]
type Settlement = (kvx_core::backend::Ticket, kvx_core::Result<()>);
