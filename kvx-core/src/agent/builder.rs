//! Configures an agent and opens its backends.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Agent;
use super::inner::{AgentInner, Open, Sink};
use crate::budget::{self, Budget};
use crate::fault_injection::injected;
use crate::identity::{Identity, Incarnation, Invitation, checked_name};
use crate::inbox::{self, Inbox};
use crate::memory::DeviceAccess;
use crate::metadata::AdmissionTerms;
use crate::registry::Registry;
use crate::sync::Mutex;
use crate::telemetry::{self, Meters};
use crate::transport::{Admission, AutoOpen, Context, Events};
use crate::{Error, ErrorKind, Options, Result, Secret, fork};

impl Agent {
    /// Starts the configuration of an agent with this name: 1 to 255 bytes, the same after a
    /// restart.
    ///
    /// The builder needs a [registry](AgentBuilder::registry); the facade's `kvx::agent` sets one.
    pub fn builder(name: impl Into<String>) -> AgentBuilder {
        AgentBuilder::new(name.into())
    }
}

/// The configuration of an agent; [`build`](AgentBuilder::build) creates the agent.
#[must_use]
pub struct AgentBuilder {
    name: String,
    registry: Option<Registry>,
    options: Options,
    backends: Option<Vec<String>>,
    secret: Option<Secret>,
    peer_timeout: Duration,
    budget: budget::Limits,
    inbox: inbox::InboxLimits,
    devices: Vec<Arc<dyn DeviceAccess>>,
    staged: bool,
}

impl AgentBuilder {
    pub(super) fn new(name: String) -> Self {
        AgentBuilder {
            name,
            registry: None,
            options: Options::new(),
            backends: None,
            secret: None,
            peer_timeout: Duration::from_secs(10),
            budget: budget::Limits::default(),
            inbox: inbox::InboxLimits::default(),
            devices: Vec::new(),
            staged: false,
        }
    }

    /// Sets the registry of backends that the agent may open. [`build`](AgentBuilder::build) fails
    /// without one.
    pub fn registry(mut self, registry: Registry) -> Self {
        self.registry = Some(registry);
        self
    }

    /// Names backends in order of preference, in any letter case. The agent uses no other backends.
    pub fn backends<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.backends = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the options: the object `kv_connector_extra_config`. Its `backends` applies unless
    /// [`backends`](AgentBuilder::backends) is called.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Sets the shared secret of the fleet: transports that can authenticate use it and reject
    /// peers without it. If not set, it comes from the environment; see
    /// [`Secret::from_environment`].
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Sets how long a peer may be silent with work in flight before it counts as lost. The default
    /// is 10 seconds.
    pub fn peer_timeout(mut self, time: Duration) -> Self {
        self.peer_timeout = time;
        self
    }

    /// Limits what is in flight; above the limits, `post` returns `Busy`. The default is 65,536
    /// transfers and 256 MiB of descriptions.
    pub fn budget(mut self, limits: budget::Limits) -> Self {
        self.budget = limits;
        self
    }

    /// Limits the number and the bytes of queued notifications; above the limits, senders have to
    /// wait.
    pub fn notifications(mut self, count: usize, bytes: usize) -> Self {
        self.inbox = inbox::InboxLimits {
            count: count.max(1),
            bytes: bytes.max(crate::transport::MAX_NOTIFICATION),
        };
        self
    }

    /// Lets transports copy the memory of a GPU.
    pub fn device(mut self, access: Arc<dyn DeviceAccess>) -> Self {
        self.devices.push(access);
        self
    }

    /// Sends this agent's device memory through pinned host buffers, even where a backend could
    /// access the device: only backends that stage device memory register it. By default, each
    /// backend accesses devices as it can. vLLM's `kv_buffer_device: cpu` requests this.
    pub fn stage_device_memory(mut self, staged: bool) -> Self {
        self.staged = staged;
        self
    }

