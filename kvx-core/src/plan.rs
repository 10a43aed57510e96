//! Plans: what moves where, checked once, posted as often as wanted.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use crate::grid::{Blocks, Grid, Indices};
use crate::identity::Identity;
use crate::overlap::{self, Target};
use crate::region::{PeerRegion, Place, Region};
use crate::segments::Segments;
use crate::sync::Mutex;
use crate::transport::{LocalRegion, RemoteRegion};
use crate::{Error, Kind, LinkId, Memory, MemoryKind, RegionId, RegionKey, Result, fork};

/// What a transfer does, as its initiator sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the peer's blocks into the local ones.
    Read,
    /// From the local blocks into the peer's.
    Write,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Read => "read",
            Op::Write => "write",
        })
    }
}

/// Pairs of local and remote blocks, checked once and immutable; cheap to clone, and can be posted again and again.
///
/// Names one operation, one peer incarnation and one memory kind a side, but no backend: the route is chosen when it
/// is posted. Block `i` of the local index list pairs with block `i` of the remote one, in every grid of the set.
#[derive(Clone)]
pub struct Plan(pub(crate) Arc<PlanInner>);

pub(crate) struct PlanInner {
    pub(crate) op: Op,
    pub(crate) peer: Identity,
    pub(crate) pairs: Arc<[Pair]>,
    pub(crate) locals: Vec<Region>,
    pub(crate) remotes: Vec<PeerRegion>,
    pub(crate) size: Size,
    /// The binding to the link that carried it last. Held here, and dropped by the link when it closes.
    pub(crate) bound: Mutex<Option<(LinkId, Arc<Bound>)>>,
}

impl Drop for PlanInner {
    fn drop(&mut self) {
        if fork::check().is_err() {
            std::mem::forget(self.bound.get_mut().take()); // in a fork nothing of a transport is dropped
        }
    }
}

/// How much a plan moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Bytes.
    pub bytes: u64,
    /// Blocks: indices times grids.
    pub blocks: u64,
    /// Contiguous pieces that are left when neighbours on both sides are merged.
    pub segments: u64,
    /// Bytes that the description takes.
    pub(crate) description: usize,
}

/// One side's grid, and which of the plan's regions it lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Position in [`Bound::local`] or [`Bound::remote`].
    pub region: u32,
    /// The grid.
    pub grid: Grid,
}

/// A pair of a plan: two grid sets of as many grids, and two index lists of the same length.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The local grids, in order.
    pub local: Arc<[Placed]>,
    /// The remote grids: grid `i` pairs with local grid `i`, of the same block length.
    pub remote: Arc<[Placed]>,
    /// The local blocks.
    pub local_indices: Indices,
    /// The remote blocks: entry `i` pairs with local entry `i`.
    pub remote_indices: Indices,
}

impl Plan {
    /// A plan that reads `remote` into `local`.
    ///
    /// # Errors
    /// `Invalid` when the two sides differ in grids, block length or number of indices, or an agent, peer or memory
    /// kind differs within a side; `OutOfBounds` for an index beyond its grid; `Overlap` when two destinations overlap.
    pub fn read(local: Blocks<Region>, remote: Blocks<PeerRegion>) -> Result<Plan> {
        Plan::of(Op::Read, [(local, remote)])
    }

    /// A plan that writes `local` into `remote`. Errors as [`read`](Plan::read).
    pub fn write(local: Blocks<Region>, remote: Blocks<PeerRegion>) -> Result<Plan> {
        Plan::of(Op::Write, [(local, remote)])
    }

    /// A plan of several pairs; at least one, which may name zero blocks. Errors as [`read`](Plan::read).
    pub fn of(op: Op, pairs: impl IntoIterator<Item = (Blocks<Region>, Blocks<PeerRegion>)>) -> Result<Plan> {
        fork::check()?;
        let mut build = Build::default();
        for (local, remote) in pairs {
            build.pair(local, remote)?;
        }
        let Some(peer) = build.remotes.first().map(|region: &PeerRegion| region.peer().clone()) else {
            return Err(Error::new(
                Kind::Invalid,
                "a plan of no pairs: name at least one, its index lists may be empty",
            ));
        };
        if let Some(other) = build.remotes.iter().find(|region| *region.peer() != peer) {
            return Err(Error::new(
                Kind::Invalid,
                format!("one plan for two peers, {peer:?} and {:?}: make a plan for each", other.peer()),
            ));
        }
        one_kind("local", build.locals.iter().map(Place::kind))?;
        one_kind("remote", build.remotes.iter().map(Place::kind))?;
        if build.locals.iter().any(|region| !region.same_agent(&build.locals[0])) {
            return Err(Error::new(Kind::Invalid, "the local regions of a plan belong to different agents"));
        }
        build.check_destinations(op)?;
        let Build { pairs, locals, remotes, size } = build;
        let inner =
            PlanInner { op, peer, pairs: pairs.into(), locals, remotes, size, bound: Mutex::default() };
        Ok(Plan(Arc::new(inner)))
    }

    /// The operation.
    pub fn op(&self) -> Op {
        self.0.op
    }

