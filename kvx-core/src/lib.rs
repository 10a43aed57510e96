#![doc = include_str!("../README.md")]

// From the highest layer to the lowest. Each group uses itself and the groups below it; only the
// last two groups use each other. No modules form a circle, except those of `memory`.
// `tests/it/structure.rs` checks both.

// The interface for backends: re-exports of items from the layers below.
pub mod backend;

// Functions that fuzz targets call, here and in the crates above. The facade does not export it.
#[doc(hidden)]
pub mod fuzz;

// Loom models, which try every interleaving of threads.
#[cfg(all(test, kvx_loom))]
mod models;

// Agents. An agent has regions and peers. A plan pairs blocks of both; once posted, it is a
// transfer over a link to the peer.
mod agent;
mod overlap;
mod peer;
mod plan;
mod region;
mod spans;
mod transfer;

pub use agent::{Agent, AgentBuilder, NextNotification};
pub use peer::{Peer, TransferBuilder};
pub use plan::Plan;
pub use region::{PeerRegion, Region};
pub use spans::Span;
pub use transfer::{Canceller, Transfer};

// The state of an agent: transfers in flight, waiting notifications, metrics, quarantined memory.
mod budget;
mod flush;
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
mod transport;

pub use capabilities::{
    Capabilities, HungPageScope, Idle, Isolation, MemoryKinds, PerOp, Revocation,
};
pub use registry::{BackendStatus, Registry};

// Vocabulary: memory and its blocks, metadata, options, routes.
mod grid;
mod memory;
mod metadata;
mod operation;
mod options;
mod route;
mod secret;

pub use grid::{Blocks, Grid, GridSet, Indices, Place};
pub use memory::{DeviceAccess, DeviceId, Memory, MemoryKind};
#[cfg(all(target_os = "linux", not(kvx_portable)))]
pub use memory::{HugePages, PageSize, PoolBuilder, PoolProperties};
pub use operation::{Op, Size};
pub use options::{Options, Table};
pub use route::{Route, RouteCandidate, Verdict};
pub use secret::Secret;

// Time: deadlines, and the futures that end by them.
mod completion;
mod deadline;
mod ticket;

pub use completion::Completion;
pub use deadline::Deadline;

// Errors, names and identifiers; the amount of quarantined memory.
mod error;
mod identity;
mod kept;
mod names;
mod report;

pub use error::{Error, ErrorKind, Native, Result};
pub use identity::{Identity, Incarnation, RegionId, Sender, TransferId};
pub use kept::quarantined_bytes;
pub use report::Report;

// Locks that panics do not poison, bounded parsing of peers' bytes, fork detection. Tests use
// `fault_injection` to break core on purpose.
#[doc(hidden)]
pub mod fault_injection;
mod fork;
mod sync;
mod wire;
