//! vLLM's `KVTransferConfig`, read from JSON, dotted arguments and the environment.
//!
//! The fields, their defaults and their errors are those of vLLM 0.33. The key `kv_compat` of
//! `kv_connector_extra_config` selects those of older versions ([`Version`](crate::Version)). Where
//! vLLM's parser is wrong, kvx returns an error or does what vLLM documents, and a [`Warning`] says
//! so.
//!
//! [`Given`] is the input and [`Surroundings`] its environment. Both resolve to a
//! [`KvTransferConfig`], which [`ConfigReport`] describes for a person. A program that has no such
//! input calls [`KvTransferConfig::builder`].

mod arguments;
mod builder;
mod connectors;
mod defaults;
mod engine_id;
mod fields;
#[doc(hidden)]
pub mod fuzz;
mod given;
mod human;
mod ranks;
mod report;
mod surroundings;
mod tables;
mod transfer_config;
mod warning;

pub use arguments::dotted_arguments;
pub use builder::KvTransferConfigBuilder;
pub use connectors::ConnectorKind;
pub use fields::{BufferDevice, KvCacheLayout, LoadFailurePolicy, Role};
pub use given::{Given, ValueSource};
pub use ranks::{BlockRelease, LeaseTime, RankNumbers};
pub use report::{ConfigReport, Opening};
pub use surroundings::{Environment, Surroundings};
pub use tables::{MooncakeSettings, NUM_THREADS, NixlSettings, OPTION_TABLES, OptionTable};
pub use transfer_config::KvTransferConfig;
pub use warning::{Concern, Warning};
