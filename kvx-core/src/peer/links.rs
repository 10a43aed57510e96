//! The links to a peer, and the choice of a link for each plan.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::candidates::{Candidate, LinkStage, may_pass, no_route};
use super::requests::LinkRequest;
use crate::agent::inner::{AgentInner, OwnsLinks};
use crate::bound::Bindings;
use crate::completion::Promise;
use crate::fault_injection::injected;
use crate::identity::{Generation, Identity, LinkId, PeerId, RegionId};
use crate::metadata::Metadata;
use crate::route::{Route, RouteCandidate, Verdict};
use crate::sync::Mutex;
use crate::ticket::Ticket;
use crate::transport::{Admission, Link, LinkState, PeerSection};
use crate::{Capabilities, Error, ErrorKind, HungPageScope, Isolation, Result};

pub(crate) struct PeerInner {
    pub(crate) id: PeerId,
    pub(crate) agent: Arc<AgentInner>,
    pub(crate) identity: Identity,
    pub(super) state: Mutex<PeerState>,
}

pub(super) struct PeerState {
    pub(super) about: About,
    pub(super) candidates: Vec<Candidate>,
    /// Backends that are not candidates, and why.
    excluded: Vec<(&'static str, Error)>,
    /// Requests that wait for a link to come up.
    pub(super) parked: Vec<LinkRequest>,
    pub(super) lost: Option<Error>,
    /// The waiters for the loss of the peer.
    pub(super) awaiting_loss: Vec<Weak<Promise<Error>>>,
    /// A second handshake that finds out who answers at the address of a lost peer now.
    pub(super) probe: Option<Probe>,
}

/// A handshake with the process that answers at the address of a lost peer now.
pub(super) struct Probe {
    pub(super) id: LinkId,
    pub(super) link: Option<Arc<dyn Link>>,
    /// The time until which transfers wait for the answer.
    pub(super) awaited_until: Instant,
}

impl PeerState {
    /// Keeps a request until a link is up, and drops requests that have ended meanwhile.
    fn park(&mut self, job: LinkRequest) {
        if self.parked.len() == self.parked.capacity() {
            self.parked.retain(
                |job| !matches!(job, LinkRequest::Transfer(transfer) if transfer.has_ended()),
            );
        }
        self.parked.push(job);
    }

    /// Returns whether a transfer that is posted to the lost peer waits for a probe. A probe
    /// without an answer for a while delays no further transfers.
    fn awaits_probe(&self) -> bool {
        self.probe.as_ref().is_none_or(|probe| Instant::now() < probe.awaited_until)
    }

    /// Resets candidates that were refused for a temporary reason, so that they are tried again.
    /// Returns true if there are any.
    fn forgive(&mut self) -> bool {
        let mut any = false;
        for candidate in &mut self.candidates {
            if matches!(&candidate.stage, LinkStage::Refused(error) if may_pass(error)) {
                candidate.stage = LinkStage::Untried;
                any = true;
            }
        }
        any
    }
}

/// The description of the peer.
#[derive(Clone)]
pub(crate) enum About {
    Kvx(Arc<Metadata>),
    Foreign(Arc<[u8]>),
}

impl About {
    pub(super) fn metadata(&self) -> Result<&Metadata> {
        match self {
            About::Kvx(metadata) => Ok(metadata),
            About::Foreign(_) => Err(ErrorKind::Invalid
                .because("a foreign agent has no named regions: use Peer::foreign")),
        }
    }
}

/// The next step of `dispatch` for a candidate.
enum Dispatch {
    Open(LinkId),
    Try(LinkId, Arc<dyn Link>, &'static str),
    Skip(Error),
    /// Start again from the first candidate: some may serve now.
    Again,
    Nowhere,
    Lost(Error),
}

impl PeerInner {
    pub(crate) fn new(
        agent: Arc<AgentInner>,
        identity: Identity,
        about: About,
        only: Option<usize>,
    ) -> Arc<Self> {
        let mut candidates = Vec::new();
        let mut excluded = agent.not_open.clone();
        for (transport, open) in agent.transports.iter().enumerate() {
            let offered = match &about {
                About::Kvx(metadata) => metadata.backend(open.name).is_some(),
                About::Foreign(_) => only == Some(transport),
            };
            if offered {
                candidates.push(Candidate {
                    backend: open.name,
                    transport,
                    stage: LinkStage::Untried,
                    told: Generation(0),
                    imports: HashMap::new(),
                    bindings: Bindings::default(),
                });
            } else if matches!(about, About::Kvx(_)) {
                let why = ErrorKind::Unsupported
                    .because("the peer has not opened it: name it in the peer's backends");
                excluded.push((open.name, why));
            }
        }
        let state = PeerState {
            about,
            candidates,
            excluded,
            parked: Vec::new(),
            lost: None,
            awaiting_loss: Vec::new(),
            probe: None,
        };
        Arc::new(PeerInner { id: PeerId::next(), agent, identity, state: Mutex::new(state) })
    }

