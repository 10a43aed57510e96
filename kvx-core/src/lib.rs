#![doc = include_str!("../README.md")]

mod agent;
#[doc(hidden)]
pub mod breaks;
mod budget;
mod capabilities;
mod completion;
mod deadline;
mod error;
pub mod fork;
mod grid;
mod identity;
mod inbox;
pub mod memory;
mod metadata;
mod names;
mod options;
mod overlap;
mod peer;
mod plan;
mod quarantine;
mod region;
mod registry;
mod route;
mod secret;
mod segments;
mod spans;
pub mod sync;
mod telemetry;
mod ticket;
mod transfer;
pub mod transport;
pub mod wire;

pub use agent::{Agent, Builder, NextNotification};
pub use budget::Limits;
pub use capabilities::{Capabilities, Idle, Isolation, MemoryKinds, PerOp, Revocation};
pub use completion::Completion;
pub use deadline::Deadline;
pub use error::{Error, Kind, Native, Result};
pub use grid::{Blocks, Grid, GridSet, Indices};
pub use identity::{
    Generation, Identity, Incarnation, LinkId, MAX_NAME, RegionId, RegionKey, Sender, TransferId,
    random_number,
};
pub use inbox::Notification;
pub use memory::{DeviceAccess, DeviceId, Memory, MemoryKind};
pub use metadata::{Metadata, RegionInfo};
pub use names::nearest;
pub use options::{Options, Table};
pub use peer::{Peer, Posting};
pub use plan::{Bound, LocalSide, Op, Pair, Placed, Plan, RemoteSide, Size};
pub use quarantine::{quarantine_for_ever, quarantined_bytes};
pub use region::{PeerRegion, Place, Region};
pub use registry::{Known, Placement, Registry, Standing, Unavailable, WithoutAList};
pub use route::{Considered, Route, Verdict};
pub use secret::Secret;
pub use segments::{Extent, Extents, Segment, Segments};
pub use spans::Span;
pub use telemetry::describe_metrics;
pub use ticket::{Settle, Ticket};
pub use transfer::{Report, Transfer};
