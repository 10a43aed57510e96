//! The state that an agent shares with its regions, peers and transports.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::budget::Budget;
use crate::completion::{Completion, Promise};
use crate::deadline::Clock;
use crate::fault_injection::injected;
use crate::flush::{self, FlushedDevices};
use crate::identity::{Identity, LinkId, RegionId, TransferId};
use crate::inbox::Inbox;
use crate::metadata::{AdmissionTerms, RegionInfo};
use crate::region::core::RegionCore;
use crate::sync::Mutex;
use crate::telemetry::Meters;
use crate::ticket::Ticket;
use crate::transport::{Admission, Events, LinkState, QueueFull, Transport};
use crate::{Deadline, Error, ErrorKind, MemoryKind, Result, Sender, fork};

pub(crate) struct AgentInner {
    pub(crate) identity: Identity,
    /// The terms on which peers are admitted.
    pub(crate) invited: AdmissionTerms,
    pub(crate) transports: Vec<Open>,
    /// Backends that were requested but could not be opened.
    pub(crate) not_open: Vec<(&'static str, Error)>,
    /// True if device memory goes through host buffers only.
    pub(super) staged: bool,
    pub(crate) clock: Clock,
    pub(crate) budget: Budget,
    pub(super) inbox: Inbox,
    /// The devices of registered memory that are flushed before a notification is delivered.
    pub(crate) flushed: FlushedDevices,
    pub(super) tables: Mutex<Tables>,
    ids: AtomicU64,
    pub(super) closed: AtomicBool,
    /// Held by the thread that shuts down; true once it has asked the transports to shut down.
    pub(super) shutting: Mutex<bool>,
}

impl Drop for AgentInner {
    fn drop(&mut self) {
        if fork::check().is_err() {
            // A forked child must not drop anything that belongs to a transport.
            std::mem::forget(std::mem::take(&mut self.transports));
        }
    }
}

/// A transport of this agent.
pub(crate) struct Open {
    pub(crate) name: &'static str,
    pub(crate) speaks_for: &'static [&'static str],
    pub(crate) admission: Admission,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) meters: Meters,
}

#[derive(Default)]
pub(super) struct Tables {
    pub(super) generation: u64,
    pub(super) regions: BTreeMap<RegionId, Arc<RegionInfo>>,
    /// The names of the regions.
    pub(super) names: HashSet<Arc<str>>,
    /// The regions to revoke at shutdown.
    pub(super) handles: Vec<Weak<RegionCore>>,
    /// The owner of each link, which is notified of changes.
    links: HashMap<LinkId, Weak<dyn OwnsLinks>>,
}

/// A peer, as the agent sees it.
pub(crate) trait OwnsLinks: Send + Sync {
    /// Called when one of the owner's links changes.
    fn link_changed(self: Arc<Self>, id: LinkId, change: LinkState);

    /// Called when the owner is gone for good: closes its links and fails what waits for one.
    fn end(self: Arc<Self>, why: Error);
}

/// A notification that waits for a flush, and is delivered also if a device loses that.
struct HeldNotification {
    agent: Weak<AgentInner>,
    flushed: Option<Result<()>>,
}

impl HeldNotification {
    fn release(mut self, flushed: Result<()>) {
        self.flushed = Some(flushed);
    }
}

impl Drop for HeldNotification {
    fn drop(&mut self) {
        let flushed = self.flushed.take().unwrap_or_else(|| {
            Err(ErrorKind::Forgotten.because("the device lost the ticket of a flush"))
        });
        if let Err(error) = flushed {
            tracing::error!(%error, "a device may not see what a network card has written");
        }
        if let Some(agent) = self.agent.upgrade() {
            agent.inbox.release();
        }
    }
}

/// Receives the reports of transports. Holds the agent weakly, so that transports do not keep it
/// alive.
pub(super) struct Sink(pub(super) Mutex<Weak<AgentInner>>);

impl Events for Sink {
    fn notification(&self, from: Sender<'_>, bytes: &[u8]) -> Result<(), QueueFull> {
        let agent = self.0.lock().upgrade();
        agent.map_or(Ok(()), |agent| agent.notified(from, bytes))
    }

    fn link(&self, id: LinkId, state: LinkState) {
        let agent = self.0.lock().upgrade();
        let owner =
            agent.and_then(|agent| agent.tables.lock().links.get(&id).and_then(Weak::upgrade));
        if let Some(owner) = owner {
            owner.link_changed(id, state);
        }
    }
}

impl AgentInner {
    /// Receives a notification. The data that it belongs to may be on a device, which must see it
    /// before the program does anything with it.
    fn notified(self: &Arc<Self>, from: Sender<'_>, bytes: &[u8]) -> Result<(), QueueFull> {
        let devices = self.flushed.all();
        if devices.is_empty() {
            return self.inbox.deliver(from, bytes);
        }
        self.inbox.hold(from, bytes)?;
        let held = HeldNotification { agent: Arc::downgrade(self), flushed: None };
        flush::flush(devices, Ticket::new(move |flushed| held.release(flushed)));
        Ok(())
    }

