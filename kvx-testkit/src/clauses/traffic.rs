//! Transfers between one region at each end, compared byte by byte: they show a clause whether a
//! link works.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvx_core::backend::{Metadata, RegionInfo};
use kvx_core::{Capabilities, Grid, Memory, Op, Peer, Place as _, Plan, Region, Transfer};

use crate::check::{CUT_OFF, Check, Failure, ensure};
use crate::far::FarEnd;
use crate::pattern::{bytes, checksum, fill};
use crate::setup::AgentPair;
use crate::stopwatch::Stopwatch;

/// Both operations.
pub(crate) const OPS: [Op; 2] = [Op::Read, Op::Write];
/// How late an answer that is promised for a point in time may be.
pub(crate) const GRACE: Duration = Duration::from_millis(100);
/// The length of a block in bytes.
const BLOCK: u64 = 4096;

/// A region in this process, and one of the same length and name at the far end.
pub(crate) struct Traffic {
    pub(crate) name: String,
    pub(crate) near: Region,
    /// The region's number at the far end.
    pub(crate) far: usize,
}

impl Traffic {
    /// Registers both regions.
    pub(crate) fn new(pair: &mut AgentPair, name: &str, len: usize) -> Result<Self, Failure> {
        let near = pair.near_region(name, len, 1)?;
        let far = pair.far_region(name, len, 2)?;
        Ok(Traffic { name: name.to_owned(), near, far })
    }

    /// Returns a seed that no other call has returned.
    pub(crate) fn seed() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1000);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Plans a transfer of all blocks, in reverse order on both sides, so that nothing is merged.
    pub(crate) fn plan(&self, op: Op, peer: &Peer) -> kvx_core::Result<Plan> {
        let count = (self.near.len() / BLOCK) as u32;
        let grid = Grid::packed(BLOCK, count);
        let local: Vec<u32> = (0..count).rev().collect();
        let remote: Vec<u32> = (0..count).rev().collect();
        Plan::of(
            op,
            [(
                self.near.grid(grid)?.blocks(local),
                peer.region(&self.name)?.grid(grid)?.blocks(remote),
            )],
        )
    }

    /// Posts a transfer of all blocks.
    pub(crate) fn post(
        &self,
        op: Op,
        peer: &Peer,
        deadline: Duration,
    ) -> kvx_core::Result<Transfer> {
        peer.transfer(&self.plan(op, peer)?).deadline(deadline).post()
    }

    /// Posts a transfer of all blocks and waits.
    pub(crate) async fn run(
        &self,
        op: Op,
        peer: &Peer,
        deadline: Duration,
    ) -> kvx_core::Result<()> {
        self.post(op, peer, deadline)?.await.map(|_| ())
    }

    /// Fails unless the local region contains content `seed`.
    pub(crate) fn check_near(&self, seed: u64, when: &str) -> Check {
        let mut content = vec![0; self.near.len() as usize];
        self.near.copy_out(0, &mut content)?;
        let wanted = bytes(seed, 0, content.len());
        let differ = || {
            content
                .iter()
                .zip(&wanted)
                .enumerate()
                .filter(|(_, (is, wanted))| is != wanted)
                .map(|(at, _)| at)
        };
        match differ().next() {
            None => Ok(()),
            Some(first) => Err(Failure::new(format!(
                "{when}: {} bytes of the local region are wrong, the first of them at {first}",
                differ().count()
            ))),
        }
    }

    /// Fails unless the region at the far end contains content `seed`.
    pub(crate) fn check_far(&self, far: &mut FarEnd, seed: u64, when: &str) -> Check {
        let wanted = checksum(&bytes(seed, 0, self.near.len() as usize));
        ensure!(far.sum(self.far)? == wanted, "{when}: the remote region contains wrong bytes");
        Ok(())
    }

    /// Fills the region at the far end with new content and returns its seed.
    pub(crate) fn fill_far(&self, far: &mut FarEnd) -> Result<u64, Failure> {
        let seed = Self::seed();
        far.fill(self.far, seed)?;
        Ok(seed)
    }

    /// Fills the local region with new content and returns its seed.
    pub(crate) fn fill_near(&self) -> Result<u64, Failure> {
        let seed = Self::seed();
        fill(self.near.memory(), seed)?;
        Ok(seed)
    }

    /// Reads and writes over `peer`, and compares every byte.
    pub(crate) async fn works(&self, far: &mut FarEnd, peer: &Peer, when: &str) -> Check {
        let said = |error| Failure::new(format!("{when}: {error:?}"));
        let seed = self.fill_far(far)?;
        self.run(Op::Read, peer, CUT_OFF).await.map_err(said)?;
        self.check_near(seed, when)?;
        let seed = self.fill_near()?;
        self.run(Op::Write, peer, CUT_OFF).await.map_err(said)?;
        self.check_far(far, seed, when)
    }
}

