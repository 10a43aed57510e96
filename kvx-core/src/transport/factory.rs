//! Discovery and opening of backends.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Events, Transport};
use crate::identity::{Identity, Invitation};
use crate::{Capabilities, DeviceAccess, Options, Result, Secret};

/// Creates transports of one backend. Each backend has one, a plain value in the registry.
pub trait Factory: Send + Sync {
    /// Returns the backend's name, in upper case.
    fn name(&self) -> &'static str;

    /// Returns the backend's place in the order of preference.
    fn placement(&self) -> Placement;

    /// Returns how the backend authenticates peers. The default is [`Open`](Admission::Open).
    fn admission(&self) -> Admission {
        Admission::Open
    }

    /// Finds out whether the backend can run on this machine with these options; loads its library
    /// if necessary.
    ///
    /// # Errors
    /// [`Unavailable`], with what is missing and how to get it.
    fn available(&self, options: &Options) -> Result<Availability, Unavailable>;

    /// Opens the backend for one agent.
    ///
    /// # Errors
    /// `Invalid` for wrong options, which fails the agent's build; any other kind when the backend
    /// cannot be opened. The message says what to do next.
    fn open(&self, context: Context) -> Result<Arc<dyn Transport>>;
}

/// The library, the devices and the capabilities of an available backend.
#[derive(Clone, Debug)]
pub struct Availability {
    /// The version of the library, or of kvx for an embedded transport.
    pub version: String,
    /// The library's file; `None` for an embedded transport.
    pub library: Option<PathBuf>,
    /// The devices or interfaces that the backend found.
    pub devices: Vec<String>,
    /// True if the backend has an RDMA device.
    pub rdma: bool,
    /// The capabilities that hold for all links of the backend.
    pub capabilities: Capabilities,
    /// Warnings to the operator before the backend is used, such as a listener on all interfaces.
    pub cautions: Vec<String>,
}

impl Availability {
    /// Describes an embedded transport that uses no RDMA device and warrants no warning.
    pub fn embedded(version: &str, capabilities: Capabilities) -> Self {
        Availability {
            version: version.to_owned(),
            library: None,
            devices: Vec::new(),
            rdma: false,
            capabilities,
            cautions: Vec::new(),
        }
    }
}

/// The agent, the settings and the services that a transport is opened with.
#[derive(Clone)]
pub struct Context {
    /// The agent that the transport serves.
    pub agent: Identity,
    /// All options; a backend reads the table with its own name.
    pub options: Options,
    /// Receives notifications and changes of links.
    pub events: Arc<dyn Events>,
    /// Copies device memory, by kind.
    pub devices: Vec<Arc<dyn DeviceAccess>>,
    /// The invitation in the agent's metadata.
    pub invitation: Invitation,
    /// The shared secret of the fleet, if there is one.
    pub secret: Option<Secret>,
    /// How long a peer may be silent with work in flight before it counts as lost.
    pub peer_timeout: Duration,
}

/// A backend's place in the order of preference. It is data, so that core contains no backend's
/// name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The rank; lower is preferred.
    pub order: u32,
    /// When the backend is opened without being named.
    pub auto_open: AutoOpen,
    /// Names of other backends for which this one connects to foreign agents of their kind.
    pub speaks_for: &'static [&'static str],
}

/// The condition under which an agent opens a backend that no list names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoOpen {
    /// Always.
    Open,
    /// If the backend reports an RDMA device.
    OpenWithRdma,
    /// Never.
    Skip,
}

/// Which peers a backend listens to: how much the agents' invitations and the fleet's secret
/// protect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The backend reveals, parses and moves nothing before a peer has proven that it has the
    /// invitation, and the secret if there is one.
    Proven,
    /// kvx reveals, grants and parses nothing before that proof. The library's own port accepts
    /// input from all who can reach it, and authenticated peers are trusted with this process.
    Keys,
    /// The library talks to all who can reach it, by its own protocol. With a secret, the backend
    /// is opened only if the option `unauthenticated` names it.
    Open,
}

/// The reason why a compiled-in backend cannot run on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// The missing part, such as `libucp.so.0 not found`.
    pub missing: String,
    /// The environment variable that names the library, if there is one.
    pub variable: Option<&'static str>,
    /// The variable's value, if it is set.
    pub value: Option<String>,
    /// All files that were tried, in order.
    pub tried: Vec<String>,
    /// The way to get the missing part.
    pub cure: String,
}

impl Unavailable {
    /// Creates a reason and a cure for a backend without a library.
    pub fn because(missing: impl Into<String>, cure: impl Into<String>) -> Self {
        Unavailable {
            missing: missing.into(),
            variable: None,
            value: None,
            tried: Vec::new(),
            cure: cure.into(),
        }
    }

    /// Returns the reason without the cure.
    pub fn reason(&self) -> String {
        let mut notes = Vec::new();
        if let Some(variable) = self.variable {
            notes.push(match &self.value {
                None => format!("{variable} unset"),
                Some(value) => format!("{variable}={value}"),
            });
        }
        if !self.tried.is_empty() {
            notes.push(format!("tried {}", self.tried.join(", ")));
        }
        if notes.is_empty() {
            self.missing.clone()
        } else {
            format!("{} ({})", self.missing, notes.join("; "))
        }
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason(), self.cure)
    }
}
