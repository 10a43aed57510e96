//! Instances that register themselves in etcd, and the list of them.
//!
//! An instance is the key `/kvx/v1/instances/FLEET/ROLE/ID` while its lease lasts. ID is drawn at
//! random by each process. The value has the JSON that `POST /instances` of the router takes, the
//! time at which it expires, and, in a fleet with a secret, a MAC: otherwise a client that can write
//! to etcd could receive prompts.
//!
//! ```no_run
//! use kvx_proxy::registration::{FleetAddress, register};
//!
//! # async fn serve() -> Result<(), kvx_proxy::Error> {
//! let fleet = FleetAddress::new("etcd://10.0.0.9:2379/chat")?.with_environment();
//! let instance = r#"{"role": "prefill", "url": "http://10.0.0.1:8000"}"#;
//! let registered = register(&fleet, instance, None)?;
//! // Serve. Before the last answers end, tell the routers:
//! registered.leave().await;
//! # Ok(())
//! # }
//! ```

mod address;
mod entry;
mod follow;
mod refusal;
mod register;
mod sidecar;
mod table;
#[cfg(test)]
mod tests;

use crate::setup::{InstanceSetup, Role};

pub use crate::setup::FleetAddress;
pub(crate) use entry::fuzz;
pub use follow::{FleetList, follow};
pub use refusal::Refusal;
pub use register::{Registered, register};
pub use sidecar::register_while_healthy;

/// A registered instance.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Registration {
    /// The random bits that its process drew. A restarted process has others.
    pub id: u64,
    /// Its role.
    pub role: Role,
    /// The name of its pool; `None` is the first.
    pub pool: Option<String>,
    /// Its settings.
    pub setup: InstanceSetup,
}
