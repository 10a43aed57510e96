//! The open backend: a listener, a machine, and its thread.

use std::net::IpAddr;
use std::sync::Arc;

use kvx_backend::control::proof::Keys;
use kvx_backend::reactor::Reactor;
use kvx_core::backend::{
    Admission, AutoOpen, Availability, Context, Factory, Link, LinkId, LocalRegion, PeerSection,
    Placement, RegionSpec, Ticket, Transport, Unavailable,
};
use kvx_core::{Capabilities, Incarnation, Options, Result};

use crate::clock;
use crate::tcp::address;
use crate::tcp::config::Config;
use crate::tcp::context::AgentContext;
use crate::tcp::error::NAME;
use crate::tcp::limit::ConnectionLimit;
use crate::tcp::link::{TcpLink, capabilities};
use crate::tcp::links::{LinkStanding, OpenedLink};
use crate::tcp::machine::{Command, Machine};
use crate::tcp::memory::regions::Regions;
use crate::tcp::memory::stages::DeviceStages;
use crate::tcp::region::TcpRegion;
use crate::tcp::socket::listener::{Listener, host_addresses};

/// The factory of TCP transports, the embedded transport between hosts, with nothing to install.
///
/// Binds to loopback unless its options say otherwise; see the table of options in this crate's
/// documentation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

impl Factory for Tcp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn placement(&self) -> Placement {
        Placement { order: 90, auto_open: AutoOpen::Open, speaks_for: &[] }
    }

    fn admission(&self) -> Admission {
        Admission::Proven
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        Config::read(options).map_err(|error| {
            Unavailable::because(error.sentence().to_owned(), "correct the option")
        })?;
        let devices =
            host_addresses().into_iter().map(|(name, ip)| format!("{name} {ip}")).collect();
        let embedded = Availability::embedded(env!("CARGO_PKG_VERSION"), capabilities());
        Ok(Availability { devices, ..embedded })
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        open(context)
            .map(|transport| Arc::new(transport) as _)
            .map_err(|error| error.with_backend(NAME))
    }
}

struct TcpTransport {
    context: Arc<AgentContext>,
    reactor: Arc<Reactor<Machine>>,
    capabilities: Capabilities,
    address: Vec<u8>,
}

/// Returns the warning about an address that other hosts can reach, in a fleet without a secret.
fn caution(bind: IpAddr, has_secret: bool) -> Option<String> {
    (!bind.is_loopback() && !has_secret).then(|| {
        format!(
            "TCP listens on {bind} without a shared secret: set one, which also encrypts blocks \
             (\"tcp.seal\"), or keep untrusted hosts off that network"
        )
    })
}

fn open(context: Context) -> Result<TcpTransport> {
    let config = Config::read(&context.options)?;
    let listener = Listener::open(&config)?;
    if let Some(caution) = caution(config.bind, context.secret.is_some()) {
        tracing::warn!(backend = NAME, "{caution}");
    }
    let address = address::encode(&listener.addresses);
    let name = format!("kvx-tcp {}", context.agent.name);
    let events = Arc::clone(&context.events);
    let context = Arc::new(AgentContext {
        limit: ConnectionLimit::new(config.max_connections),
        config,
        agent: context.agent,
        keys: Keys::new(&context.invitation, context.secret.as_ref()),
        secret: context.secret,
        events: context.events,
        peer_timeout: context.peer_timeout,
        process: std::process::id(),
        regions: Regions::default(),
        stages: DeviceStages::default(),
        deferred: Arc::default(),
    });
    let machine = Machine::new(Arc::clone(&context), listener)?;
    let reactor = Arc::new(Reactor::start(name, machine, events)?);
    let to_machine = Arc::downgrade(&reactor);
    context.deferred.wake_with(move |token| {
        if let Some(reactor) = to_machine.upgrade() {
            reactor.submit(Command::Staged { token });
        }
    });
    Ok(TcpTransport { context, reactor, capabilities: capabilities(), address })
}

// SAFETY: the machine touches a plan's memory only as described for `TcpLink`. It touches a
// region's memory for requests that hold the region. A revocation removes the region from the table
// and then from each request before it settles; copies of a device in progress, and a turn that
// hangs in the region, delay the revocation (`DeferredCompletions`).
unsafe impl Transport for TcpTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn address(&self) -> Result<Vec<u8>> {
        Ok(self.address.clone())
    }

    fn register(&self, region: RegionSpec) -> Result<Arc<dyn LocalRegion>> {
        let reactor = Arc::clone(&self.reactor);
        let revoke = move |region, done| reactor.submit(Command::Revoke { region, done });
        TcpRegion::register(region, Arc::clone(&self.context), revoke)
            .map(|region| Arc::new(region) as _)
            .map_err(|error| error.with_backend(NAME))
    }

    fn stages_devices(&self) -> bool {
        true
    }

    fn link(&self, id: LinkId, peer: PeerSection<'_>) -> Result<Arc<dyn Link>> {
        let name = &peer.identity.name;
        let addresses = address::decode(peer.address)
            .map_err(|error| error.with_backend(NAME).with_peer(Arc::clone(name)))?;
        let standing = Arc::new(LinkStanding::default());
        let AgentContext { config, peer_timeout, secret, .. } = &*self.context;
        let keys = Keys::new(&peer.invitation, secret.as_ref());
        let up_by = clock::now() + *peer_timeout;
        let who = (peer.identity.clone(), keys, Incarnation::random()?.0);
        let peer =
            OpenedLink::new(id, who, addresses, config.connections, Arc::clone(&standing), up_by);
        self.reactor.submit(Command::Connect(Box::new(peer)));
        let (context, reactor) = (Arc::clone(&self.context), Arc::clone(&self.reactor));
        Ok(Arc::new(TcpLink { id, context, reactor, standing }))
    }

    fn resume(&self) {
        self.reactor.submit(Command::Resume);
    }

    fn shutdown(&self, done: Ticket) {
        self.reactor.stop();
        done.settle(Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn an_address_for_other_hosts_is_a_caution_only_without_a_secret() {
        let (here, elsewhere) = (Ipv4Addr::LOCALHOST.into(), Ipv4Addr::new(10, 0, 0, 1).into());
        let cautioned = |bind, has_secret| caution(bind, has_secret).is_some();
        assert_eq!((cautioned(here, false), cautioned(elsewhere, true)), (false, false));
        assert!(caution(elsewhere, false).is_some_and(|caution| caution.contains("10.0.0.1")));
    }
}
