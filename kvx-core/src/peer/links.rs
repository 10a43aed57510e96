//! The links to a peer, and the choice among them for each plan.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use crate::agent::inner::{AgentInner, OwnsLinks};
use crate::bound::{Bindings, Bound};
use crate::breaks::broken;
use crate::identity::{Generation, Identity, LinkId, PeerId, RegionId, RegionKey};
use crate::metadata::Metadata;
use crate::plan::Plan;
use crate::route::{Considered, Route, Verdict};
use crate::sync::Mutex;
use crate::transport::{Link, LinkState, PeerSection, RemoteRegion};
use crate::{Capabilities, Error, Kind, Result, Ticket};

pub(crate) struct PeerInner {
    pub(crate) id: PeerId,
    pub(crate) agent: Arc<AgentInner>,
    pub(crate) identity: Identity,
    pub(super) state: Mutex<PeerState>,
}

pub(super) struct PeerState {
    pub(super) about: About,
    pub(super) candidates: Vec<Candidate>,
    /// Backends that were no candidates, and why.
    excluded: Vec<(&'static str, Error)>,
    /// Requests that wait for a link to come up.
    pub(super) parked: Vec<LinkRequest>,
    pub(super) lost: Option<Error>,
    /// A second handshake that finds out who answers for a lost peer now.
    pub(super) probe: Option<(LinkId, Option<Arc<dyn Link>>)>,
}

impl PeerState {
    /// Keeps a job until a link has come up; lets go of those that have ended while they waited.
    fn park(&mut self, job: LinkRequest) {
        if self.parked.len() == self.parked.capacity() {
            self.parked.retain(|job| !matches!(job, LinkRequest::Transfer(transfer) if transfer.has_ended()));
        }
        self.parked.push(job);
    }
}

/// The description of the peer.
#[derive(Clone)]
pub(crate) enum About {
    Kvx(Arc<Metadata>),
    Foreign(Arc<[u8]>),
}

/// A backend that may serve the peer.
pub(super) struct Candidate {
    pub(super) backend: &'static str,
    /// Position in the agent's list of transports.
    pub(super) transport: usize,
    pub(super) stage: LinkStage,
    /// The generation of the metadata that the link was last told.
    told: Generation,
    pub(super) imports: HashMap<RegionId, Imported>,
    pub(super) bindings: Bindings,
}

/// What a link made of a region, as its owner described it then.
pub(super) struct Imported {
    pub(super) key: RegionKey,
    pub(super) len: u64,
    pub(super) region: Arc<dyn RemoteRegion>,
}

pub(super) enum LinkStage {
    Untried,
    Opening { id: LinkId, link: Option<Arc<dyn Link>>, early: Option<LinkState> },
    Up { id: LinkId, link: Arc<dyn Link> },
    Refused(Error),
}

/// A transfer that is to be handed a link.
pub(crate) trait NeedsLink: Send + Sync {
    fn plan(&self) -> &Plan;

    /// The reason why a backend could not carry it, if it was tried.
    fn refusal(&self, backend: &'static str) -> Option<Error>;

    /// True if it has ended, so that nobody need start it.
    fn has_ended(&self) -> bool;

    /// This link serves it.
    fn start(self: Arc<Self>, link: &Arc<dyn Link>, backend: &'static str, bound: Arc<Bound>);

    /// No link does.
    fn fail(self: Arc<Self>, error: Error);
}

/// Something that needs a link.
pub(crate) enum LinkRequest {
    Transfer(Arc<dyn NeedsLink>),
    Notify(Box<[u8]>, Ticket),
    Ready(Ticket),
}

impl LinkRequest {
    /// The reason why a backend cannot serve this request, if it has said so.
    fn refusal(&self, backend: &'static str) -> Option<Error> {
        match self {
            LinkRequest::Transfer(transfer) => transfer.refusal(backend),
            LinkRequest::Notify(..) | LinkRequest::Ready(_) => None,
        }
    }

    pub(super) fn fail(self, error: Error) {
        match self {
            LinkRequest::Transfer(transfer) => transfer.fail(error),
            LinkRequest::Notify(_, ticket) | LinkRequest::Ready(ticket) => ticket.settle(Err(error)),
        }
    }
}

/// The next step of `dispatch` at a candidate.
enum Dispatch {
    Open(LinkId),
    Try(LinkId, Arc<dyn Link>, &'static str),
    Skip(Error),
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
                let why = Error::new(
                    Kind::Unsupported,
                    "the peer has not opened it: name it in the peer's backends",
                );
                excluded.push((open.name, why));
            }
        }
        let state = PeerState { about, candidates, excluded, parked: Vec::new(), lost: None, probe: None };
        Arc::new(PeerInner { id: PeerId::next(), agent, identity, state: Mutex::new(state) })
    }

