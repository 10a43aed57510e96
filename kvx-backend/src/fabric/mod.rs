//! A complete transport around a native library that reads and writes remote memory.
//!
//! UCX, libfabric, NIXL and Mooncake differ in how they create an endpoint, post a piece and report
//! its completion. The rest of kvx's promises is the same for all: authentication of peers and
//! their incarnations, grants and revocation of regions, notifications that arrive once and after
//! their data, detection of silent peers, and tickets that settle when nothing touches their
//! memory. A backend implements [`Fabric`] and [`Registrar`]; [`open`] makes a
//! [`Transport`](kvx_core::backend::Transport) of them.
//!
//! Threads:
//! - One thread at a time calls methods of [`Fabric`], under the lock of the transport's
//!   [`Reactor`](crate::reactor::Reactor), but not always the same thread. None may block. Calls of
//!   the library that block belong on a thread of the fabric, which wakes the machine through a
//!   descriptor of [`Fabric::fds`].
//! - The program's threads call methods of [`Registrar`], which may block.

#[cfg(feature = "attacker-for-tests")]
pub mod attacker;
mod disconnect;
mod foreign_notices;
mod grants;
mod handshake;
#[cfg(test)]
mod hostile;
mod job;
mod lanes;
mod library;
mod link;
mod machine;
mod notices;
mod progress;
mod regions;
mod session;
mod shared_link;
mod signed;
mod stream;
mod transfers;
mod transport;

pub use job::Job;
pub use library::{
    EndpointId, Event, Fabric, FlushCompletion, JobId, Registrar, SendStatus, Unregister,
};
pub use transport::{LaneParts, Parts, open, open_lanes};
