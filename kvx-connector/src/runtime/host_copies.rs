//! Copies of caches on devices in memory of the host, which peers read and write in their place
//! (`kv_buffer_device: cpu`).
//!
//! Blocks of a request are copied to the host before any peer learns of them: as the engine says
//! that they are computed, and the rest when the request ends. Loaded blocks are copied to the
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

/// How long copies of a request may take. A device that takes longer hangs.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// The caches of a worker, and their copies in host memory.
#[derive(Debug)]
pub(super) struct HostCopies {
    /// As the engine gave them.
    caches: Caches,
    pools: Vec<CopiedPool>,
    /// Blocks whose contents are on the host, or were ordered to be, by group.
    saved: Mutex<HashMap<(u32, u32), SavedBlock>>,
    /// One after the other: what is copied later is newer.
    copying: tokio::sync::Mutex<()>,
    /// Set when no copy is made any more: the device may still execute an old one.
    broken: OnceLock<String>,
}

/// Memory on a device, and as much on the host.
#[derive(Debug)]
struct CopiedPool {
    device: Arc<Memory>,
    host: Arc<Memory>,
}

/// Which contents of a block were ordered.
#[derive(Debug, PartialEq)]
struct SavedBlock {
    /// Of which request.
    of: u64,
    /// The place of the block in it.
    place: u32,
    done: bool,
}

/// When blocks of a request are copied to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SavePoint {
    /// Before the request ends: not what another request was given meanwhile.
    Early,
    /// As the request ends, which has all of it.
    AtEnd,
}

impl HostCopies {
    /// Of the part of these caches that lies on devices, with the caches and the memory that peers
    /// see. `None`: nothing lies on a device. Errors: there is not as much memory of the host.
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
                        "kv_buffer_device is cpu, and the host has no {} bytes for a copy of this pool: {}; with \
                         \"backends\": [\"TCP\"] small buffers are enough",
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
            "kv_buffer_device is cpu: peers see a copy of the caches in memory of the host"
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

    /// Notes blocks that are to be saved.
    pub(super) fn order(&self, of: u64, blocks: &[Unsaved]) {
        let mut saved = self.saved.lock();
        for block in blocks {
            let known = saved.get(&block.key());
            if known.is_none_or(|known| (known.of, known.place) != (of, block.place)) {
                saved.insert(block.key(), SavedBlock { of, place: block.place, done: false });
            }
        }
    }

    /// Copies blocks that were ordered to the host. Blocks.
    pub(super) fn save(&self, of: u64, blocks: &[Unsaved], when: SavePoint) -> Result<()> {
        let _one_at_a_time = self.copying.blocking_lock();
        let is_wanted = {
            let saved = self.saved.lock();
            blocks
                .iter()
                .map(|block| match saved.get(&block.key()) {
                    Some(known) if (known.of, known.place) == (of, block.place) => !known.done,
                    Some(_) => when == SavePoint::AtEnd,
                    None => false, // a load has it now: nobody waits for this any more
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

    /// Others write these blocks from now on: what was ordered of them is not done any more.
    pub(super) fn forget(&self, blocks: &BlockLists) {
        let mut saved = self.saved.lock();
        for key in keys(blocks) {
            saved.remove(&key);
        }
    }

    /// Waits until nothing writes to the copies that was ordered before [`forget`](Self::forget).
    /// Blocks.
    pub(super) fn wait_until_idle(&self) {
        drop(self.copying.blocking_lock());
    }

    /// Ends when no copy is under way that was ordered before. Errors: not by the deadline, or
    /// perhaps never.
    pub(super) async fn idle(&self, deadline: Deadline) -> Result<()> {
        match tokio::time::timeout(deadline.left(), self.copying.lock()).await {
            Ok(_) => self.check(),
            Err(_) => Err(Error::new(
                ErrorKind::TimedOut,
                "the blocks were still being copied to the host",
            )),
        }
    }

    /// Errors: a copy may go on for ever.
    pub(super) fn check(&self) -> Result<()> {
        let why = |why: &String| {
            let why = format!("nothing is copied between the host and the device any more: {why}");
            Err(Error::new(ErrorKind::StillShared, why))
        };
        self.broken.get().map_or(Ok(()), why)
    }

    /// Copies loaded blocks to the device. Blocks.
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
                    self.broken.set(error.sentence().to_owned()).ok(); // the first reason counts
                }
            })?;
        }
        Ok(())
    }
}

/// Returns whether a copy that has failed may still touch its memory.
pub(super) fn may_go_on(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Forgotten)
}

impl CopiedPool {
    /// Where the host has what is at this address of the device, if it lies in this pool.
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
    fn nothing_that_was_forgotten_is_copied() {
        let (_device, pool, copies) = copies();
        (0..BLOCKS).for_each(|block| compute(&pool, block, 7));
        copies.order(1, &[block(2, 0), block(3, 1)]);
        copies.forget(&lists(3));
        copies.save(1, &[block(2, 0), block(3, 1)], SavePoint::Early).unwrap();
        assert_eq!((on_the_host(&copies, 2), on_the_host(&copies, 3)), ([7; 2], [0; 2]));
    }

    /// What it waits for at its end is its own blocks, whoever else has them too.
    #[test]
    fn a_request_that_ends_has_all_its_blocks_copied_though_another_is_about_to() {
        let (_device, pool, copies) = copies();
        compute(&pool, 2, 7);
        copies.order(1, &[block(2, 0)]);
        copies.order(2, &[block(2, 0)]);
        copies.save(1, &[block(2, 0)], SavePoint::AtEnd).unwrap();
        assert_eq!(on_the_host(&copies, 2), [7; 2]);
        // The other one has not.
        compute(&pool, 2, 8);
        copies.save(2, &[block(2, 0)], SavePoint::Early).unwrap();
        assert_eq!(on_the_host(&copies, 2), [8; 2]);
    }

    /// Its request has been given up by then, and a load may be filling the copies.
    #[test]
    fn nothing_is_copied_at_an_end_that_nobody_waits_for_any_more() {
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
            // These are over: they have not begun.
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
    fn what_goes_to_the_device_is_what_was_loaded_and_no_more() {
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