    /// Opens the first link, so that a later post finds it up. Tries links again that were refused
    /// for a temporary reason.
    pub(crate) fn begin(self: &Arc<Self>) {
        self.state.lock().forgive();
        self.dispatch(LinkRequest::Ready(Ticket::new(|_| ())));
    }

    /// Returns the newest description of the peer.
    pub(crate) fn about(&self) -> About {
        self.state.lock().about.clone()
    }

    pub(crate) fn route(&self) -> Route {
        let ours = self.agent.has_read_only_regions();
        let state = self.state.lock();
        let theirs = matches!(
            &state.about,
            About::Kvx(about) if about.regions.iter().any(|region| region.read_only)
        );
        let tried = state.candidates.iter().map(|candidate| RouteCandidate {
            backend: candidate.backend,
            verdict: match &candidate.stage {
                LinkStage::Untried => Verdict::Standby,
                LinkStage::Opening { .. } => Verdict::Opening,
                LinkStage::Up { link, .. } => {
                    let mut how = link.describe();
                    how += trusts(self.agent.transports[candidate.transport].admission);
                    if (ours || theirs) && !refuses_writes(&**link) {
                        how += ", which does not stop peers from writing to read-only memory";
                    }
                    if link.capabilities().hung_page == HungPageScope::Agent {
                        how += "; an unresolved page fault blocks the whole agent";
                    }
                    Verdict::Up(how)
                }
                LinkStage::Refused(error) => Verdict::Refused(error.clone()),
            },
        });
        let excluded = state.excluded.iter().map(|(backend, error)| RouteCandidate {
            backend,
            verdict: Verdict::Refused(error.clone()),
        });
        Route { candidates: tried.chain(excluded).collect() }
    }

    /// Returns the capabilities of the first link that is up.
    pub(crate) fn capabilities(&self) -> Option<Arc<Capabilities>> {
        let up = self.state.lock().candidates.iter().find_map(|candidate| match &candidate.stage {
            LinkStage::Up { link, .. } => Some(Arc::clone(link)),
            _ => None,
        });
        up.map(|link| link.capabilities())
    }

    /// Returns the reason why the peer is lost, if it is.
    pub(crate) fn lost(&self) -> Option<Error> {
        self.state.lock().lost.clone()
    }

    /// Returns the time until which a transfer to a lost peer waits for the probe of its address,
    /// if a probe is under way.
    pub(crate) fn probe_awaited_until(&self) -> Option<Instant> {
        self.state.lock().probe.as_ref().map(|probe| probe.awaited_until)
    }

    /// Finishes `promise` with the reason once the peer is lost.
    pub(crate) fn on_loss(&self, promise: &Arc<Promise<Error>>) {
        let lost = {
            let mut state = self.state.lock();
            if state.lost.is_none() {
                if state.awaiting_loss.len() == state.awaiting_loss.capacity() {
                    state.awaiting_loss.retain(|waiting| waiting.strong_count() > 0);
                }
                state.awaiting_loss.push(Arc::downgrade(promise));
            }
            state.lost.clone()
        };
        if let Some(lost) = lost {
            promise.finish(Ok(lost));
        }
    }

