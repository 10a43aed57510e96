//! The KV cache that an inference engine has allocated itself: kvx adopts it, moves blocks of all its layers in one
//! transfer, and gives it back.
//!
//! Adopted host memory works over every backend. Between processes of one host a pool of kvx's own ([`Memory::pool`])
//! is about twice as fast, because peers read it without the kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvx::{Agent, Grid, GridSet, Memory, PeerRegion, Plan, Region, Result};

const SOON: Duration = Duration::from_secs(10);
const LAYERS: u64 = 4;
const BLOCKS: u32 = 64;
/// Bytes of keys and of values of one block in one layer.
const HALF: u64 = 8 << 10;
/// A layer has the keys of all blocks, then their values.
const LAYER: u64 = 2 * HALF * BLOCKS as u64;
const CACHE: usize = (LAYERS * LAYER) as usize;

/// What an engine holds its cache by: one allocation, page-aligned, freed when this is dropped.
struct EngineCache {
    base: *mut u8,
    freed: Arc<AtomicBool>,
}

// SAFETY: it owns the allocation, and nobody reaches the bytes through it but by raw copies.
unsafe impl Send for EngineCache {}
// SAFETY: as above; it hands out no reference.
unsafe impl Sync for EngineCache {}

impl EngineCache {
    const LAYOUT: std::alloc::Layout = match std::alloc::Layout::from_size_align(CACHE, 4096) {
        Ok(layout) => layout,
        Err(_) => panic!("4096 is a power of two"),
    };

    fn new(freed: &Arc<AtomicBool>) -> Self {
        // SAFETY: the layout has a size.
        let base = unsafe { std::alloc::alloc_zeroed(Self::LAYOUT) };
        assert!(!base.is_null(), "no memory for the cache");
        EngineCache { base, freed: Arc::clone(freed) }
    }
}

impl Drop for EngineCache {
    fn drop(&mut self) {
        // SAFETY: `new` allocated it with this layout, and it is freed once.
        unsafe { std::alloc::dealloc(self.base, Self::LAYOUT) };
        self.freed.store(true, Ordering::SeqCst);
    }
}

/// Registers an engine's cache. kvx drops the owner when nobody can touch the memory any more.
fn register(agent: &Agent, cache: EngineCache) -> Result<Region> {
    let base = cache.base;
    // SAFETY: the allocation stays in place until `cache` is dropped, and the engine makes no references into it.
    agent.register("kv", unsafe { Memory::adopt(base, CACHE, cache) })
}

/// Where the keys and the values of each layer lie: grids that share one index list, the engine's block numbers.
fn halves() -> impl Iterator<Item = Grid> {
    let bases = (0..LAYERS).flat_map(|layer| [layer * LAYER, layer * LAYER + LAYER / 2]);
    bases.map(|base| Grid::packed(HALF, BLOCKS).at(base))
}

fn ours(region: &Region) -> Result<GridSet<Region>> {
    GridSet::join(halves().map(|grid| region.grid(grid)).collect::<Result<Vec<_>>>()?)
}

fn theirs(region: &PeerRegion) -> Result<GridSet<PeerRegion>> {
    GridSet::join(halves().map(|grid| region.grid(grid)).collect::<Result<Vec<_>>>()?)
}

fn main() -> Result<()> {
    let freed = Arc::new(AtomicBool::new(false));
    let [prefill, decode] = ["prefill-0", "decode-0"].map(|name| kvx::agent(name).build());
    let (prefill, decode) = (prefill?, decode?);
    let cache = register(&prefill, EngineCache::new(&freed))?;
    let copy = register(&decode, EngineCache::new(&Arc::default()))?;
    // The values of block 11 in the last layer.
    let values = (CACHE as u64 - LAYER / 2 + 11 * HALF) as usize;
    cache.copy_in(values, b"values of block 11")?;

    let peer = decode.connect(&prefill.metadata()?)?;
    let plan =
        Plan::read(ours(&copy)?.blocks([40, 41]), theirs(&peer.region("kv")?)?.blocks([11, 12]))?;
    let report = peer.post(&plan)?.wait_blocking(SOON)?;
    println!("{} blocks as {} segments over {}", report.blocks, report.segments, report.backend);
    assert_eq!(
        (report.blocks, report.segments),
        (2 * 2 * LAYERS, 2 * LAYERS),
        "neighbours are merged"
    );

    let mut got = [0; 18];
    copy.copy_out(values + (29 * HALF) as usize, &mut got)?; // block 40 is 29 blocks further
    assert_eq!(&got, b"values of block 11");

    // The engine wants its memory back: first the proof that no peer reaches it, then the last reference.
    let memory = cache.revoke(SOON).join()?;
    drop((cache, memory));
    prefill.shutdown(SOON).join()?;
    assert!(freed.load(Ordering::SeqCst), "the allocation is the engine's again, and it is freed");
    decode.shutdown(SOON).join()
}