    /// Opens the backends and creates the agent.
    ///
    /// # Errors
    /// If no backend can be opened: the error of the only one that was requested (`NotCompiled`,
    /// `Unavailable` or an error of the backend), or `NoRoute` with the reason of each. Otherwise:
    /// - `UnknownBackend` for a name that no backend has.
    /// - `Invalid` for the agent's name, an option or an empty list of backends, and without a
    ///   registry.
    /// - `Invalid` or `Native` for a secret in the environment that cannot be used.
    /// - `Native` if the operating system gives no random bytes, `Exhausted` if it cannot
    ///   start a thread.
    /// - `Forked`.
    pub fn build(self) -> Result<Agent> {
        fork::check()?;
        let registry = self.registry.ok_or_else(|| {
            let why = "an agent needs a registry of backends: start with kvx::agent(name), which \
                       sets the backends that are compiled in, or call AgentBuilder::registry";
            ErrorKind::Invalid.because(why)
        })?;
        let identity = Identity {
            name: checked_name("agent", &self.name)?,
            incarnation: Incarnation::random()?,
        };
        let sink = Arc::new(Sink(Mutex::new(Weak::new())));
        let context = Context {
            agent: identity.clone(),
            options: self.options.clone(),
            events: Arc::clone(&sink) as Arc<dyn Events>,
            devices: self.devices,
            invitation: Invitation::random()?,
            secret: match self.secret {
                Some(secret) => Some(secret),
                None => Secret::from_environment()?,
            },
            peer_timeout: self.peer_timeout,
        };
        let named = match self.backends {
            Some(names) => Some(names),
            None => self.options.backends()?,
        };
        let invited =
            AdmissionTerms { by: context.invitation, with_secret: context.secret.is_some() };
        telemetry::start();
        let opened = open(&registry, named.as_deref(), &context)?;
        let (budget, inbox) = (Budget::new(self.budget), Inbox::new(self.inbox));
        let agent =
            Arc::new(AgentInner::new((identity, invited), opened, self.staged, budget, inbox)?);
        *sink.0.lock() = Arc::downgrade(&agent);
        let backends: Vec<_> = agent.transports.iter().map(|open| open.name).collect();
        tracing::debug!(agent = ?agent.identity, ?backends, "agent built");
        Ok(Agent::of(agent))
    }
}

/// Opens the named backends, or without a list those that open by default. A backend that cannot be
/// opened is only reported, as long as another one can.
fn open(
    registry: &Registry,
    named: Option<&[String]>,
    context: &Context,
) -> Result<(Vec<Open>, Vec<(&'static str, Error)>)> {
    let mut names = Vec::new();
    match named {
        Some(written) if !injected("silent-fallback") => {
            for name in written {
                let name = registry.canonical(name)?;
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            if names.is_empty() {
                return Err(ErrorKind::Invalid.because(format!(
                    "an empty list of backends opens nothing: name one of {}",
                    registry.names().join(", ")
                )));
            }
        }
        _ => {
            for factory in registry.factories() {
                let wanted = match factory.placement().auto_open {
                    AutoOpen::Open => true,
                    AutoOpen::Skip => injected("order"),
                    AutoOpen::OpenWithRdma => {
                        factory.available(&context.options).is_ok_and(|found| found.rdma)
                    }
                };
                if wanted {
                    names.insert(if injected("order") { 0 } else { names.len() }, factory.name());
                }
            }
        }
    }
    let unauthenticated = context.options.unauthenticated()?;
    let unauthenticated: Vec<_> =
        unauthenticated.iter().map(|name| registry.canonical(name)).collect::<Result<_>>()?;
    let (mut transports, mut refused) = (Vec::new(), Vec::new());
    for name in names {
        let opened =
            registry.require(name, &context.options).and_then(|(factory, availability)| {
                let admission = factory.admission();
                if context.secret.is_some()
                    && admission == Admission::Open
                    && !unauthenticated.contains(&name)
                {
                    return Err(asks_for_no_secret(name));
                }
                for caution in &availability.cautions {
                    tracing::warn!(backend = name, "{caution}");
                }
                let transport =
                    factory.open(context.clone()).map_err(|error| error.with_backend(name))?;
                let speaks_for = factory.placement().speaks_for;
                Ok(Open { name, speaks_for, admission, transport, meters: Meters::of(name) })
            });
        match opened {
            Ok(open) => transports.push(open),
            Err(error) if error.kind() == ErrorKind::Invalid => return Err(error),
            Err(error) => {
                tracing::warn!(backend = name, %error, "a backend could not be opened");
                refused.push((name, error));
            }
        }
    }
    if transports.is_empty() {
        if let [(_, only)] = &refused[..] {
            return Err(only.clone());
        }
        let reasons: Vec<_> = refused.iter().map(|(_, error)| error.to_string()).collect();
        let reasons =
            if reasons.is_empty() { "none is compiled in".into() } else { reasons.join("; ") };
        return Err(ErrorKind::NoRoute.because(format!("no backend could be opened: {reasons}")));
    }
    Ok((transports, refused))
}

fn asks_for_no_secret(name: &'static str) -> Error {
    let why = format!(
        "this agent has a shared secret, but {name}'s library talks to unauthenticated peers: \
         leave {name} out, or add \"unauthenticated\": [\"{name}\"] next to \"backends\" if only \
         your peers can reach it (vLLM's need that)"
    );
    ErrorKind::Authentication.because(why).with_backend(name)
}