    /// Finds a link for a request, opens one, or parks the request until a link is up. If no link
    /// serves the request, links that were refused for a temporary reason are tried again.
    pub(crate) fn dispatch(self: &Arc<Self>, job: LinkRequest) {
        self.place(job, true);
    }

    /// Does the work of [`dispatch`](Self::dispatch). A request that has waited for a link passes
    /// false for `again`, because the links have just been tried.
    fn place(self: &Arc<Self>, mut job: LinkRequest, mut again: bool) {
        let mut reasons = Vec::new();
        let mut at = 0;
        loop {
            let step = {
                let mut state = self.state.lock();
                let lost = state.lost.clone();
                if let Some(error) = &lost
                    && error.kind() == ErrorKind::PeerLost
                    && matches!(job, LinkRequest::Transfer(_))
                    && state.awaits_probe()
                {
                    state.park(job);
                    drop(state);
                    return self.probe(error);
                }
                match (lost, state.candidates.get_mut(at)) {
                    (Some(error), _) => Dispatch::Lost(error),
                    (None, None) => {
                        let again = std::mem::take(&mut again) && state.forgive();
                        if again { Dispatch::Again } else { Dispatch::Nowhere }
                    }
                    (None, Some(candidate)) => match &candidate.stage {
                        _ if let Some(error) = job.refusal(candidate.backend) => {
                            Dispatch::Skip(error)
                        }
                        LinkStage::Untried => {
                            let id = self.agent.new_link(self.as_owner());
                            candidate.stage = LinkStage::Opening { id, link: None, early: None };
                            Dispatch::Open(id)
                        }
                        LinkStage::Opening { .. } => return state.park(job),
                        LinkStage::Up { id, link } => {
                            Dispatch::Try(*id, Arc::clone(link), candidate.backend)
                        }
                        LinkStage::Refused(error) => Dispatch::Skip(error.clone()),
                    },
                }
            };
            match step {
                Dispatch::Open(id) => self.open(at, id),
                Dispatch::Try(id, link, backend) => match self.start(job, at, id, &link, backend) {
                    Ok(()) => return,
                    Err((back, reason)) => {
                        job = back;
                        reasons.push((backend, reason));
                        at += 1;
                    }
                },
                Dispatch::Skip(error) => {
                    reasons.push((self.state.lock().candidates[at].backend, error));
                    at += 1;
                }
                Dispatch::Again => {
                    reasons.clear();
                    at = 0;
                }
                Dispatch::Nowhere => {
                    let excluded = self.state.lock().excluded.clone();
                    return job.fail(no_route(reasons, excluded));
                }
                Dispatch::Lost(error) => return job.fail(error),
            }
        }
    }

    /// Starts the link of a candidate. Called without the lock, because a transport may report
    /// before it returns.
    fn open(self: &Arc<Self>, at: usize, id: LinkId) {
        let opened = self.start_link(at, id);
        let mut state = self.state.lock();
        let candidate = &mut state.candidates[at];
        match (opened, &mut candidate.stage) {
            (Err(error), stage) => {
                *stage = LinkStage::Refused(error.with_backend(candidate.backend));
                let parked = std::mem::take(&mut state.parked);
                drop(state);
                self.agent.forget_link(id);
                parked.into_iter().for_each(|job| self.place(job, false));
            }
            (Ok(opened), LinkStage::Opening { link, early, .. }) => {
                *link = Some(opened);
                let early = early.take();
                drop(state);
                if let Some(early) = early {
                    self.link_changed(id, early);
                }
            }
            (Ok(opened), _) => {
                drop(state);
                self.agent.forget_link(id);
                opened.close(); // the peer was lost in the meantime
            }
        }
    }

    pub(super) fn start_link(&self, at: usize, id: LinkId) -> Result<Arc<dyn Link>> {
        let (about, transport) = {
            let mut state = self.state.lock();
            let about = state.about.clone();
            let candidate = &mut state.candidates[at];
            if let About::Kvx(metadata) = &about {
                candidate.told = metadata.generation;
            }
            (about, candidate.transport)
        };
        let open = &self.agent.transports[transport];
        match &about {
            About::Kvx(metadata) => {
                self.agent.check_secret(metadata.invited()?)?;
                open.transport.link(id, section(metadata, open.name)?)
            }
            About::Foreign(blob) => open.transport.link_foreign(id, blob),
        }
    }