    /// Opens the first link, so that a later post finds it up.
    pub(crate) fn begin(self: &Arc<Self>) {
        self.dispatch(LinkRequest::Ready(Ticket::new(|_| ())));
    }

    /// The newest description of the peer.
    pub(crate) fn about(&self) -> About {
        self.state.lock().about.clone()
    }

    pub(crate) fn route(&self) -> Route {
        let state = self.state.lock();
        let tried = state.candidates.iter().map(|candidate| Considered {
            backend: candidate.backend,
            verdict: match &candidate.stage {
                LinkStage::Untried => Verdict::Standby,
                LinkStage::Opening { .. } => Verdict::Opening,
                LinkStage::Up { link, .. } => Verdict::Up(link.describe()),
                LinkStage::Refused(error) => Verdict::Refused(error.clone()),
            },
        });
        let excluded = state
            .excluded
            .iter()
            .map(|(backend, error)| Considered { backend, verdict: Verdict::Refused(error.clone()) });
        Route { considered: tried.chain(excluded).collect() }
    }

    /// The promises of the first link that is up.
    pub(crate) fn capabilities(&self) -> Option<Arc<Capabilities>> {
        let up = self.state.lock().candidates.iter().find_map(|candidate| match &candidate.stage {
            LinkStage::Up { link, .. } => Some(Arc::clone(link)),
            _ => None,
        });
        up.map(|link| link.capabilities())
    }

    /// The reason why the peer is lost, if it is.
    pub(crate) fn lost(&self) -> Option<Error> {
        self.state.lock().lost.clone()
    }

