//! Configuration as vLLM writes it: `KVTransferConfig` from JSON, dotted arguments and the environment.
//!
//! The fields, their defaults and their errors are those of vLLM 0.33; the key `kv_compat` of
//! `kv_connector_extra_config` selects older ones ([`Version`](crate::Version)). Where vLLM's own parser is wrong, kvx gives an error or
//! does what vLLM documents, and a [`Warning`] says so.
//!
//! [`Given`] is what was written, [`Surroundings`] what it is read within; [`KvTransferConfig`] is what both mean, and
//! [`ConfigReport`] tells a person.

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