    /// How much it moves.
    pub fn size(&self) -> Size {
        self.0.size
    }

    /// The peer it names.
    pub fn peer(&self) -> &Identity {
        &self.0.peer
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plan({} {} blocks, {} bytes)", self.0.op, self.0.size.blocks, self.0.size.bytes)
    }
}

fn one_kind(side: &str, mut kinds: impl Iterator<Item = MemoryKind>) -> Result<()> {
    let first = kinds.next();
    match kinds.find(|kind| Some(*kind) != first) {
        None => Ok(()),
        Some(other) => Err(Error::new(
            Kind::Invalid,
            format!(
                "the {side} side of a plan mixes {} and {other} memory: make a plan for each",
                first.unwrap_or(MemoryKind::Host)
            ),
        )),
    }
}

#[derive(Default)]
struct Build {
    pairs: Vec<Pair>,
    locals: Vec<Region>,
    remotes: Vec<PeerRegion>,
    size: Size,
}

impl Build {
    fn pair(&mut self, local: Blocks<Region>, remote: Blocks<PeerRegion>) -> Result<()> {
        let (ours, theirs) = (local.set.grids(), remote.set.grids());
        if ours.len() != theirs.len() {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "a pair of {} local and {} remote grids: they pair one to one",
                    ours.len(),
                    theirs.len()
                ),
            ));
        }
        if let Some(((_, a), (_, b))) = ours.iter().zip(theirs).find(|((_, a), (_, b))| a.length != b.length)
        {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "a local block of {} bytes pairs with a remote one of {}: they must be equal",
                    a.length, b.length
                ),
            ));
        }
        if local.indices.len() != remote.indices.len() {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "{} local and {} remote indices: they pair one to one",
                    local.indices.len(),
                    remote.indices.len()
                ),
            ));
        }
        for (side, indices, count) in
            [("local", &local.indices, local.set.count()), ("remote", &remote.indices, remote.set.count())]
        {
            if let Some(max) = indices.max()
                && max >= count
            {
                return Err(Error::new(
                    Kind::OutOfBounds,
                    format!("the {side} index {max} lies beyond a grid of {count} blocks"),
                ));
            }
        }
        let blocks = local.indices.len() as u64;
        let runs = overlap::runs(&local.indices, &remote.indices);
        for ((_, a), (_, b)) in ours.iter().zip(theirs) {
            self.size.bytes += blocks * a.length;
            self.size.blocks += blocks;
            self.size.segments += if a.is_packed() && b.is_packed() { runs } else { blocks };
        }
        self.size.description +=
            local.indices.bytes() + remote.indices.bytes() + 2 * size_of::<Placed>() * ours.len();
        let place_local = ours.iter().map(|(region, grid)| place(&mut self.locals, region, *grid)).collect();
        let place_remote =
            theirs.iter().map(|(region, grid)| place(&mut self.remotes, region, *grid)).collect();
        self.pairs.push(Pair {
            local: place_local,
            remote: place_remote,
            local_indices: local.indices,
            remote_indices: remote.indices,
        });
        Ok(())
    }

    fn check_destinations(&self, op: Op) -> Result<()> {
        if crate::breaks::broken("overlap") {
            return Ok(());
        }
        let mut targets = Vec::new();
        for pair in &self.pairs {
            let (grids, indices) = match op {
                Op::Read => (&pair.local, &pair.local_indices),
                Op::Write => (&pair.remote, &pair.remote_indices),
            };
            for placed in grids.iter() {
                let (space, base) = match op {
                    Op::Read => self.locals[placed.region as usize].origin(),
                    Op::Write => self.remotes[placed.region as usize].origin(),
                };
                targets.push(Target { space, base, grid: placed.grid, indices });
            }
        }
        overlap::check(&targets)
    }
}

fn place<R: Place + Clone>(regions: &mut Vec<R>, region: &R, grid: Grid) -> Placed {
    let known = regions.iter().position(|other| other.is(region));
    let region = known.unwrap_or_else(|| {
        regions.push(region.clone());
        regions.len() - 1
    });
    Placed { region: region as u32, grid }
}

/// A plan on the link that its route chose: what a transport works from.
pub struct Bound {
    // First, so that it is dropped before the regions whose keys it may hold.
    native: OnceLock<Arc<dyn Any + Send + Sync>>,
    making: Mutex<()>,
    op: Op,
    link: LinkId,
    pairs: Arc<[Pair]>,
    locals: Vec<LocalSide>,
    remotes: Vec<RemoteSide>,
    size: Size,
}

/// A local region of a bound plan.
pub struct LocalSide {
    /// Its number.
    pub id: RegionId,
    /// Its key, to be shown to a peer that is asked to read it.
    pub key: RegionKey,
    /// Its memory, kept alive by the bound plan.
    pub memory: Arc<Memory>,
    /// What the transport made of it.
    pub region: Arc<dyn LocalRegion>,
}

/// A peer's region of a bound plan.
pub struct RemoteSide {
    /// Its number at the peer.
    pub id: RegionId,
    /// Its key.
    pub key: RegionKey,
    /// Its length in bytes.
    pub len: u64,
    /// What the link made of it.
    pub region: Arc<dyn RemoteRegion>,
}

