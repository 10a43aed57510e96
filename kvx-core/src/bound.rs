//! Plans bound to a link, which transports work from.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use crate::grid::{Grid, Indices};
use crate::identity::{LinkId, RegionKey};
use crate::operation::{Op, Size};
use crate::sync::Mutex;
use crate::transport::{LocalRegion, RemoteRegion};
use crate::{Memory, RegionId, Result};

/// A grid of one side, and the region of the plan that it lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedGrid {
    /// The position in [`BoundPlan::locals`] or [`BoundPlan::remotes`].
    pub region: u32,
    /// The grid.
    pub grid: Grid,
}

/// A pair of a plan: two grid sets with equally many grids, and two index lists of equal length.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The local grids, in order.
    pub local: Arc<[PlacedGrid]>,
    /// The remote grids. Grid `i` pairs with local grid `i` and has the same block length.
    pub remote: Arc<[PlacedGrid]>,
    /// The local blocks.
    pub local_indices: Indices,
    /// The remote blocks: entry `i` pairs with local entry `i`.
    pub remote_indices: Indices,
}

/// A plan bound to the link that its route chose, which the transport works from.
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
    /// The region's number.
    pub id: RegionId,
    /// The region's key, to present to a peer that reads the region on request.
    pub key: RegionKey,
    /// The region's memory, which the bound plan keeps alive.
    pub memory: Arc<Memory>,
    /// The region's registration with the transport.
    pub region: Arc<dyn LocalRegion>,
}

/// A peer's region of a bound plan.
pub struct RemoteSide {
    /// The region's number at the peer.
    pub id: RegionId,
    /// The region's key.
    pub key: RegionKey,
    /// The region's length in bytes.
    pub len: u64,
    /// The region as the link has imported it.
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

    /// Returns the operation.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Returns the link that the plan is bound to.
    pub fn link(&self) -> LinkId {
        self.link
    }

    /// Returns the pairs, for prepared lists and compact wire formats.
    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// Returns the number of bytes, blocks and segments.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Returns the local region that a [`PlacedGrid`] or a segment refers to.
    pub fn local(&self, region: u32) -> &LocalSide {
        &self.locals[region as usize]
    }

    /// Returns the remote region that a [`PlacedGrid`] or a segment refers to.
    pub fn remote(&self, region: u32) -> &RemoteSide {
        &self.remotes[region as usize]
    }

    /// Returns all local regions.
    pub fn locals(&self) -> &[LocalSide] {
        &self.locals
    }

    /// Returns all remote regions.
    pub fn remotes(&self) -> &[RemoteSide] {
        &self.remotes
    }

    /// Returns the same plan with other handles to its regions. A transport that wraps another one
    /// uses it to pass on the regions that the inner transport created;
    /// [`native`](BoundPlan::native) can keep the result.
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

    /// Returns a value that the transport keeps for this plan on this link. The first call creates
    /// it with `make`; it lives until the link closes or the plan is dropped. Call it on the
    /// reactor, because `make` may take long.
    ///
    /// # Errors
    /// The error of `make`.
    ///
    /// # Panics
    /// If called with two types on one link.
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

/// A plan that keeps its binding, so that it need not be bound again for the next post.
pub(crate) trait KeepsBound: Send + Sync {
    /// Returns the link that carried the plan last, and the plan bound to it.
    fn kept(&self) -> &Mutex<Option<(LinkId, Arc<BoundPlan>)>>;
}

/// The plans that are bound to a link or use a region, so that its end can drop their bindings.
#[derive(Default)]
pub(crate) struct Bindings(Vec<Weak<dyn KeepsBound>>);

impl Bindings {
    pub(crate) fn add(&mut self, plan: Weak<dyn KeepsBound>) {
        if self.0.len() == self.0.capacity() {
            self.0.retain(|plan| plan.strong_count() > 0);
        }
        self.0.push(plan);
    }

    /// Removes the bindings to `link` from their plans. The caller drops the returned bindings
    /// without holding locks.
    pub(crate) fn release(&mut self, link: LinkId) -> Vec<Released> {
        self.release_if(|on| on == link)
    }

    /// Removes all bindings from their plans, like [`release`](Bindings::release).
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

/// A binding that was removed from its plan.
pub(crate) struct Released {
    _bound: Option<(LinkId, Arc<BoundPlan>)>,
    _plan: Arc<dyn KeepsBound>,
}
