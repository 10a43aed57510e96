//! Copies of device caches in host memory, which peers read and write instead (`kv_buffer_device:
//! cpu`).
//!
//! Blocks of a request are copied to the host before any peer learns of them: some as soon as the
//! engine reports them as computed, the rest when the request ends. Loaded blocks are copied to the
//! device before the engine learns of them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvx_core::backend::Direction;
use kvx_core::backend::sync::Mutex;
use kvx_core::{Deadline, Error, ErrorKind, Memory, Result};

use kvx_vllm::engine::{BlockLists, Unsaved};
use kvx_vllm::mapping::Caches;

/// The time limit for the copies of a request. A device that takes longer hangs.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// The caches of a worker, and their copies in host memory.
#[derive(Debug)]
pub(super) struct HostCopies {
    /// The caches as the engine registered them.
    caches: Caches,
    pools: Vec<CopiedPool>,
    /// Blocks whose copy to the host is done or ordered, by group.
    saved: Mutex<HashMap<(u32, u32), SavedBlock>>,
    /// Serializes copies, so that a later copy is newer.
    copying: tokio::sync::Mutex<()>,
    /// Set when copying has stopped for good, because the device may still execute an old copy.
    broken: OnceLock<String>,
}

/// Memory on a device, and its copy on the host.
#[derive(Debug)]
struct CopiedPool {
    device: Arc<Memory>,
    host: Arc<Memory>,
}

/// Identifies the contents of a block that were ordered.
#[derive(Debug, PartialEq)]
struct SavedBlock {
    /// The number of the request.
    of: u64,
    /// The place of the block in the request.
    place: u32,
    done: bool,
}

/// When blocks of a request are copied to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SavePoint {
    /// Before the request ends. Skips blocks that another request was given meanwhile.
    Early,
    /// When the request ends. Copies all its blocks.
    AtEnd,
}

impl HostCopies {
    /// Allocates copies for the part of these caches that lies on devices. Returns them with the
    /// caches and the memory that peers see, or `None` if nothing lies on a device. Errors: the
    /// host does not have enough memory.
    pub(super) fn new(
        caches: &Caches,
        memory: &[Arc<Memory>],
    ) -> Result<Option<(Self, Caches, Vec<Arc<Memory>>)>> {
        let (mut pools, mut seen) = (Vec::new(), Vec::new());
        for device in memory {
            let Some(access) = device.device_access() else {
                seen.push(Arc::clone(device));
                continue;
            };
            let host = access.pinned(device.len()).map_err(|error| {
                Error::new(
                    error.kind(),
                    format!(
                        "kv_buffer_device is cpu, and the host cannot pin {} bytes for a copy of \
                         this pool: {}; with \"backends\": [\"TCP\"] small buffers are enough",
                        device.len(),
                        error.sentence()
                    ),
                )
            })?;
            let pool = CopiedPool { device: Arc::clone(device), host: Arc::new(host) };
            seen.push(Arc::clone(&pool.host));
            pools.push(pool);
        }
        if pools.is_empty() {
            return Ok(None);
        }
        let bytes: usize = pools.iter().map(|pool| pool.host.len()).sum();
        tracing::info!(
            bytes,
            "kv_buffer_device is cpu: peers see a copy of the caches in host memory"
        );
        let on_the_host =
            |base| pools.iter().find_map(|pool| pool.on_the_host(base)).unwrap_or(base);
        let of_host = caches.in_host_memory(on_the_host);
        let (saved, copying, broken) =
            (Mutex::default(), tokio::sync::Mutex::default(), OnceLock::new());
        Ok(Some((
            HostCopies { caches: caches.clone(), pools, saved, copying, broken },
            of_host,
            seen,
        )))
    }

    /// Records blocks that are to be saved.
    pub(super) fn order(&self, of: u64, blocks: &[Unsaved]) {
        let mut saved = self.saved.lock();
        for block in blocks {
            let known = saved.get(&block.key());
            if known.is_none_or(|known| (known.of, known.place) != (of, block.place)) {
                saved.insert(block.key(), SavedBlock { of, place: block.place, done: false });
            }
        }
    }

    /// Copies ordered blocks to the host. Blocks the thread.
    pub(super) fn save(&self, of: u64, blocks: &[Unsaved], when: SavePoint) -> Result<()> {
        let _one_at_a_time = self.copying.blocking_lock();
        let is_wanted = {
            let saved = self.saved.lock();
            blocks
                .iter()
                .map(|block| match saved.get(&block.key()) {
                    Some(known) if (known.of, known.place) == (of, block.place) => !known.done,
                    Some(_) => when == SavePoint::AtEnd,
                    None => false, // a load fills the block now, so its old contents are not wanted
                })
                .collect::<Vec<_>>()
        };
        let wanted: Vec<_> =
            blocks.iter().zip(is_wanted).filter_map(|(block, is)| is.then_some(*block)).collect();
        self.copy(Direction::ToHost, wanted.iter().map(|block| block.key()))?;
        let mut saved = self.saved.lock();
        for block in wanted {
            if let Some(known) = saved.get_mut(&block.key())
                && (known.of, known.place) == (of, block.place)
            {
                known.done = true;
            }
        }
        Ok(())
    }