    /// Starts a request on a link that is up. Returns the request with the reason if the link
    /// cannot serve it.
    fn start(
        self: &Arc<Self>,
        job: LinkRequest,
        at: usize,
        id: LinkId,
        link: &Arc<dyn Link>,
        backend: &'static str,
    ) -> Result<(), (LinkRequest, Error)> {
        match job {
            LinkRequest::Notify(bytes, ticket) => link.notify(&bytes, ticket),
            LinkRequest::Ready(ticket) => ticket.settle(Ok(())),
            LinkRequest::Transfer(transfer) => match self.bind(transfer.plan(), at, id, link) {
                Ok(bound) => transfer.start(link, backend, bound),
                Err(error) => return Err((LinkRequest::Transfer(transfer), error)),
            },
        }
        Ok(())
    }

    /// Returns this peer as the owner of links.
    pub(super) fn as_owner(self: &Arc<Self>) -> Weak<dyn OwnsLinks> {
        Arc::downgrade(self) as Weak<dyn OwnsLinks>
    }

    /// Handles a change of one of this peer's links.
    pub(super) fn link_changed(self: &Arc<Self>, id: LinkId, change: LinkState) {
        let mut state = self.state.lock();
        if state.probe.as_ref().is_some_and(|probe| probe.id == id) {
            match change {
                LinkState::Changed => {}
                LinkState::Restarted => {
                    drop(state);
                    self.probed(id, true);
                }
                LinkState::Up if injected("lost-again") => {
                    state.lost = None;
                    state
                        .candidates
                        .iter_mut()
                        .for_each(|candidate| candidate.stage = LinkStage::Untried);
                    drop(state);
                    self.probed(id, false);
                }
                LinkState::Up | LinkState::Lost(_) => {
                    drop(state);
                    self.probed(id, false);
                }
            }
            return;
        }
        let PeerState { candidates, .. } = &mut *state;
        let Some(candidate) = candidates.iter_mut().find(|candidate| match &candidate.stage {
            LinkStage::Opening { id: is, .. } | LinkStage::Up { id: is, .. } => *is == id,
            _ => false,
        }) else {
            return;
        };
        let mut refused = None;
        let lost = match (&mut candidate.stage, change) {
            (LinkStage::Opening { link: None, early, .. }, change) => {
                // A later change does not replace one that ends the link.
                if !matches!(change, LinkState::Changed)
                    && !matches!(early, Some(LinkState::Lost(_) | LinkState::Restarted))
                {
                    *early = Some(change);
                }
                return;
            }
            (LinkStage::Opening { link, .. }, LinkState::Up) => {
                if let Some(link) = link.take() {
                    candidate.stage = LinkStage::Up { id, link };
                }
                None
            }
            (_, LinkState::Changed | LinkState::Up) => return,
            (_, LinkState::Restarted) => Some(self.restarted()),
            (LinkStage::Opening { .. }, LinkState::Lost(error)) => {
                let error = error.with_backend(candidate.backend);
                refused = Some(std::mem::replace(
                    &mut candidate.stage,
                    LinkStage::Refused(error.clone()),
                ));
                // The peer itself is gone if it answers on no backend.
                let silent = |candidate: &Candidate| match &candidate.stage {
                    LinkStage::Refused(error) => {
                        matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Unsupported)
                    }
                    _ => false,
                };
                (error.kind() == ErrorKind::PeerLost && candidates.iter().all(silent))
                    .then_some(error)
            }
            (_, LinkState::Lost(error)) => Some(error.with_backend(candidate.backend)),
        };
        let parked = std::mem::take(&mut state.parked);
        drop(state);
        if let Some(LinkStage::Opening { link: Some(link), .. }) = refused {
            self.agent.forget_link(id);
            link.close();
        }
        if lost.is_none()
            && let Err(error) = self.tell_links()
        {
            tracing::warn!(
                peer = %self.identity.name,
                %error,
                "a new link rejected the peer's newer metadata"
            );
        }
        match lost {
            Some(error) => self.lose(error, parked),
            None => parked.into_iter().for_each(|job| self.place(job, false)),
        }
    }

