#![doc = include_str!("../README.md")]

// From the top down: each group uses those below it, and no module uses one that uses it (`xtask/src/circles.rs` sees
// to that).

// Agents: an agent has regions and peers, and its peers have links. A posted plan is a transfer.
mod agent;
mod peer;
mod region;
mod transfer;

pub use agent::{Agent, Builder, NextNotification};
pub use peer::{Peer, Posting};
pub use region::{PeerRegion, Region};
pub use transfer::{Report, Transfer};

// Plans: pairs of blocks, checked once.
mod overlap;
mod plan;

pub use plan::Plan;

// What an agent keeps: the limit of transfers in flight, waiting notifications, metrics, memory that nobody may free.
mod budget;
mod inbox;
mod quarantine;
mod telemetry;

pub use budget::Limits;
pub use inbox::Notification;
pub use quarantine::quarantined_bytes;
pub use telemetry::describe_metrics;

// The contract between core and a backend.
mod bound;
mod capabilities;
mod registry;
mod segments;
pub mod transport;

pub use capabilities::{Capabilities, Idle, Isolation, MemoryKinds, PerOp, Revocation};
pub use registry::{Known, Registry, Standing};
pub use transport::{Placement, Unavailable, WithoutAList};

// Time: deadlines, and futures that end by them.
mod completion;
mod deadline;
mod ticket;

pub use completion::Completion;
pub use deadline::Deadline;
pub use ticket::Ticket;

// Words: memory and its blocks, who is who, what agents tell of themselves.
mod error;
mod grid;
mod identity;
pub mod memory;
mod metadata;
mod names;
mod operation;
mod options;
mod route;
mod secret;

pub use error::{Error, Kind, Native, Result};
pub use grid::{Blocks, Grid, GridSet, Indices, Place};
pub use identity::{
    Generation, Identity, Incarnation, LinkId, MAX_NAME, RegionId, RegionKey, Sender, TransferId,
};
pub use memory::{DeviceAccess, DeviceId, Memory, MemoryKind};
pub use metadata::{Metadata, RegionInfo};
pub use names::nearest;
pub use operation::{Op, Size};
pub use options::{Options, Table};
pub use route::{Considered, Route, Verdict};
pub use secret::Secret;

// For authors of backends only, and not shown by the facade: the plan as a backend gets it, locks that no panic
// poisons, bounded parsing of what peers send, forks, and memory that is never freed. Tests break core on purpose by
// `breaks`.
#[doc(hidden)]
pub mod breaks;
pub mod fork;
pub mod sync;
pub mod wire;

pub use bound::{Bound, LocalSide, Pair, Placed, RemoteSide};
pub use identity::random_number;
pub use quarantine::quarantine_for_ever;
pub use segments::{Extent, Extents, Segment, Segments};
pub use ticket::Settle;
