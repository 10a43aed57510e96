#![doc = include_str!("../README.md")]

mod breaks;
mod capabilities;
mod completion;
pub mod config;
mod deadline;
mod error;
mod fork;
mod grid;
mod identity;
pub mod memory;
mod names;
mod options;
mod overlap;
mod plan;
#[cfg(target_os = "linux")]
pub mod reactor;
mod region;
mod registry;
mod segments;
mod sync;
mod ticket;
pub mod transport;
pub mod wire;

pub use capabilities::{Capabilities, Idle, Isolation, MemoryKinds, PerOp, Revocation};
pub use completion::Completion;
pub use deadline::Deadline;
pub use error::{Error, Kind, Native, Result};
pub use grid::{Blocks, Grid, GridSet, Indices};
pub use identity::{Generation, Identity, Incarnation, LinkId, MAX_NAME, RegionId, RegionKey, Sender, TransferId};
pub use memory::{DeviceAccess, DeviceId, Memory, MemoryKind};
pub use names::nearest;
pub use options::{Options, Table};
pub use plan::{Bound, LocalSide, Op, Pair, Placed, Plan, RemoteSide, Size};
pub use region::{PeerRegion, Region};
pub use registry::{Known, Placement, Registry, Standing, Unavailable, WithoutAList};
pub use segments::{Extent, Extents, Segment, Segments};
pub use ticket::Ticket;
pub use transport::Secret;