    /// Passes the peer's newest metadata to the links that do not have it yet.
    fn tell_links(&self) -> Result<()> {
        let (metadata, links) = {
            let mut state = self.state.lock();
            let About::Kvx(metadata) = state.about.clone() else { return Ok(()) };
            let behind = |candidate: &mut Candidate| match &candidate.stage {
                LinkStage::Up { link, .. } if candidate.told < metadata.generation => {
                    candidate.told = metadata.generation;
                    Some((candidate.backend, Arc::clone(link)))
                }
                _ => None,
            };
            let links: Vec<_> = state.candidates.iter_mut().filter_map(behind).collect();
            (metadata, links)
        };
        for (backend, link) in links {
            link.update(section(&metadata, backend)?)?;
        }
        Ok(())
    }

    /// Drops what links have prepared for a region.
    pub(super) fn forget(&self, region: RegionId) {
        let gone: Vec<_> = self
            .state
            .lock()
            .candidates
            .iter_mut()
            .filter_map(|link| link.imports.remove(&region))
            .collect();
        drop(gone); // without the lock, because this may unmap memory
    }

    pub(crate) fn update(&self, metadata: Metadata) -> Result<bool> {
        if metadata.identity.name != self.identity.name {
            return Err(ErrorKind::Invalid.because(format!(
                "this metadata is of agent {}, and the peer is {}",
                metadata.identity.name, self.identity.name
            )));
        }
        if metadata.identity.incarnation != self.identity.incarnation {
            return Err(self.restarted());
        }
        let metadata = Arc::new(metadata);
        let mut let_go = (Vec::new(), Vec::new());
        {
            let mut state = self.state.lock();
            let About::Kvx(known) = &state.about else {
                return Err(
                    ErrorKind::Invalid.because("a foreign peer has no kvx metadata to update")
                );
            };
            let older = metadata.generation <= known.generation && !injected("stale-metadata");
            if older || injected("no-update") {
                return Ok(false);
            }
            state.about = About::Kvx(Arc::clone(&metadata));
            let kept: HashSet<_> = metadata.regions.iter().map(|region| region.id).collect();
            for candidate in &mut state.candidates {
                // Plans must bind again, because regions may be gone.
                if let LinkStage::Up { id, .. } = &candidate.stage {
                    let_go.0.extend(candidate.bindings.release(*id));
                }
                let_go.1.extend(candidate.imports.extract_if(|id, _| !kept.contains(id)));
            }
        }
        drop(let_go); // without the lock, because this may drop plans, regions and mappings
        self.tell_links()?;
        Ok(true)
    }
}

impl OwnsLinks for PeerInner {
    fn link_changed(self: Arc<Self>, id: LinkId, change: LinkState) {
        PeerInner::link_changed(&self, id, change);
    }

    fn end(self: Arc<Self>, why: Error) {
        self.lose(why, Vec::new());
    }
}

/// Returns what the route says about who can harm this process through a backend.
fn trusts(admission: Admission) -> &'static str {
    match admission {
        Admission::Proven => "",
        Admission::Keys => "; authenticated peers are trusted with this process",
        Admission::Open => "; all who can reach the library are trusted with this process",
    }
}

/// Returns the section of a peer's metadata for a backend.
fn section<'a>(metadata: &'a Metadata, backend: &str) -> Result<PeerSection<'a>> {
    let (_, address) = metadata.backend(backend).unwrap_or((0, &[]));
    Ok(PeerSection {
        identity: &metadata.identity,
        generation: metadata.generation,
        invitation: metadata.invited()?.by,
        address,
    })
}

/// Returns true if the owner's side of this link refuses writes to read-only memory.
fn refuses_writes(link: &dyn Link) -> bool {
    link.capabilities().isolation.write != Isolation::Cooperative
}
