//! A whole transport around a native library that reads and writes remote memory by itself.
//!
//! UCX, libfabric, NIXL and Mooncake differ in how an endpoint is made, a piece is posted and its
//! end is reported. What kvx promises beyond them is the same for all: who is at the other end and
//! in which life, which region was granted to whom, that a revoked region is let go of,
//! notifications that arrive once and after their data, silence that is noticed, tickets that
//! settle when nothing touches their memory. A backend writes a [`Fabric`] and a [`Registrar`];
//! [`open`] makes a [`Transport`] of them.
//!
//! Who calls what, and when:
//! - every method of [`Fabric`] is called by one thread at a time, under the lock of the
//!   transport's [`Reactor`](crate::reactor::Reactor), not always by the same thread; none may
//!   block. What blocks in the library goes to a thread of the fabric's own, which wakes the
//!   machine through a descriptor of [`Fabric::fds`];
//! - [`Registrar`] is called on the threads of the program, and may block.

#[cfg(feature = "stranger-for-tests")]
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
mod stream;
mod transfers;
mod transport;

pub use job::Job;
pub use library::{
    EndpointId, Event, Fabric, FlushCompletion, JobId, Registrar, SendStatus, Unregister,
};
pub use transport::{LaneParts, Parts, open, open_lanes};
