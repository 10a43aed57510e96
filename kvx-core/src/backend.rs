//! What authors of backends need, and programs do not: the contract of transports, plans as a backend gets them,
//! tickets, names that users write, and small tools that all backends share.
//!
//! A backend is a crate and a plain value: its [`Factory`] goes into a [`Registry`](crate::Registry). It writes no
//! futures, wakers, timers or queues of its own; core has them, and one `kvx_backend::reactor::Reactor` from
//! which it builds its thread.

pub use crate::bound::{BoundPlan, LocalSide, Pair, PlacedGrid, RemoteSide};
pub use crate::identity::{
    Generation, Invitation, LinkId, MAX_NAME, RegionKey, random_key, random_number,
};
#[cfg(unix)]
pub use crate::memory::DmaBuf;
pub use crate::memory::{Direction, Hop, IpcHandle, Piece, copy_shared};
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

/// Detection of `fork`: a child's calls return `Forked`, and descriptors are private to their process.
pub mod fork {
    #[cfg(all(target_os = "linux", not(kvx_portable)))]
    pub use crate::fork::Private;
    pub use crate::fork::{check, count};
}

/// Locks that no panic poisons, and pauses of threads that poll.
pub mod sync {
    pub use crate::sync::{Condvar, Mutex, MutexGuard, catch_panic, pause_between_looks};
}

/// Bounded parsing of bytes that peers send, and writing of the same.
pub mod wire {
    pub use crate::wire::{Reader, Writer};
}
