//! The server's registration in its fleet, from which routers learn its address.

use std::net::SocketAddr;

pub use kvx_proxy::registration::FleetAddress;
use kvx_proxy::registration::{Registered, register};
pub use kvx_proxy::{FleetSecret, Role};
use serde_json::{Map, Value};

use crate::model::{ModelError, Result};

/// A server's entry, and the fleet that has it.
#[derive(Clone, Debug)]
pub struct ServerRegistration {
    /// The fleet.
    pub fleet: FleetAddress,
    /// The secret that signs the registration.
    pub secret: Option<FleetSecret>,
    /// The URL for routers; `None` is the address that the server listens on.
    pub url: Option<String>,
    /// The server as for `POST /instances` of the router, without `url`.
    pub instance: Map<String, Value>,
}

impl ServerRegistration {
    /// Registers a server that listens on this address.
    pub(crate) fn register(mut self, address: SocketAddr) -> Result<Registered> {
        let url = match self.url {
            Some(url) => url,
            None if address.ip().is_unspecified() => {
                return Err(ModelError::new(format!(
                    "{address} is no address for routers: name one with --register-url"
                )));
            }
            None => format!("http://{address}"),
        };
        self.instance.insert("url".to_owned(), url.into());
        let instance = Value::Object(self.instance).to_string();
        register(&self.fleet, &instance, self.secret.as_ref()).map_err(ModelError::of)
    }
}