/// Moves all bytes of two regions of this process both ways over `peer`, and compares them.
pub(crate) async fn exchange(near: &Region, far: &Region, peer: &Peer, when: &str) -> Check {
    let count = (near.len() / BLOCK) as u32;
    let grid = Grid::packed(BLOCK, count);
    let order: Vec<u32> = (0..count).rev().collect();
    for op in OPS {
        let (seed, other) = (Traffic::seed(), Traffic::seed());
        let (from, to) = if op == Op::Read { (far, near) } else { (near, far) };
        fill(from.memory(), seed)?;
        fill(to.memory(), other)?;
        let remote = peer.region(far.name())?.grid(grid)?.blocks(order.clone());
        let plan = Plan::of(op, [(near.grid(grid)?.blocks(order.clone()), remote)])?;
        let result = peer.transfer(&plan).deadline(CUT_OFF).post()?.await;
        ensure!(result.is_ok(), "{when}: {op}: {result:?}");
        for region in [from, to] {
            let mut content = vec![0; region.len() as usize];
            region.copy_out(0, &mut content)?;
            ensure!(
                content == bytes(seed, 0, content.len()),
                "{when}: a {op} left wrong bytes in {}",
                region.name()
            );
        }
    }
    Ok(())
}

/// Returns the capabilities of the link to a peer, which may promise more than those of its
/// backend.
pub(crate) fn promised_by(peer: &Peer) -> Result<Arc<Capabilities>, Failure> {
    peer.capabilities().ok_or_else(|| Failure::new("the link is up, but has no capabilities"))
}

/// Returns whether the memory still exists.
pub(crate) fn is_kept(memory: &Weak<Memory>) -> bool {
    memory.strong_count() > 0
}

/// Returns metadata with a changed description of one region.
pub(crate) fn altered_region(
    metadata: &[u8],
    name: &str,
    change: impl FnOnce(&mut RegionInfo),
) -> Result<Vec<u8>, Failure> {
    let mut metadata = Metadata::decode(metadata)?;
    let region = metadata.regions.iter_mut().find(|region| *region.name == *name);
    let region =
        region.ok_or_else(|| Failure::new(format!("the metadata has no region {name:?}")))?;
    change(Arc::make_mut(region));
    Ok(metadata.encode()?)
}

/// Returns the result of a future, if it has one now.
pub(crate) fn now<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// Polls until `condition` holds, where there is no future to await. Time in which the machine
/// stalls does not count.
pub(crate) fn until(
    what: &str,
    patience: Duration,
    mut condition: impl FnMut() -> Result<bool, Failure>,
) -> Check {
    let watch = Stopwatch::start()?;
    while !condition()? {
        let took = watch.read();
        ensure!(took.within(patience), "{what}: not true within {patience:?}, after {took}");
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Checks for a while that `condition` stays true, because there is no other way to see that
/// something does not happen.
pub(crate) fn stays(
    what: &str,
    time: Duration,
    mut condition: impl FnMut() -> Result<bool, Failure>,
) -> Check {
    let end = Instant::now() + time;
    while Instant::now() < end {
        ensure!(condition()?, "{what}: no longer true");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
