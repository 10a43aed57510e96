//! Plans: the blocks to move, checked once and posted as often as wanted.

use std::fmt;
use std::sync::Arc;

use crate::bound::{BoundPlan, KeepsBound, Pair, PlacedGrid};
use crate::fault_injection::injected;
use crate::grid::{Blocks, Grid, Place};
use crate::identity::{Identity, LinkId};
use crate::memory::read_only;
use crate::operation::{Op, Size};
use crate::overlap::{self, Destination};
use crate::region::{PeerRegion, Region};
use crate::sync::Mutex;
use crate::{ErrorKind, MemoryKind, Result, fork};

/// Pairs of local and remote blocks, checked once and immutable. Cheap to clone, and can be posted
/// any number of times.
///
/// A plan names one operation, one incarnation of a peer, and one kind of memory per side, but no
/// backend: the route is chosen when the plan is posted. Block `i` of the local index list pairs
/// with block `i` of the remote one, in every grid of the set.
#[derive(Clone)]
pub struct Plan(pub(crate) Arc<PlanInner>);

pub(crate) struct PlanInner {
    pub(crate) op: Op,
    pub(crate) peer: Identity,
    pub(crate) pairs: Arc<[Pair]>,
    pub(crate) locals: Vec<Region>,
    pub(crate) remotes: Vec<PeerRegion>,
    pub(crate) size: Size,
    /// The binding to the link that carried the plan last. The plan holds it, and the link drops it
    /// when it closes.
    pub(crate) bound: Mutex<Option<(LinkId, Arc<BoundPlan>)>>,
}

impl KeepsBound for PlanInner {
    fn kept(&self) -> &Mutex<Option<(LinkId, Arc<BoundPlan>)>> {
        &self.bound
    }
}

impl Drop for PlanInner {
    fn drop(&mut self) {
        if fork::check().is_err() {
            // A forked child must not drop anything that belongs to a transport.
            std::mem::forget(self.bound.get_mut().take());
        }
    }
}

impl Plan {
    /// Creates a plan that reads `remote` into `local`.
    ///
    /// # Errors
    /// - `Invalid` if the two sides differ in number of grids, block length or number of indices,
    ///   or if one side mixes agents, peers or kinds of memory.
    /// - `OutOfBounds` for an index beyond its grid.
    /// - `Overlap` if two destinations overlap.
    /// - `PermissionDenied` if a destination is read-only.
    /// - `Forked`.
    pub fn read(local: Blocks<Region>, remote: Blocks<PeerRegion>) -> Result<Plan> {
        Plan::of(Op::Read, [(local, remote)])
    }

    /// Creates a plan that writes `local` into `remote`.
    ///
    /// # Errors
    /// As [`read`](Plan::read).
    pub fn write(local: Blocks<Region>, remote: Blocks<PeerRegion>) -> Result<Plan> {
        Plan::of(Op::Write, [(local, remote)])
    }

    /// Creates a plan of several pairs. At least one is required, and its index lists may be empty.
    ///
    /// # Errors
    /// As [`read`](Plan::read); `Invalid` without a pair.
    pub fn of(
        op: Op,
        pairs: impl IntoIterator<Item = (Blocks<Region>, Blocks<PeerRegion>)>,
    ) -> Result<Plan> {
        fork::check()?;
        let mut build = Build::default();
        for (local, remote) in pairs {
            build.pair(local, remote)?;
        }
        let Some(peer) = build.remotes.first().map(|region: &PeerRegion| region.peer().clone())
        else {
            return Err(ErrorKind::Invalid
                .because("a plan of no pairs: name at least one, its index lists may be empty"));
        };
        if let Some(other) = build.remotes.iter().find(|region| *region.peer() != peer) {
            return Err(ErrorKind::Invalid.because(format!(
                "one plan for two peers, {peer:?} and {:?}: make a plan for each",
                other.peer()
            )));
        }
        one_kind("local", build.locals.iter().map(Place::kind))?;
        one_kind("remote", build.remotes.iter().map(Place::kind))?;
        match op {
            Op::Read => writable("local", &build.locals)?,
            Op::Write => writable("remote", &build.remotes)?,
        }
        if build.locals.iter().any(|region| !region.same_agent(&build.locals[0])) {
            return Err(ErrorKind::Invalid
                .because("the local regions of a plan belong to different agents"));
        }
        build.check_destinations(op)?;
        let Build { pairs, locals, remotes, size } = build;
        let inner = PlanInner {
            op,
            peer,
            pairs: pairs.into(),
            locals,
            remotes,
            size,
            bound: Mutex::default(),
        };
        Ok(Plan(Arc::new(inner)))
    }

    /// Returns the operation.
    pub fn op(&self) -> Op {
        self.0.op
    }

    /// Returns the amount that the plan moves.
    pub fn size(&self) -> Size {
        self.0.size
    }

    /// Returns the peer that the plan is for.
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
        Some(other) => Err(ErrorKind::Invalid.because(format!(
            "the {side} side of a plan mixes {} and {other} memory: make a plan for each",
            first.unwrap_or(MemoryKind::Host)
        ))),
    }
}

/// Checks that the destinations are writable.
///
/// # Errors
/// `PermissionDenied` if one is read-only.
fn writable(side: &str, written: &[impl Place]) -> Result<()> {
    match written.iter().any(Place::is_read_only) && !injected("read-only") {
        true => Err(read_only(&format!("a {side} region of the plan"))),
        false => Ok(()),
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
            return Err(ErrorKind::Invalid.because(format!(
                "a pair of {} local and {} remote grids: they pair one to one",
                ours.len(),
                theirs.len()
            )));
        }
        if let Some(((_, a), (_, b))) =
            ours.iter().zip(theirs).find(|((_, a), (_, b))| a.length != b.length)
        {
            return Err(ErrorKind::Invalid.because(format!(
                "a local block of {} bytes pairs with a remote one of {}: they must be equal",
                a.length, b.length
            )));
        }
        if local.indices.len() != remote.indices.len() {
            return Err(ErrorKind::Invalid.because(format!(
                "{} local and {} remote indices: they pair one to one",
                local.indices.len(),
                remote.indices.len()
            )));
        }
        for (side, indices, count) in [
            ("local", &local.indices, local.set.count()),
            ("remote", &remote.indices, remote.set.count()),
        ] {
            if let Some(max) = indices.max()
                && max >= count
            {
                return Err(ErrorKind::OutOfBounds.because(format!(
                    "the {side} index {max} lies beyond a grid of {count} blocks"
                )));
            }
        }
        let blocks = local.indices.len() as u64;
        let runs = overlap::runs(&local.indices, &remote.indices);
        for ((_, a), (_, b)) in ours.iter().zip(theirs) {
            self.size.bytes += blocks * a.length;
            self.size.blocks += blocks;
            self.size.segments += if a.is_packed() && b.is_packed() { runs } else { blocks };
        }
        self.size.description += local.indices.bytes()
            + remote.indices.bytes()
            + 2 * size_of::<PlacedGrid>() * ours.len();
        let place_local =
            ours.iter().map(|(region, grid)| place(&mut self.locals, region, *grid)).collect();
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
        if injected("overlap") {
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
                targets.push(Destination { space, base, grid: placed.grid, indices });
            }
        }
        overlap::check(&targets)
    }
}

fn place<R: Place + Clone>(regions: &mut Vec<R>, region: &R, grid: Grid) -> PlacedGrid {
    let known = regions.iter().position(|other| other.is(region));
    let region = known.unwrap_or_else(|| {
        regions.push(region.clone());
        regions.len() - 1
    });
    PlacedGrid { region: region as u32, grid }
}
