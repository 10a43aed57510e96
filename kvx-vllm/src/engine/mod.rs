//! The engine's part of the protocol as state machines: what to load, what to keep, what to read, whom to tell.
//!
//! [`Scheduler`] is the half beside an engine's scheduler, [`Worker`] the half beside the memory of each rank. Both
//! are plain values: no socket, no thread, no sleep; time is passed in ([`Time`]), and what is to be done comes out
//! as values ([`ConnectorMeta`], [`Action`], [`Outcome`]). Their methods have the names of vLLM's
//! `KVConnectorBase_V1` where they do what those do:
//!
//! | vLLM | here |
//! |---|---|
//! | `on_new_request`, `get_num_new_matched_tokens`, `update_state_after_alloc`, `build_connector_meta` | the same, [`Scheduler`] |
//! | `request_finished`, `request_finished_all_groups` | [`Scheduler::request_finished`], for any number of groups |
//! | `update_connector_output` | [`Scheduler::update_connector_output`], of what [`OutputAggregator`] makes of all workers |
//! | `get_finished_count` | [`OutputAggregator::set_world_size`] |
//! | `has_pending_push_work`, `has_pending_block_frees` | the same, [`Scheduler`] |
//! | `bind_connector_metadata`, `start_load_kv` | [`Worker::start_load_kv`], which takes the message |
//! | `get_finished`, `get_transfer_results` | [`Worker::get_finished`] |
//! | `get_block_ids_with_load_errors` | [`WorkerOutput::invalid_block_ids`] |
//! | `get_kv_connector_stats` | [`WorkerOutput::stats`] |
//! | `shutdown` | [`Worker::shutdown`] |
//!
//! An engine with the MooncakeConnector has the same scheduler half and the worker half of [`mooncake`].
//!
//! A step of an engine:
//!
//! 1. Requests that have arrived go to [`Scheduler::on_new_request`]; those that are admitted ask for
//!    [`Scheduler::get_num_new_matched_tokens`], get blocks, and say so by [`Scheduler::update_state_after_alloc`].
//! 2. [`Scheduler::build_connector_meta`] goes to every worker's [`Worker::start_load_kv`]; each worker's actions are
//!    done.
//! 3. Each worker's [`Worker::get_finished`] goes through the [`OutputAggregator`] to
//!    [`Scheduler::update_connector_output`]; its [`Outcome`]s and those of [`Scheduler::poll`] are the engine's to
//!    heed.
//! 4. Requests that end go to [`Scheduler::request_finished`].

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
pub use scheduler::{
    Allocation, Arrival, Ending, Finished, Matched, NotLoaded, Outcome, Scheduler, Status, Then,
};
pub use settings::{ConsumerRule, Settings, SideChannels, release_of};
pub use stats::{METRICS, MOONCAKE_METRICS, Metric, Summary, TransferStats, Transferred};
pub use step::{
    ConnectorMeta, FailedLoad, Heartbeat, Kept, ReceiveOrder, RemoteRequest, SendOrder,
    WorkerOutput,
};
pub use trust::{ParamsTrust, Untrusted};
pub use worker::Worker;