impl Bound {
    pub(crate) fn new(
        plan: &PlanInner,
        link: LinkId,
        locals: Vec<LocalSide>,
        remotes: Vec<RemoteSide>,
    ) -> Self {
        Bound {
            op: plan.op,
            link,
            pairs: Arc::clone(&plan.pairs),
            locals,
            remotes,
            size: plan.size,
            native: OnceLock::new(),
            making: Mutex::new(()),
        }
    }

    /// The operation.
    pub fn op(&self) -> Op {
        self.op
    }

    /// The link it is bound to.
    pub fn link(&self) -> LinkId {
        self.link
    }

    /// The pairs, for prepared lists and compact wire forms.
    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// How much it moves.
    pub fn size(&self) -> Size {
        self.size
    }

    /// The local region that a [`Placed`] or a segment speaks of.
    pub fn local(&self, region: u32) -> &LocalSide {
        &self.locals[region as usize]
    }

    /// The remote region that a [`Placed`] or a segment speaks of.
    pub fn remote(&self, region: u32) -> &RemoteSide {
        &self.remotes[region as usize]
    }

    /// All local regions.
    pub fn locals(&self) -> &[LocalSide] {
        &self.locals
    }

    /// All remote regions.
    pub fn remotes(&self) -> &[RemoteSide] {
        &self.remotes
    }

    /// The contiguous pieces, of at most `max_len` bytes each: lazy, merged where both sides are adjacent, resumable.
    pub fn segments(self: &Arc<Self>, max_len: u64) -> Segments {
        Segments::new(Arc::clone(self), max_len)
    }

    /// The same plan with other handles of its regions. A transport that wraps another one gives it back the regions
    /// that it made itself; [`native`](Bound::native) keeps the result.
    pub fn with_regions(
        &self,
        local: impl Fn(&Arc<dyn LocalRegion>) -> Arc<dyn LocalRegion>,
        remote: impl Fn(&Arc<dyn RemoteRegion>) -> Arc<dyn RemoteRegion>,
    ) -> Bound {
        let ours = |side: &LocalSide| LocalSide {
            memory: Arc::clone(&side.memory),
            region: local(&side.region),
            ..*side
        };
        let theirs = |side: &RemoteSide| RemoteSide { region: remote(&side.region), ..*side };
        Bound {
            pairs: Arc::clone(&self.pairs),
            locals: self.locals.iter().map(ours).collect(),
            remotes: self.remotes.iter().map(theirs).collect(),
            native: OnceLock::new(),
            making: Mutex::new(()),
            ..*self
        }
    }

    /// What the transport prepared for this plan on this link, made at the first call and kept until the link closes
    /// or the plan is dropped. Call it on the reactor: `make` may take long.
    ///
    /// # Panics
    /// When called with two types on one link.
    pub fn native<T: Any + Send + Sync>(&self, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let kept = match self.native.get() {
            Some(kept) => Arc::clone(kept),
            None => {
                let _one_at_a_time = self.making.lock();
                match self.native.get() {
                    Some(kept) => Arc::clone(kept),
                    None => {
                        let made: Arc<dyn Any + Send + Sync> = Arc::new(make()?);
                        Arc::clone(self.native.get_or_init(|| made))
                    }
                }
            }
        };
        Ok(kept.downcast().unwrap_or_else(|_| panic!("a link prepares one type for its plans")))
    }
}

impl fmt::Debug for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bound({} {} blocks, {} bytes)", self.op, self.size.blocks, self.size.bytes)
    }
}

/// Plans that are bound to a link, or name a region, so that its end can drop their bindings.
#[derive(Default)]
pub(crate) struct Bindings(Vec<Weak<PlanInner>>);

impl Bindings {
    pub(crate) fn add(&mut self, plan: &Arc<PlanInner>) {
        if self.0.len() == self.0.capacity() {
            self.0.retain(|plan| plan.strong_count() > 0);
        }
        self.0.push(Arc::downgrade(plan));
    }

    /// Takes the bindings to `link` off their plans; the caller drops what it gets without holding locks.
    pub(crate) fn release(&mut self, link: LinkId) -> Vec<Released> {
        self.release_if(|on| on == link)
    }

    /// Takes all bindings off their plans, as [`release`](Bindings::release).
    pub(crate) fn release_all(&mut self) -> Vec<Released> {
        self.release_if(|_| true)
    }

    fn release_if(&mut self, gone: impl Fn(LinkId) -> bool) -> Vec<Released> {
        let mut released = Vec::new();
        for plan in self.0.drain(..).filter_map(|plan| plan.upgrade()) {
            let bound = plan.bound.lock().take_if(|(on, _)| gone(*on));
            released.push(Released { _bound: bound, _plan: plan });
        }
        released
    }
}

/// A binding that a closed link has let go.
pub(crate) struct Released {
    _bound: Option<(LinkId, Arc<Bound>)>,
    _plan: Arc<PlanInner>,
}
