//! Finds and opens backends.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Events, Transport};
use crate::identity::{Identity, Invitation};
use crate::{Capabilities, DeviceAccess, Options, Result, Secret};

/// Makes transports of one backend. One per backend, a plain value in the registry.
pub trait Factory: Send + Sync {
    /// The backend's name, in capitals.
    fn name(&self) -> &'static str;

    /// Its place in the order of preference.
    fn placement(&self) -> Placement;

    /// What it takes to be heard by it. Not said, it counts as [`Open`](Admission::Open).
    fn admission(&self) -> Admission {
        Admission::Open
    }

    /// Finds out whether it can run on this machine with these options, and opens what it must to know.
    fn available(&self, options: &Options) -> Result<Availability, Unavailable>;

    /// Opens it for one agent. Errors name what to do next.
    fn open(&self, context: Context) -> Result<Arc<dyn Transport>>;
}

/// The library, the devices and the promises of an available backend.
#[derive(Clone, Debug)]
pub struct Availability {
    /// Version of the library, or of kvx for an embedded transport.
    pub version: String,
    /// The library's file; `None` for an embedded transport.
    pub library: Option<PathBuf>,
    /// Devices or interfaces it found.
    pub devices: Vec<String>,
    /// True if it has an RDMA device.
    pub rdma: bool,
    /// Its promises.
    pub capabilities: Capabilities,
    /// Warnings to the operator before it is used (a listener on all interfaces, say).
    pub cautions: Vec<String>,
}

/// The surroundings of a transport that is opened.
#[derive(Clone)]
pub struct Context {
    /// The agent it serves.
    pub agent: Identity,
    /// All options; a backend reads the table of its own name.
    pub options: Options,
    /// Receives notifications and changes of links.
    pub events: Arc<dyn Events>,
    /// Copies device memory, by kind.
    pub devices: Vec<Arc<dyn DeviceAccess>>,
    /// What the agent invites its peers by.
    pub invitation: Invitation,
    /// The shared secret of the fleet, if there is one.
    pub secret: Option<Secret>,
    /// The time that a peer may be silent with work in flight before it counts as lost.
    pub peer_timeout: Duration,
}

/// A backend's place in the order of preference, as data: core holds no backend's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Lower is preferred.
    pub order: u32,
    /// The condition under which it is opened without being named.
    pub auto_open: AutoOpen,
    /// Further names whose backends it speaks for toward foreign agents of its kind.
    pub speaks_for: &'static [&'static str],
}

/// The condition under which a backend is opened although no list names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoOpen {
    /// Always.
    Open,
    /// When it reports an RDMA device.
    OpenWithRdma,
    /// Never.
    Skip,
}

/// Who is heard by a backend: what the agents' invitations and the fleet's secret are worth over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Nothing is told, parsed or moved before a peer has proven to have the invitation, and the secret if there is
    /// one.
    Proven,
    /// kvx tells, grants and parses nothing before that proof; the library's own port hears whoever reaches it, and a
    /// peer that was let in is trusted with this process.
    Keys,
    /// The library speaks to whoever reaches it, by a protocol of its own. Where there is a secret it is opened only if
    /// the option `unauthenticated` names it.
    Open,
}

/// The reason why a compiled-in backend cannot run on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// The missing part: `libucp.so.0 not found`.
    pub missing: String,
    /// The variable that points to the library, if there is one.
    pub variable: Option<&'static str>,
    /// Its value, if it is set.
    pub value: Option<String>,
    /// Everything that was tried, in order.
    pub tried: Vec<String>,
    /// The way to get it.
    pub cure: String,
}

impl Unavailable {
    /// Without a library: a reason and a cure.
    pub fn because(missing: impl Into<String>, cure: impl Into<String>) -> Self {
        Unavailable {
            missing: missing.into(),
            variable: None,
            value: None,
            tried: Vec::new(),
            cure: cure.into(),
        }
    }

    /// The reason alone.
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
