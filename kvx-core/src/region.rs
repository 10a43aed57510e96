//! Regions: memory registered with an agent, and the regions of its peers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::agent::AgentInner;
use crate::breaks::broken;
use crate::completion::{Completion, Shot};
use crate::deadline::Reason;
use crate::grid::{Grid, GridSet};
use crate::identity::{Identity, RegionId, RegionKey};
use crate::metadata::{RegionInfo, encode_region};
use crate::plan::{Bindings, PlanInner};
use crate::quarantine::{self, Held};
use crate::sync::Mutex;
use crate::ticket::Settle;
use crate::transport::{ForeignRange, LocalRegion};
use crate::{Deadline, Error, Kind, Memory, MemoryKind, Result, Ticket, fork};

/// Something that grids lie on: a [`Region`] or a [`PeerRegion`].
pub trait Place: sealed::Sealed {
    /// Length in bytes.
    fn len(&self) -> u64;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Kind of memory.
    fn kind(&self) -> MemoryKind;
    /// Where its bytes lie, so that two regions over the same bytes are seen: an address space, and an address in it.
    #[doc(hidden)]
    fn origin(&self) -> (u64, u64);
    #[doc(hidden)]
    fn is(&self, other: &Self) -> bool;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Region {}
    impl Sealed for super::PeerRegion {}
}

/// Memory registered with an agent. Cheap to clone.
///
/// Peers may reach it until it is revoked. Dropping the last clone never blocks: the memory is quarantined, and
/// freed only when every transport has said that remote access has ended.
#[derive(Clone)]
pub struct Region(Arc<Handle>);

struct Handle {
    agent: Arc<AgentInner>,
    core: Arc<RegionCore>,
}

/// The part of a region that outlives its handles while transports still hold on to it.
pub(crate) struct RegionCore {
    pub(crate) id: RegionId,
    pub(crate) key: RegionKey,
    pub(crate) name: Arc<str>,
    pub(crate) memory: Arc<Memory>,
    /// What each transport made of it, by position in the agent's list; or why not.
    pub(crate) locals: Vec<Result<Arc<dyn LocalRegion>>>,
    /// Transfers of the own agent that use it and have not settled.
    pins: AtomicUsize,
    revoking: AtomicBool,
    revocation: Mutex<Revocation>,
    /// Plans whose bindings hold what transports made of it.
    bindings: Mutex<Bindings>,
}

#[derive(Default)]
struct Revocation {
    /// Transports that have not answered; `None` before they were asked.
    left: Option<usize>,
    failed: Option<Error>,
    waiting: Vec<Arc<Shot<Arc<Memory>>>>,
    held: Option<Held>,
    /// All have answered, and what that means.
    ended: Option<Result<()>>,
}

impl Region {
    pub(crate) fn new(agent: Arc<AgentInner>, core: RegionCore) -> Self {
        Region(Arc::new(Handle { agent, core: Arc::new(core) }))
    }

    pub(crate) fn core(&self) -> &Arc<RegionCore> {
        &self.0.core
    }

    /// Its number.
    pub fn id(&self) -> RegionId {
        self.0.core.id
    }

    /// Its name, by which peers find it.
    pub fn name(&self) -> &str {
        &self.0.core.name
    }

    /// Its memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.0.core.memory
    }

    /// Copies `bytes` to `offset`; see [`Memory::copy_in`].
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.0.core.memory.copy_in(offset, bytes)
    }

    /// Copies bytes from `offset` out; see [`Memory::copy_out`].
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.0.core.memory.copy_out(offset, bytes)
    }

    /// A grid on this region. Errors: `Invalid`, `OutOfBounds`.
    pub fn grid(&self, grid: Grid) -> Result<GridSet<Region>> {
        GridSet::one(self.clone(), grid)
    }

    /// What a peer needs to use this region alone, in bytes: for [`Peer::learn`](crate::Peer::learn), at a peer that knows the
    /// agent already. All of an agent's regions one by one cost as much as its metadata once. Errors: `Revoked`.
    pub fn metadata(&self) -> Result<Vec<u8>> {
        fork::check()?;
        match self.0.agent.region_info(self.id()) {
            Some(info) => encode_region(&self.0.agent.identity, &info),
            None => Err(revoked(self.name())),
        }
    }

    /// The backends that do not serve it, and why.
    pub fn refusals(&self) -> Vec<(&'static str, Error)> {
        let names = self.0.agent.transports.iter().map(|open| open.name);
        let refused =
            |(name, local): (_, &Result<_>)| local.as_ref().err().map(|error| (name, error.clone()));
        names.zip(&self.0.core.locals).filter_map(refused).collect()
    }

    /// Ends remote access and gives the memory back.
    ///
    /// New transfers on it are refused at once and the own ones in flight are cancelled. When the completion is `Ok`,
    /// nobody else touches the memory any more. Errors: `StillShared` when that could not be known by the deadline:
    /// the memory stays quarantined until it is.
    pub fn revoke(&self, deadline: impl Into<Deadline>) -> Completion<Arc<Memory>> {
        if let Err(error) = crate::fork::check() {
            return Completion::ready(Err(error));
        }
        let agent = &self.0.agent;
        let shot = Shot::new();
        shot.by(&agent.clock, deadline.into(), still_shared);
        agent.forget_region(self.id());
        self.0.core.revoke(Some(Arc::clone(&shot)), None);
        agent.clock.interrupt(&Reason::Region(self.id()));
        Completion::of(shot)
    }

    pub(crate) fn same_agent(&self, other: &Region) -> bool {
        Arc::ptr_eq(&self.0.agent, &other.0.agent)
    }

    pub(crate) fn is_of(&self, agent: &Arc<AgentInner>) -> bool {
        Arc::ptr_eq(&self.0.agent, agent)
    }
}

