#![doc = include_str!("../README.md")]

// From the top down: each group uses itself and those below it, but the last two use each other. No modules use each
// other in a circle but those of `memory`. A test in `xtask/src/circles.rs` holds both.

// What fuzzing calls, here and in the crates above. The facade does not show it.
#[doc(hidden)]
pub mod fuzz;

// Threads in every order.
#[cfg(all(test, kvx_loom))]
mod models;

// Agents: an agent has regions and peers. A plan pairs blocks of both; posted, it is a transfer over a peer's link.
mod agent;
mod overlap;
mod peer;
mod plan;
mod region;
mod spans;
mod transfer;

pub use agent::{Agent, Builder, NextNotification};
pub use peer::{Peer, Posting};
pub use plan::Plan;
pub use region::{PeerRegion, Region};
pub use spans::Span;
pub use transfer::{Canceller, Transfer};

// Accounts of an agent: transfers in flight, waiting notifications, metrics, memory that nobody may free.
mod budget;
mod inbox;
mod quarantine;
mod telemetry;

pub use budget::Limits;
pub use inbox::Notification;
pub use telemetry::describe_metrics;

// The contract between core and a backend.
mod bound;
mod capabilities;
mod registry;
mod segments;
pub mod transport;

pub use capabilities::{
    Capabilities, HungPageScope, Idle, Isolation, MemoryKinds, PerOp, Revocation,
};
pub use registry::{BackendName, BackendStatus, Registry};
pub use transport::{AutoOpen, Placement, Unavailable};

// Words: memory and its blocks, metadata, options, routes.
mod grid;
pub mod memory;
mod metadata;
mod operation;
mod options;
mod route;
mod secret;

pub use grid::{Blocks, Grid, GridSet, Indices, Place};
pub use memory::{DeviceAccess, DeviceId, Memory, MemoryKind};
pub use metadata::{Invited, Metadata, RegionInfo};
pub use operation::{Op, Size};
pub use options::{Options, Table};
pub use route::{Considered, Route, Verdict};
pub use secret::Secret;

// Time: deadlines, and futures that end by them.
mod completion;
mod deadline;
mod ticket;

pub use completion::Completion;
pub use deadline::Deadline;
pub use ticket::Ticket;

// Errors, names and numbers; how much memory nobody may free.
mod error;
mod identity;
mod kept;
mod names;
mod report;

pub use error::{Error, ErrorKind, Native, Result};
pub use identity::{
    Generation, Identity, Incarnation, Invitation, LinkId, MAX_NAME, RegionId, RegionKey, Sender,
    TransferId,
};
pub use kept::quarantined_bytes;
pub use names::nearest;
pub use report::Report;

// For authors of backends only, and not shown by the facade: locks that no panic poisons, bounded parsing of what peers
// send, forks, a plan as a backend gets it, memory that is never freed. By `fault_injection`, tests break core on purpose.
#[doc(hidden)]
pub mod fault_injection;
pub mod fork;
pub mod sync;
pub mod wire;

pub use bound::{Bound, LocalSide, Pair, Placed, RemoteSide};
pub use identity::{random_key, random_number};
pub use quarantine::quarantine_for_ever;
pub use segments::{Extent, Extents, Segment, Segments};
pub use ticket::Settle;
