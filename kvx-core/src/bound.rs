//! A plan on a link: what a transport works from.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use crate::grid::{Grid, Indices};
use crate::identity::{LinkId, RegionKey};
use crate::operation::{Op, Size};
use crate::sync::Mutex;
use crate::transport::{LocalRegion, RemoteRegion};
use crate::{Memory, RegionId, Result};

/// One side's grid, and which of the plan's regions it divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedGrid {
    /// Position in [`BoundPlan::local`] or [`BoundPlan::remote`].
    pub region: u32,
    /// The grid.
    pub grid: Grid,
}

/// A pair of a plan: two grid sets of as many grids, and two index lists of the same length.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The local grids, in order.
    pub local: Arc<[PlacedGrid]>,
    /// The remote grids: grid `i` pairs with local grid `i`, of the same block length.
    pub remote: Arc<[PlacedGrid]>,
    /// The local blocks.
    pub local_indices: Indices,
    /// The remote blocks: entry `i` pairs with local entry `i`.
    pub remote_indices: Indices,
}

/// A plan on the link that its route chose: what a transport works from.
pub struct BoundPlan {
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
    /// Its registration with the transport.
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
    /// Its import by the link.
    pub region: Arc<dyn RemoteRegion>,
}

impl BoundPlan {
    pub(crate) fn new(
        op: Op,
        size: Size,
        pairs: Arc<[Pair]>,
        link: LinkId,
        locals: Vec<LocalSide>,
        remotes: Vec<RemoteSide>,
    ) -> Self {
        BoundPlan {
            op,
            link,
            pairs,
            locals,
            remotes,
            size,
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

    /// Its bytes, blocks and segments.
    pub fn size(&self) -> Size {
        self.size
    }

    /// The local region that a [`PlacedGrid`] or a segment speaks of.
    pub fn local(&self, region: u32) -> &LocalSide {
        &self.locals[region as usize]
    }

    /// The remote region that a [`PlacedGrid`] or a segment speaks of.
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

    /// The same plan with other handles of its regions. A transport that wraps another one gives it back the regions
    /// that it made itself; [`native`](BoundPlan::native) keeps the result.
    pub fn with_regions(
        &self,
        local: impl Fn(&Arc<dyn LocalRegion>) -> Arc<dyn LocalRegion>,
        remote: impl Fn(&Arc<dyn RemoteRegion>) -> Arc<dyn RemoteRegion>,
    ) -> BoundPlan {
        let ours = |side: &LocalSide| LocalSide {
            memory: Arc::clone(&side.memory),
            region: local(&side.region),
            ..*side
        };
        let theirs = |side: &RemoteSide| RemoteSide { region: remote(&side.region), ..*side };
        BoundPlan {
            pairs: Arc::clone(&self.pairs),
            locals: self.locals.iter().map(ours).collect(),
            remotes: self.remotes.iter().map(theirs).collect(),
            native: OnceLock::new(),
            making: Mutex::new(()),
            ..*self
        }
    }

    /// A value of the transport for this plan on this link, made at the first call and kept until the link closes
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

impl fmt::Debug for BoundPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bound({} {} blocks, {} bytes)", self.op, self.size.blocks, self.size.bytes)
    }
}

/// A plan keeps what it is bound to, so that posting it again need not bind it again.
pub(crate) trait KeepsBound: Send + Sync {
    /// The link that carried it last, and the plan on that link.
    fn kept(&self) -> &Mutex<Option<(LinkId, Arc<BoundPlan>)>>;
}

/// Plans that are bound to a link, or name a region, so that its end can drop their bindings.
#[derive(Default)]
pub(crate) struct Bindings(Vec<Weak<dyn KeepsBound>>);

impl Bindings {
    pub(crate) fn add(&mut self, plan: Weak<dyn KeepsBound>) {
        if self.0.len() == self.0.capacity() {
            self.0.retain(|plan| plan.strong_count() > 0);
        }
        self.0.push(plan);
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
            let bound = plan.kept().lock().take_if(|(on, _)| gone(*on));
            released.push(Released { _bound: bound, _plan: plan });
        }
        released
    }
}

/// A binding that a closed link has let go.
pub(crate) struct Released {
    _bound: Option<(LinkId, Arc<BoundPlan>)>,
    _plan: Arc<dyn KeepsBound>,
}