fn revoked(name: &str) -> Error {
    Error::new(Kind::Revoked, format!("region {name} is revoked: register its memory again to use it"))
}

fn still_shared() -> Error {
    Error::new(
        Kind::StillShared,
        "remote access to the region is not proven ended: its memory stays quarantined until every peer has confirmed \
         or is known to be dead; call revoke again to go on waiting",
    )
}

impl RegionCore {
    pub(crate) fn new(
        id: RegionId,
        key: RegionKey,
        name: Arc<str>,
        memory: Arc<Memory>,
        locals: Vec<Result<Arc<dyn LocalRegion>>>,
    ) -> Self {
        RegionCore {
            id,
            key,
            name,
            memory,
            locals,
            pins: AtomicUsize::new(0),
            revoking: AtomicBool::new(false),
            revocation: Mutex::default(),
            bindings: Mutex::default(),
        }
    }

    /// Counts a transfer of the own agent. Errors: `Revoked`.
    pub(crate) fn pin(self: &Arc<Self>) -> Result<()> {
        self.pins.fetch_add(1, Ordering::SeqCst);
        if !self.is_revoking() {
            return Ok(());
        }
        self.unpin();
        Err(revoked(&self.name))
    }

    pub(crate) fn unpin(self: &Arc<Self>) {
        if self.pins.fetch_sub(1, Ordering::SeqCst) == 1 && self.is_revoking() {
            self.ask_transports();
        }
    }

    pub(crate) fn is_revoking(&self) -> bool {
        self.revoking.load(Ordering::SeqCst)
    }

    /// A plan that uses it was bound to a link.
    pub(crate) fn bound(&self, plan: &Arc<PlanInner>) {
        self.bindings.lock().add(plan);
    }

    /// Begins, or joins, the revocation; with `quarantine`, a reason, nobody else keeps the memory meanwhile.
    fn revoke(self: &Arc<Self>, waiting: Option<Arc<Shot<Arc<Memory>>>>, quarantine: Option<&str>) {
        let mut revocation = self.revocation.lock();
        let ended = if broken("revoke-at-once") { Some(Ok(())) } else { revocation.ended.clone() };
        if let Some(result) = ended {
            drop(revocation);
            waiting.map(|shot| shot.finish(result.map(|()| Arc::clone(&self.memory))));
            return;
        }
        revocation.waiting.extend(waiting);
        if let Some(why) = quarantine
            && revocation.held.is_none()
        {
            revocation.held = Some(quarantine::hold(Arc::clone(&self.memory), &self.name, why));
        }
        self.revoking.store(true, Ordering::SeqCst);
        drop(revocation);
        if self.pins.load(Ordering::SeqCst) == 0 {
            self.ask_transports();
        }
    }

    /// Called when the own transfers have settled, perhaps by several threads at once.
    fn ask_transports(self: &Arc<Self>) {
        let locals: Vec<_> = self.locals.iter().flatten().cloned().collect();
        {
            let mut revocation = self.revocation.lock();
            if revocation.left.is_some() {
                return;
            }
            // One more than there are, so that the last answer cannot come before all are asked.
            revocation.left = Some(locals.len() + 1);
        }
        let bindings = self.bindings.lock().release_all();
        drop(bindings); // prepared lists end before what they name
        for local in locals {
            local.revoke(Ticket::of(Arc::clone(self) as Arc<dyn Settle>));
        }
        self.answered(Ok(()));
    }

    /// As [`Region::revoke`], for an agent that ends.
    pub(crate) fn revoke_at_shutdown(self: &Arc<Self>) -> Completion<Arc<Memory>> {
        let shot = Shot::new();
        self.revoke(Some(Arc::clone(&shot)), None);
        Completion::of(shot)
    }

