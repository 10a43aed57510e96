//! Typed `kv_transfer_params`, and the recipes of proxies.
//!
//! A router carries these parameters from one instance to another; engines read and write them.
//! This module needs no HTTP client or runtime: bodies are [`serde_json::Value`]s, recipes are
//! functions.

mod bootstrap_request;
mod error;
mod fields;
mod mooncake;
mod mooncake_older;
pub mod recipe;
mod remote;
mod request_id;
mod transfer;
mod uuid;

pub use bootstrap_request::BootstrapRequest;
pub use error::ParamsError;
pub use mooncake::{MooncakeLeg, MooncakeParams, MooncakeTransferId};
pub use mooncake_older::{KvxPrefill, OlderMooncakeLeg, OlderMooncakeParams};
pub use remote::{RemoteBlocks, TransferMode};
pub use request_id::{X_REQUEST_ID, XRequestId};
pub use transfer::TransferParams;
