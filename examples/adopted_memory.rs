//! Adopts the KV cache that an inference engine has allocated itself, moves blocks of all its
//! layers in one transfer, and returns the memory to the engine.
//!
//! Adopted host memory works over every backend. Between processes of one host, a pool allocated by
//! kvx ([`Memory::pool`]) is about twice as fast: peers map it and read without the kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvx::{Agent, Grid, GridSet, Memory, PeerRegion, Plan, Region, Result};

const SOON: Duration = Duration::from_secs(10);
const LAYERS: u64 = 4;
const BLOCKS: u32 = 64;
/// Bytes of the keys, and of the values, of one block in one layer.
const HALF: u64 = 8 << 10;
/// Bytes of a layer: the keys of all blocks, then their values.
const LAYER: u64 = 2 * HALF * BLOCKS as u64;
const CACHE: usize = (LAYERS * LAYER) as usize;

/// The engine's cache: one page-aligned allocation, freed on drop.
struct EngineCache {
    base: *mut u8,
    freed: Arc<AtomicBool>,
}

// SAFETY: `EngineCache` owns the allocation and accesses its bytes only through raw copies, so
// another thread may take it over.
unsafe impl Send for EngineCache {}
// SAFETY: `EngineCache` hands out no reference into the allocation, so threads may share it.
unsafe impl Sync for EngineCache {}

impl EngineCache {
    const LAYOUT: std::alloc::Layout = match std::alloc::Layout::from_size_align(CACHE, 4096) {
        Ok(layout) => layout,
        Err(_) => panic!("the cache is too large for a layout"),
    };

    fn new(freed: &Arc<AtomicBool>) -> Self {
        // SAFETY: the layout's size is not zero.
        let base = unsafe { std::alloc::alloc_zeroed(Self::LAYOUT) };
        assert!(!base.is_null(), "the allocator has no memory for the cache");
        EngineCache { base, freed: Arc::clone(freed) }
    }
}

impl Drop for EngineCache {
    fn drop(&mut self) {
        // SAFETY: `new` allocated `base` with this layout, and only `drop` frees it, once.
        unsafe { std::alloc::dealloc(self.base, Self::LAYOUT) };
        self.freed.store(true, Ordering::SeqCst);
    }
}

/// Registers an engine's cache. kvx drops `cache` once no peer and no transfer can access the
/// memory.
fn register(agent: &Agent, cache: EngineCache) -> Result<Region> {
    let base = cache.base;
    // SAFETY: the allocation stays in place until `cache` is dropped, and the engine creates no
    // references into it.
    agent.register("kv", unsafe { Memory::adopt(base, CACHE, cache) })
}

/// Returns the grids of the keys and of the values of each layer. They share one list of indices:
/// the engine's block numbers.
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
    // The offset of block 11's values in the last layer.
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
        "the plan must merge neighbouring blocks"
    );

    let mut got = [0; 18];
    // Block 40 is 29 blocks behind block 11.
    copy.copy_out(values + (29 * HALF) as usize, &mut got)?;
    assert_eq!(&got, b"values of block 11");

    // The engine wants its memory back. `revoke` proves that no peer can access it any more;
    // dropping the last reference then frees it.
    let memory = cache.revoke(SOON).join()?;
    drop((cache, memory));
    prefill.shutdown(SOON).join()?;
    assert!(
        freed.load(Ordering::SeqCst),
        "dropping the last reference must free the engine's allocation"
    );
    decode.shutdown(SOON).join()
}