    fn answered(self: &Arc<Self>, result: Result<()>) {
        let mut revocation = self.revocation.lock();
        if let Err(error) = result {
            revocation.failed.get_or_insert(error);
        }
        let left = revocation.left.map_or(0, |left| left.saturating_sub(1));
        revocation.left = Some(left);
        if left > 0 {
            return;
        }
        let waiting = std::mem::take(&mut revocation.waiting);
        let result = match revocation.failed.clone() {
            None => Ok(()),
            Some(cause) => Err(still_shared().source(cause)),
        };
        revocation.ended = Some(result.clone());
        let mut held = revocation.held.take();
        drop(revocation);
        if result.is_err() {
            // Nothing will ever prove that the access has ended.
            let held = held.take();
            std::mem::forget(held.unwrap_or_else(|| {
                quarantine::hold(Arc::clone(&self.memory), &self.name, "its revocation failed")
            }));
        }
        drop(held);
        for shot in waiting {
            shot.finish(result.clone().map(|()| Arc::clone(&self.memory)));
        }
    }
}

/// A transport's answer to a revocation.
impl Settle for RegionCore {
    fn settled(self: Arc<Self>, result: Result<()>) {
        self.answered(result);
    }

    fn forgotten(self: Arc<Self>) {
        self.answered(Err(Error::new(
            Kind::Forgotten,
            "a transport lost the revocation: report this as a bug of it",
        )));
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if crate::fork::check().is_err() {
            return std::mem::forget(Arc::clone(&self.core)); // in a fork nothing of a transport is dropped
        }
        if broken("drop-frees") {
            return;
        }
        self.agent.forget_region(self.core.id);
        self.core.revoke(None, Some("dropped without a finished revocation"));
    }
}

impl Place for Region {
    fn len(&self) -> u64 {
        self.0.core.memory.len() as u64
    }
    fn kind(&self) -> MemoryKind {
        self.0.core.memory.kind()
    }
    fn origin(&self) -> (u64, u64) {
        let memory = &self.0.core.memory;
        (memory.kind() as u64, memory.address())
    }
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.core, &other.0.core)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:?}, {:?})", self.0.core.name, self.0.core.memory)
    }
}

/// A region of a peer, as its metadata describes it. Cheap to clone.
#[derive(Clone)]
pub struct PeerRegion(Arc<Theirs>);

struct Theirs {
    peer: Identity,
    what: What,
}

/// A region that metadata names, or a range of a foreign agent's memory.
pub(crate) enum What {
    Named(Arc<RegionInfo>),
    Foreign(ForeignRange),
}

impl PeerRegion {
    pub(crate) fn new(peer: Identity, what: What) -> Self {
        PeerRegion(Arc::new(Theirs { peer, what }))
    }

    pub(crate) fn peer(&self) -> &Identity {
        &self.0.peer
    }

    pub(crate) fn what(&self) -> &What {
        &self.0.what
    }

    /// Its number at the peer; foreign ranges have none and say `RegionId(0)`.
    pub fn id(&self) -> RegionId {
        match &self.0.what {
            What::Named(info) => info.id,
            What::Foreign(_) => RegionId(0),
        }
    }

    pub(crate) fn key(&self) -> RegionKey {
        match &self.0.what {
            What::Named(info) => info.key,
            What::Foreign(_) => RegionKey([0; 16]),
        }
    }

    /// Its name; a foreign range has none.
    pub fn name(&self) -> Option<&str> {
        match &self.0.what {
            What::Named(info) => Some(&info.name),
            What::Foreign(_) => None,
        }
    }

    /// A grid on this region. Errors: `Invalid`, `OutOfBounds`.
    pub fn grid(&self, grid: Grid) -> Result<GridSet<PeerRegion>> {
        GridSet::one(self.clone(), grid)
    }
}

impl Place for PeerRegion {
    fn len(&self) -> u64 {
        match &self.0.what {
            What::Named(info) => info.len,
            What::Foreign(range) => range.len,
        }
    }
    fn kind(&self) -> MemoryKind {
        match &self.0.what {
            What::Named(info) => info.kind,
            What::Foreign(range) => range.kind,
        }
    }
    fn origin(&self) -> (u64, u64) {
        match &self.0.what {
            // One space per region: a peer does not say where its regions lie.
            What::Named(info) => (info.id.0 << 1 | 1, 0),
            What::Foreign(range) => (range.device << 1, range.address),
        }
    }
    fn is(&self, other: &Self) -> bool {
        match (&self.0.what, &other.0.what) {
            (What::Named(a), What::Named(b)) => self.0.peer == other.0.peer && a.id == b.id,
            _ => Arc::ptr_eq(&self.0, &other.0),
        }
    }
}

impl fmt::Debug for PeerRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "PeerRegion({:?} of {:?}, {} bytes)",
            self.name().unwrap_or("foreign"),
            self.0.peer,
            self.len()
        )
    }
}
