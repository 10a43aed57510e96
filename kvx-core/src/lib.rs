#![doc = include_str!("../README.md")]

// From the top down: each group uses itself and those below it, but the last two use each other. No modules use each
// other in a circle but those of `memory`. A test in `tests/it/structure.rs` holds both.

// What backends are made with. It only names what is below.
pub mod backend;

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

pub use agent::{Agent, AgentBuilder, NextNotification};
pub use peer::{Peer, TransferBuilder};
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
mod transport;

pub use capabilities::{
    Capabilities, HungPageScope, Idle, Isolation, MemoryKinds, PerOp, Revocation,
};
pub use registry::{BackendStatus, Registry};

// Words: memory and its blocks, metadata, options, routes.
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

// Time: deadlines, and futures that end by them.
mod completion;
mod deadline;
mod ticket;

pub use completion::Completion;
pub use deadline::Deadline;

// Errors, names and numbers; how much memory nobody may free.
mod error;
mod identity;
mod kept;
mod names;
mod report;

pub use error::{Error, ErrorKind, Native, Result};
pub use identity::{Identity, Incarnation, RegionId, Sender, TransferId};
pub use kept::quarantined_bytes;
pub use report::Report;

// Locks that no panic poisons, bounded parsing of what peers send, forks. By `fault_injection`, tests break core on
// purpose.
#[doc(hidden)]
pub mod fault_injection;
mod fork;
mod sync;
mod wire;