    pub(super) fn new(
        (identity, invited): (Identity, AdmissionTerms),
        (transports, not_open): (Vec<Open>, Vec<(&'static str, Error)>),
        staged: bool,
        budget: Budget,
        inbox: Inbox,
    ) -> Result<Self> {
        Ok(AgentInner {
            clock: Clock::start(&identity.name)?,
            identity,
            invited,
            transports,
            not_open,
            staged,
            budget,
            inbox,
            flushed: FlushedDevices::default(),
            tables: Mutex::default(),
            ids: AtomicU64::new(1),
            closed: AtomicBool::new(false),
            shutting: Mutex::new(false),
        })
    }

    /// Returns the owners of all links, once per link.
    pub(super) fn owners(&self) -> Vec<Arc<dyn OwnsLinks>> {
        self.tables.lock().links.values().filter_map(Weak::upgrade).collect()
    }

    /// Returns the position of the open backend that connects to foreign agents of this kind.
    ///
    /// # Errors
    /// `NoRoute` if there is none.
    pub(super) fn speaks(&self, backend: &str) -> Result<usize> {
        let is = |name: &&str| name.eq_ignore_ascii_case(backend);
        let position = |speaks: &dyn Fn(&Open) -> bool| self.transports.iter().position(speaks);
        // A backend that speaks for another one goes first: the other cannot do so itself.
        let speaker = position(&|open| open.speaks_for.iter().any(is));
        speaker.or_else(|| position(&|open| is(&open.name))).ok_or_else(|| {
            let open: Vec<_> = self.transports.iter().map(|open| open.name).collect();
            ErrorKind::NoRoute.because(format!(
                "no open backend connects to foreign {backend} agents (open: {}): name {backend} \
                 in `backends`",
                open.join(", ")
            ))
        })
    }

    /// Checks that both sides or neither have a secret. The handshake checks that the secrets are
    /// equal.
    ///
    /// # Errors
    /// `Authentication` if only one side has a secret.
    pub(crate) fn check_secret(&self, peer: AdmissionTerms) -> Result<()> {
        let why = match (self.invited.with_secret, peer.with_secret) {
            (false, true) => {
                "the peer has a shared secret and this agent has none: \
                 set KVX_SECRET_FILE of this agent to the same secret"
            }
            (true, false) => {
                "this agent has a shared secret and the peer has none: \
                 set KVX_SECRET_FILE of the peer to the same secret"
            }
            _ => return Ok(()),
        };
        Err(ErrorKind::Authentication.because(why))
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if !injected("fork") {
            fork::check()?;
        }
        if self.is_closed() {
            return Err(ErrorKind::Closed.because("the agent has been shut down: build a new one"));
        }
        Ok(())
    }

    /// Returns true if the backend should be asked to register memory of this kind.
    pub(super) fn may_register(&self, open: &Open, kind: MemoryKind) -> bool {
        !self.staged || kind.is_host() || open.transport.stages_devices()
    }

    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn new_transfer(&self) -> TransferId {
        TransferId(self.next_id())
    }

    pub(crate) fn new_link(&self, owner: Weak<dyn OwnsLinks>) -> LinkId {
        let id = LinkId(self.next_id());
        self.tables.lock().links.insert(id, owner);
        id
    }

    pub(crate) fn forget_link(&self, id: LinkId) {
        let gone = self.tables.lock().links.remove(&id);
        drop(gone);
    }

    pub(crate) fn forget_region(&self, id: RegionId) {
        let mut tables = self.tables.lock();
        if let Some(region) = tables.regions.remove(&id) {
            tables.names.remove(&region.name);
            tables.generation += 1;
        }
    }

    pub(crate) fn region_info(&self, id: RegionId) -> Option<Arc<RegionInfo>> {
        self.tables.lock().regions.get(&id).cloned()
    }

    pub(crate) fn has_read_only_regions(&self) -> bool {
        self.tables.lock().regions.values().any(|region| region.read_only)
    }

    pub(super) fn resume_transports(&self) {
        for open in &self.transports {
            open.transport.resume();
        }
    }

    /// Begins an operation that fails with `TimedOut` and the sentence `late` at its deadline, and
    /// at once if the agent has been shut down.
    pub(crate) fn begin<T: Send + 'static>(
        &self,
        deadline: Deadline,
        late: &'static str,
        start: impl FnOnce(&Arc<Promise<T>>),
    ) -> Completion<T> {
        if let Err(error) = self.check_open() {
            return Completion::ready(Err(error));
        }
        let promise = Promise::new();
        promise.by(&self.clock, deadline, move || ErrorKind::TimedOut.because(late));
        start(&promise);
        Completion::of(promise)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Invitation;
    use crate::budget::Limits;
    use crate::inbox::InboxLimits;
    use crate::memory::FaultyDevice;
    use crate::{DeviceAccess, Incarnation};

    #[test]
    fn a_flush_that_a_device_loses_holds_back_no_notification() {
        let identity =
            |name: &str| Identity { name: name.into(), incarnation: Incarnation([1; 16]) };
        let invited = AdmissionTerms { by: Invitation::from_bytes([1; 32]), with_secret: false };
        let (budget, inbox) = (Budget::new(Limits::default()), Inbox::new(InboxLimits::default()));
        let opened = (Vec::new(), Vec::new());
        let agent = AgentInner::new((identity("a"), invited), opened, false, budget, inbox);
        let agent = Arc::new(agent.unwrap());
        let device: Arc<dyn DeviceAccess> = Arc::new(FaultyDevice::default());
        agent.flushed.note(Some(&device));
        let from = identity("b");
        for bytes in [b"first", b"later"] {
            let from = Sender { name: &from.name, incarnation: from.incarnation };
            agent.notified(from, bytes).unwrap();
            let notification = agent.inbox.take().0.expect("it is delivered");
            assert_eq!(*notification.bytes, *bytes);
        }
    }
}