    /// Forgets ordered copies of these blocks, because others write them from now on.
    pub(super) fn forget(&self, blocks: &BlockLists) {
        let mut saved = self.saved.lock();
        for key in keys(blocks) {
            saved.remove(&key);
        }
    }

    /// Blocks until all copies have ended that were ordered before [`forget`](Self::forget).
    pub(super) fn wait_until_idle(&self) {
        drop(self.copying.blocking_lock());
    }

    /// Waits until all copies have ended that were ordered before. Errors: `TimedOut` at the
    /// deadline; `StillShared` if one may never end.
    pub(super) async fn idle(&self, deadline: Deadline) -> Result<()> {
        match tokio::time::timeout(deadline.left(), self.copying.lock()).await {
            Ok(_) => self.check(),
            Err(_) => {
                Err(ErrorKind::TimedOut.because("the blocks were still being copied to the host"))
            }
        }
    }

    /// Checks that copying has not stopped for good. Errors: `StillShared` if a copy may never end.
    pub(super) fn check(&self) -> Result<()> {
        let why = |why: &String| {
            let why = format!("copies between host and device have stopped for good: {why}");
            Err(ErrorKind::StillShared.because(why))
        };
        self.broken.get().map_or(Ok(()), why)
    }

    /// Copies loaded blocks to the device. Blocks the thread.
    pub(super) fn fill(&self, blocks: &BlockLists) -> Result<()> {
        self.copy(Direction::ToDevice, keys(blocks))
    }

    fn copy(&self, direction: Direction, blocks: impl Iterator<Item = (u32, u32)>) -> Result<()> {
        self.check()?;
        let geometry = self.caches.geometry();
        let each = geometry.kernel_per_logical();
        let places = geometry.regions().iter().filter_map(|region| {
            let at = self.pools.iter().position(|pool| pool.on_the_host(region.base).is_some())?;
            Some((region, at, region.base - self.pools[at].device.address()))
        });
        let places: Vec<_> = places.collect();
        let mut ranges = vec![Vec::new(); self.pools.len()];
        for (group, block) in blocks {
            for (region, pool, offset) in
                places.iter().filter(|(region, ..)| geometry.covers(region, group))
            {
                for kernel in 0..each {
                    let from = (offset + region.grid().offset(block * each + kernel)) as usize;
                    ranges[*pool].push(from..from + region.block_len as usize);
                }
            }
        }
        for (pool, ranges) in self.pools.iter().zip(ranges) {
            let copied = pool.device.exchange(direction, &pool.host, &merged(ranges), LIMIT);
            copied.inspect_err(|error| {
                if may_go_on(error) {
                    self.broken.set(error.sentence().to_owned()).ok(); // keep the first reason
                }
            })?;
        }
        Ok(())
    }
}

/// Returns whether a failed copy may still touch its memory.
pub(super) fn may_go_on(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Forgotten)
}

impl CopiedPool {
    /// Returns the host address for a device address, if it lies in this pool.
    fn on_the_host(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.device.address())?;
        (offset < self.device.len() as u64).then(|| self.host.address() + offset)
    }
}

fn keys(blocks: &BlockLists) -> impl Iterator<Item = (u32, u32)> {
    let groups = (0..).zip(blocks.groups());
    groups.flat_map(|(group, list)| list.iter().map(move |block| (group, *block)))
}

