//! The interface for authors of backends: the traits that a transport implements, plans as a
//! backend receives them, tickets, the names that users write, and small tools that all backends
//! share.
//!
//! A backend is a crate that exports a plain value: its [`Factory`], which goes into a
//! [`Registry`](crate::Registry). It needs no futures, wakers, timers or queues of its own: core
//! has them, and `kvx_backend::reactor::Reactor` provides the thread.

pub use crate::bound::{BoundPlan, LocalSide, Pair, PlacedGrid, RemoteSide};
pub use crate::identity::{
    Generation, Invitation, LinkId, MAX_NAME, RegionKey, random_key, random_number,
};
#[cfg(unix)]
pub use crate::memory::DmaBuf;
pub use crate::memory::{
    Direction, Hop, IpcHandle, LinkProcess, MemoryReceiver, Piece, copy_shared,
};
pub use crate::metadata::{AdmissionTerms, Metadata, RegionInfo};
pub use crate::names::nearest;
pub use crate::quarantine::quarantine_for_ever;
pub use crate::registry::BackendName;
pub use crate::segments::{Extent, Extents, Segment, Segments};
pub use crate::ticket::{Settle, Ticket};
pub use crate::transport::{
    Admission, AutoOpen, Availability, Context, Events, Factory, ForeignRange, INLINE_BYTES,
    INLINE_SEGMENTS, Link, LinkState, LocalRegion, MAX_FOREIGN_NOTIFICATION, MAX_NOTIFICATION,
    PeerSection, Placement, QueueFull, RegionSpec, RemoteRegion, RemoteSpec, Transport, Turn,
    Unavailable,
};

/// Fork detection: calls in a forked child return `Forked`, and descriptors stay private to their
/// process.
pub mod fork {
    #[cfg(all(target_os = "linux", not(kvx_portable)))]
    pub use crate::fork::{LibraryDescriptors, Private};
    pub use crate::fork::{check, count};
}

/// Locks that panics do not poison, and pauses for threads that poll.
pub mod sync {
    pub use crate::sync::{Condvar, Mutex, MutexGuard, catch_panic, pause_between_looks};
}

/// Bounded parsing of bytes that peers send, and the matching writer.
pub mod wire {
    pub use crate::wire::{Reader, Writer};
}
