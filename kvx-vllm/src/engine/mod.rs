//! The engine's part of the protocol, as state machines without I/O.
//!
//! [`Scheduler`] runs next to an engine's scheduler. It decides which blocks to load and which to
//! keep for peers. One [`Worker`] per rank runs next to that rank's memory. It decides what to
//! read, write and send. Both are plain values without sockets, threads or sleeps. The caller
//! passes the time in ([`Time`]) and carries out the values that come out ([`ConnectorMeta`],
//! [`Action`], [`Outcome`]). A method has the name of the method of vLLM's `KVConnectorBase_V1`
//! that it corresponds to:
//!
//! | vLLM | here |
//! |---|---|
//! | `on_new_request`, `get_num_new_matched_tokens` | same names, [`Scheduler`] |
//! | `update_state_after_alloc`, `build_connector_meta` | same names, [`Scheduler`] |
//! | `request_finished`, `request_finished_all_groups` | [`Scheduler::request_finished`] |
//! | `update_connector_output` | [`Scheduler::update_connector_output`] |
//! | `get_finished_count` | [`OutputAggregator::set_world_size`] |
//! | `has_pending_push_work`, `has_pending_block_frees` | same names, [`Scheduler`] |
//! | `bind_connector_metadata`, `start_load_kv` | [`Worker::start_load_kv`] |
//! | `get_finished`, `get_transfer_results` | [`Worker::get_finished`] |
//! | `get_block_ids_with_load_errors` | [`WorkerOutput::invalid_block_ids`] |
//! | `get_kv_connector_stats` | [`WorkerOutput::stats`] |
//! | `shutdown` | [`Worker::shutdown`] |
//!
//! An engine with the MooncakeConnector uses the same scheduler and the worker of [`mooncake`].
//!
//! A step of an engine:
//!
//! 1. The engine passes each new request to [`Scheduler::on_new_request`]. For each request that it
//!    admits, it calls [`Scheduler::get_num_new_matched_tokens`], allocates blocks, and calls
//!    [`Scheduler::update_state_after_alloc`].
//! 2. It passes the message of [`Scheduler::build_connector_meta`] to [`Worker::start_load_kv`] of
//!    every worker, and carries out each worker's actions.
//! 3. It passes the output of each [`Worker::get_finished`] through the [`OutputAggregator`] to
//!    [`Scheduler::update_connector_output`]. It acts on the [`Outcome`]s of that method and of
//!    [`Scheduler::poll`].
//! 4. It passes each request that ends to [`Scheduler::request_finished`].

mod action;
mod aggregate;
mod deadlines;
mod failure;
mod generations;
pub mod mooncake;
mod peers;
mod plan;
mod recovery;
mod remote;
mod report;
mod scheduler;
mod settings;
mod stats;
mod step;
mod trust;
mod worker;

pub use crate::ids::{Address, BlockLists, EngineId, RequestId, WorkerRank};
pub use crate::mapping::Part;
pub use crate::time::{ClockOffset, Time};
pub use action::{Action, Connection, GroupMove, Move, MoveId, MoveLists, ReadBlocks};
pub use aggregate::{EngineOutput, OutputAggregator};
pub use failure::{FailureKind, HandshakeFailure, LoadFailure, MoveFailure, TransferFailure};
pub use generations::{BlockReference, Generations, NoReference};
#[doc(hidden)]
pub use generations::{Fresh, Unsaved};
pub use plan::{PeerLane, PeerPlan, PoolBlocks};
pub use recovery::{Affected, Holding, Recovery};
pub use remote::RemoteEngine;
pub use report::{StepReport, StepReports};
pub use scheduler::{
    Allocation, Arrival, Ending, Finished, Matched, NotLoaded, Outcome, Scheduler, Status, Then,
    Withheld,
};
pub use settings::{ConsumerRule, Settings, SideChannels, release_of};
pub use stats::{METRICS, MOONCAKE_METRICS, Metric, Summary, TransferStats, Transferred};
pub use step::{
    ConnectorMeta, FailedLoad, Heartbeat, Kept, ReceiveOrder, RemoteRequest, SendOrder,
    WorkerOutput,
};
pub use trust::{ParamsTrust, Untrusted, UntrustedRelease};
pub use worker::Worker;