    /// Finds a link for a job, opens one, or parks the job until one has come up.
    pub(crate) fn dispatch(self: &Arc<Self>, mut job: LinkRequest) {
        let mut reasons = Vec::new();
        let mut at = 0;
        loop {
            let step = {
                let mut state = self.state.lock();
                if state.probe.is_some() {
                    return state.park(job);
                }
                let lost = state.lost.clone();
                match (lost, state.candidates.get_mut(at)) {
                    (Some(error), _)
                        if error.kind() == Kind::PeerLost && matches!(job, LinkRequest::Transfer(_)) =>
                    {
                        state.park(job);
                        drop(state);
                        return self.probe(error);
                    }
                    (Some(error), _) => Dispatch::Lost(error),
                    (None, None) => Dispatch::Nowhere,
                    (None, Some(candidate)) => match &candidate.stage {
                        _ if let Some(error) = job.refusal(candidate.backend) => Dispatch::Skip(error),
                        LinkStage::Untried => {
                            let id = self.agent.new_link(self.as_owner());
                            candidate.stage = LinkStage::Opening { id, link: None, early: None };
                            Dispatch::Open(id)
                        }
                        LinkStage::Opening { .. } => return state.park(job),
                        LinkStage::Up { id, link } => Dispatch::Try(*id, Arc::clone(link), candidate.backend),
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
                Dispatch::Nowhere => {
                    let excluded = self.state.lock().excluded.clone();
                    return job.fail(no_route(reasons, excluded));
                }
                Dispatch::Lost(error) => return job.fail(error),
            }
        }
    }

    /// Starts the link of a candidate. Called without the lock: a transport may report before it returns.
    fn open(self: &Arc<Self>, at: usize, id: LinkId) {
        let opened = self.start_link(at, id);
        let mut state = self.state.lock();
        let candidate = &mut state.candidates[at];
        match (opened, &mut candidate.stage) {
            (Err(error), stage) => {
                *stage = LinkStage::Refused(error.backend(candidate.backend));
                let parked = std::mem::take(&mut state.parked);
                drop(state);
                self.agent.forget_link(id);
                parked.into_iter().for_each(|job| self.dispatch(job));
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
                opened.close(); // the peer was lost meanwhile
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
                let (_, address) = metadata.backend(open.name).unwrap_or((0, &[]));
                let section =
                    PeerSection { identity: &metadata.identity, generation: metadata.generation, address };
                open.transport.link(id, section)
            }
            About::Foreign(blob) => open.transport.link_foreign(id, blob),
        }
    }

    /// Starts a job on a link that is up; gives it back with the reason when the link cannot serve it.
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

    /// As the agent knows it.
    pub(super) fn as_owner(self: &Arc<Self>) -> Weak<dyn OwnsLinks> {
        Arc::downgrade(self) as Weak<dyn OwnsLinks>
    }

    /// A link of this peer changed.
    pub(super) fn link_changed(self: &Arc<Self>, id: LinkId, change: LinkState) {
        let mut state = self.state.lock();
        if let Some((probing, _)) = &state.probe
            && *probing == id
        {
            match change {
                LinkState::Changed => {}
                LinkState::Restarted(incarnation) => {
                    drop(state);
                    self.probed(id, Some(incarnation));
                }
                LinkState::Up if broken("lost-again") => {
                    state.lost = None;
                    state.candidates.iter_mut().for_each(|candidate| candidate.stage = LinkStage::Untried);
                    drop(state);
                    self.probed(id, None);
                }
                LinkState::Up | LinkState::Lost(_) => {
                    drop(state);
                    self.probed(id, None);
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
                // What ends a link is not forgotten for what came after it.
                if !matches!(change, LinkState::Changed)
                    && !matches!(early, Some(LinkState::Lost(_) | LinkState::Restarted(_)))
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
            (_, LinkState::Restarted(incarnation)) => Some(self.restarted(incarnation)),
            (LinkStage::Opening { .. }, LinkState::Lost(error)) => {
                let error = error.backend(candidate.backend);
                refused = Some(std::mem::replace(&mut candidate.stage, LinkStage::Refused(error.clone())));
                // Nobody answers on any backend: the peer itself is gone.
                let silent = |candidate: &Candidate| match &candidate.stage {
                    LinkStage::Refused(error) => matches!(error.kind(), Kind::PeerLost | Kind::Unsupported),
                    _ => false,
                };
                (error.kind() == Kind::PeerLost && candidates.iter().all(silent)).then_some(error)
            }
            (_, LinkState::Lost(error)) => Some(error.backend(candidate.backend)),
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
            tracing::warn!(peer = %self.identity.name, %error, "a new link did not take the peer's newer metadata");
        }
        match lost {
            Some(error) => self.lose(error, parked),
            None => parked.into_iter().for_each(|job| self.dispatch(job)),
        }
    }

    /// Tells the links that are up what they do not know yet of the peer's metadata.
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
            let (_, address) = metadata.backend(backend).unwrap_or((0, &[]));
            link.update(PeerSection {
                identity: &metadata.identity,
                generation: metadata.generation,
                address,
            })?;
        }
        Ok(())
    }

    /// Drops what links made of a region.
    pub(super) fn forget(&self, region: RegionId) {
        let gone: Vec<_> =
            self.state.lock().candidates.iter_mut().filter_map(|link| link.imports.remove(&region)).collect();
        drop(gone); // without the lock: mappings end here
    }

    pub(crate) fn update(&self, metadata: Metadata) -> Result<bool> {
        if metadata.identity.name != self.identity.name {
            return Err(Error::new(
                Kind::Invalid,
                format!("metadata of {} for the peer {}", metadata.identity.name, self.identity.name),
            ));
        }
        if metadata.identity.incarnation != self.identity.incarnation {
            return Err(self.restarted(metadata.identity.incarnation));
        }
        let metadata = Arc::new(metadata);
        let mut let_go = (Vec::new(), Vec::new());
        {
            let mut state = self.state.lock();
            let About::Kvx(known) = &state.about else {
                return Err(Error::new(Kind::Invalid, "a foreign peer has no kvx metadata to update"));
            };
            let older = metadata.generation <= known.generation && !broken("stale-metadata");
            if older || broken("no-update") {
                return Ok(false);
            }
            state.about = About::Kvx(Arc::clone(&metadata));
            let kept: HashSet<_> = metadata.regions.iter().map(|region| region.id).collect();
            for candidate in &mut state.candidates {
                // Plans bind anew: regions may have gone.
                if let LinkStage::Up { id, .. } = &candidate.stage {
                    let_go.0.extend(candidate.bindings.release(*id));
                }
                let_go.1.extend(candidate.imports.extract_if(|id, _| !kept.contains(id)));
            }
        }
        drop(let_go); // without the lock: plans, regions and mappings end with it
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

/// One error for all backends, of which none serves; of the kind that tells most.
fn no_route(tried: Vec<(&'static str, Error)>, excluded: Vec<(&'static str, Error)>) -> Error {
    let telling =
        |kind| matches!(kind, Kind::PeerLost | Kind::PeerRestarted | Kind::Denied | Kind::Incompatible);
    let kind = match &tried[..] {
        [(_, only)] if excluded.is_empty() => return only.clone(),
        _ => {
            tried.iter().map(|(_, error)| error.kind()).rfind(|kind| telling(*kind)).unwrap_or(Kind::NoRoute)
        }
    };
    let reasons: Vec<String> = tried
        .into_iter()
        .chain(excluded)
        .map(|(backend, error)| format!("{backend}: {}", error.sentence()))
        .collect();
    let reasons = if reasons.is_empty() { "no backend is open".to_owned() } else { reasons.join("; ") };
    Error::new(kind, format!("no backend serves this peer and memory: {reasons}"))
}