/// Merges ranges that touch.
fn merged(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use kvx_core::MemoryKind;
    use kvx_testkit::TestDevice;
    use kvx_testkit::device::CopyOutcome;

    use super::*;
    use kvx_vllm::mapping::{Heads, KvLayout, LayerCache};

    const BLOCKS: u32 = 8;
    const LEN: usize = 64;

    fn caches(at: &Memory) -> Caches {
        let layer = |layer: u64| {
            let from = at.address() + layer * u64::from(BLOCKS) * LEN as u64;
            LayerCache::packed(
                format!("layers.{layer}"),
                from,
                BLOCKS,
                LEN as u64,
                Heads::Sharded(4),
            )
        };
        Caches::of_layers(vec![layer(0), layer(1)], KvLayout::Lbhnc, 16, 1, 0).unwrap()
    }

    fn copies() -> (Arc<TestDevice>, Arc<Memory>, HostCopies) {
        let device = TestDevice::new(MemoryKind::Cuda);
        let pool = Arc::new(device.allocate(2 * BLOCKS as usize * LEN));
        let (copies, seen, memory) =
            HostCopies::new(&caches(&pool), std::slice::from_ref(&pool)).unwrap().unwrap();
        assert_eq!(seen, caches(&memory[0]));
        (device, pool, copies)
    }

    fn block(block: u32, place: u32) -> Unsaved {
        Unsaved { group: 0, block, place }
    }

    fn on_the_host(copies: &HostCopies, at: u32) -> [u8; 2] {
        [0, 1].map(|layer| {
            let mut byte = [0];
            let at = (layer * BLOCKS + at) as usize * LEN + LEN - 1;
            copies.pools[0].host.copy_out(at, &mut byte).unwrap();
            byte[0]
        })
    }

    fn compute(pool: &Memory, block: u32, value: u8) {
        for layer in 0..2 {
            pool.copy_in((layer * BLOCKS + block) as usize * LEN, &[value; LEN]).unwrap();
        }
    }

    #[test]
    fn forgotten_blocks_are_not_copied() {
        let (_device, pool, copies) = copies();
        (0..BLOCKS).for_each(|block| compute(&pool, block, 7));
        copies.order(1, &[block(2, 0), block(3, 1)]);
        copies.forget(&lists(3));
        copies.save(1, &[block(2, 0), block(3, 1)], SavePoint::Early).unwrap();
        assert_eq!((on_the_host(&copies, 2), on_the_host(&copies, 3)), ([7; 2], [0; 2]));
    }

    /// At its end a request waits for its own blocks, even if another request has them too.
    #[test]
    fn a_request_that_ends_has_all_its_blocks_copied_though_another_is_about_to() {
        let (_device, pool, copies) = copies();
        compute(&pool, 2, 7);
        copies.order(1, &[block(2, 0)]);
        copies.order(2, &[block(2, 0)]);
        copies.save(1, &[block(2, 0)], SavePoint::AtEnd).unwrap();
        assert_eq!(on_the_host(&copies, 2), [7; 2]);
        // The other request's copy is not done.
        compute(&pool, 2, 8);
        copies.save(2, &[block(2, 0)], SavePoint::Early).unwrap();
        assert_eq!(on_the_host(&copies, 2), [8; 2]);
    }

    /// The request was abandoned, and a load may be filling the copies.
    #[test]
    fn an_abandoned_request_copies_nothing_at_its_end() {
        let (_device, pool, copies) = copies();
        compute(&pool, 2, 7);
        copies.order(1, &[block(2, 0)]);
        copies.forget(&lists(2));
        copies.save(1, &[block(2, 0)], SavePoint::AtEnd).unwrap();
        assert_eq!(on_the_host(&copies, 2), [0; 2]);
    }

    #[test]
    fn a_copy_that_may_go_on_for_ever_is_the_last() {
        let (device, pool, copies) = copies();
        compute(&pool, 2, 7);
        copies.order(1, &[block(2, 0), block(3, 1)]);
        device.next([CopyOutcome::Forget]);
        let forgotten = copies.save(1, &[block(2, 0)], SavePoint::Early).unwrap_err();
        assert_eq!(forgotten.kind(), ErrorKind::Forgotten, "{forgotten}");
        let before = device.counters().copies;
        for later in [copies.save(1, &[block(3, 1)], SavePoint::AtEnd), copies.fill(&lists(4))] {
            // Both fail before they start.
            let later = later.unwrap_err();
            assert_eq!(later.kind(), ErrorKind::StillShared, "{later}");
            assert!(later.sentence().contains(forgotten.sentence()), "{later}");
        }
        assert_eq!(device.counters().copies, before);
    }

    fn lists(block: u32) -> BlockLists {
        BlockLists::single(vec![block])
    }

    #[test]
    fn only_loaded_blocks_are_copied_to_the_device() {
        let (_device, pool, copies) = copies();
        (0..BLOCKS).for_each(|block| compute(&pool, block, 7));
        copies.fill(&BlockLists::single(vec![5, 1, 2])).unwrap();
        let mut bytes = vec![0; pool.len()];
        pool.copy_out(0, &mut bytes).unwrap();
        for (at, block) in bytes.chunks(LEN).enumerate() {
            let loaded = [1, 2, 5].contains(&(at as u32 % BLOCKS));
            assert!(block.iter().all(|byte| *byte == if loaded { 0 } else { 7 }), "{at}");
        }
    }

    #[test]
    fn ranges_that_touch_are_one() {
        let ranges: [Range<usize>; 5] = [8..12, 0..4, 4..8, 20..24, 22..30];
        assert_eq!(merged(ranges.to_vec()), [0..12, 20..30]);
    }
}
