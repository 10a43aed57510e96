//! Digests of an engine's blocks in registered memory, and the comparison of loaded blocks with a
//! peer's digests (`kvx_digest`).
//!
//! Each kernel block of each region has a digest: XXH3 of its bytes. The seed names the block, its
//! region, the life of the pool and the generation. The prefill writes the digests before any peer
//! learns of the blocks. The decode reassembles the peer's blocks from the places where their bytes
//! went, and compares.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvx_core::{Agent, ErrorKind, Grid, Memory, PeerRegion, Place as _, Region, Result};
use twox_hash::XxHash3_64;

use super::generations::{GenerationTable, WORD};
use super::scratch::AT_ONCE;
use kvx_vllm::engine::Fresh;
use kvx_vllm::mapping::{Geometry, Pairing, RegionGrid, Source};

/// The name of the region that holds the digests. It has a 64-bit digest for each kernel block and
/// region, ordered by block.
pub(super) const DIGESTS: &str = "digests.xxh3";

/// The identity of a block, which its digest covers in addition to the bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    /// The generation counter of the owner's pool.
    pub(super) pool: u64,
    /// The generation counter of the logical block.
    pub(super) generation: u64,
    /// The number of the kernel block.
    pub(super) block: u32,
    /// The number of the region, in the owner's order.
    pub(super) region: u32,
}

impl Origin {
    fn digest(self, bytes: &[u8]) -> u64 {
        let mut seed = [0; 24];
        seed[..8].copy_from_slice(&self.pool.to_le_bytes());
        seed[8..16].copy_from_slice(&self.generation.to_le_bytes());
        seed[16..20].copy_from_slice(&self.block.to_le_bytes());
        seed[20..].copy_from_slice(&self.region.to_le_bytes());
        XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(&seed), bytes)
    }
}

/// The digests of one worker's blocks.
#[derive(Debug)]
pub(super) struct Digests {
    words: GenerationTable,
    pub(super) region: Region,
}

/// Returns the number of regions, and the number of kernel blocks in the largest one.
fn size(geometry: &Geometry) -> (usize, u32) {
    let blocks = geometry.regions().iter().map(|region| region.blocks).max();
    (geometry.regions().len(), blocks.unwrap_or(0))
}

impl Digests {
    /// Registers memory for the digests. Errors: `Unsupported` for device memory, and for more
    /// regions than one read can fetch.
    pub(super) fn new(agent: &Agent, geometry: &Geometry, pools: &[Arc<Memory>]) -> Result<Self> {
        if let Some(pool) = pools.iter().find(|pool| !pool.kind().is_host()) {
            return Err(ErrorKind::Unsupported.because(format!(
                "kvx_digest needs caches in host memory, and these lie in {} memory: set \
                 \"kv_buffer_device\": \"cpu\" and a backend other than TCP, or remove kvx_digest \
                 from kv_connector_extra_config here and at peers",
                pool.kind()
            )));
        }
        let (regions, blocks) = size(geometry);
        if regions > AT_ONCE {
            return Err(ErrorKind::Unsupported.because(format!(
                "kvx_digest supports caches of at most {AT_ONCE} regions, and these have {regions}"
            )));
        }
        // A worker without regions has one word too, because a pool cannot be empty.
        let words = (regions * blocks as usize).max(1);
        let memory = Arc::new(Memory::pool(words * WORD as usize).build()?);
        let region = agent.register(DIGESTS, Arc::clone(&memory))?;
        Ok(Digests { words: GenerationTable::of(memory), region })
    }

    /// Writes the digests of blocks that no peer knows of yet. `read` copies a block of a region to
    /// a buffer.
    pub(super) fn write(
        &self,
        geometry: &Geometry,
        fresh: &[Fresh],
        read: impl Fn(&RegionGrid, u32, &mut [u8]) -> Result<()>,
    ) {
        let words = self.words.as_ref();
        let (each, all) = (geometry.kernel_per_logical(), geometry.regions().len());
        let mut bytes = Vec::new();
        for Fresh { group, block, pool, generation } in fresh.iter().copied() {
            let regions = geometry.regions().iter().enumerate();
            for (region, held) in regions.filter(|(_, held)| geometry.covers(held, group)) {
                for kernel in 0..each {
                    let block = block * each + kernel;
                    let origin = Origin { pool, generation, block, region: region as u32 };
                    let whole = RegionGrid { region: origin.region, grid: held.grid() };
                    let read = |place: &RegionGrid, bytes: &mut [u8]| read(place, block, bytes);
                    match together(&[whole], &mut bytes, read) {
                        Ok(bytes) => words[block as usize * all + region]
                            .store(origin.digest(bytes), Ordering::Relaxed),
                        Err(error) => {
                            tracing::error!(
                                %error,
                                block,
                                "a block could not be hashed, so peers cannot load it"
                            )
                        }
                    }
                }
            }
        }
        // Peers that learn of the blocks find their digests.
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// The digests of a peer's worker, and the local places of its blocks.
#[derive(Debug)]
pub(super) struct PeerDigests {
    region: PeerRegion,
    layout: Layout,
}

impl PeerDigests {
    /// Checks that the digests fit the peer's blocks. Errors: `Malformed` if they do not;
    /// `Incompatible` if this engine reads parts of the blocks.
    pub(super) fn new(region: PeerRegion, source: &Source, geometry: &Geometry) -> Result<Self> {
        let (regions, blocks) = size(geometry);
        let len = (regions as u64).saturating_mul(u64::from(blocks)).saturating_mul(WORD);
        if region.len() < len || regions > AT_ONCE {
            return Err(ErrorKind::Malformed.because(format!(
                "the peer has {} bytes of digests for {blocks} blocks in {regions} regions",
                region.len()
            )));
        }
        Ok(PeerDigests { region, layout: Layout::of(source, geometry)? })
    }

    /// Returns the number of digests of a kernel block. It is 1 where there are no regions, and
    /// then none is read.
    pub(super) fn width(&self) -> usize {
        self.layout.regions.max(1)
    }

    /// Returns the peer's region with its digests, as a grid of kernel blocks.
    pub(super) fn grid(&self) -> (&PeerRegion, Grid) {
        (&self.region, Grid::packed(self.width() as u64 * WORD, self.layout.blocks))
    }

    /// Returns the peer's kernel blocks whose local bytes do not match their digests. Blocks while
    /// it hashes.
    pub(super) fn wrong(
        &self,
        read: &[Pairing],
        rows: &Rows,
        read_block: impl Fn(&RegionGrid, u32, &mut [u8]) -> Result<()>,
    ) -> Result<BTreeSet<u32>> {
        self.layout.wrong(read, rows, read_block)
    }

    /// Collects what the peer has published: digests of kernel blocks, and generations of its pool
    /// and logical blocks.
    pub(super) fn rows(
        &self,
        pool: u64,
        generations: &[(u32, u64)],
        rows: HashMap<u32, Vec<u64>>,
    ) -> Rows {
        Rows { pool, generations: generations.iter().copied().collect(), rows }
    }
}

/// The digests and generations that a peer has published for some blocks.
#[derive(Debug)]
pub(super) struct Rows {
    pool: u64,
    /// The generation counters of logical blocks.
    generations: HashMap<u32, u64>,
    /// The digests of kernel blocks, region by region.
    rows: HashMap<u32, Vec<u64>>,
}

/// The local places of a peer's blocks.
#[derive(Debug)]
struct Layout {
    /// The regions of the peer that each set of the source reads, each with its local places in the
    /// order of the peer's bytes.
    sets: Vec<Vec<(u32, Vec<RegionGrid>)>>,
    regions: usize,
    blocks: u32,
    kernel_per_logical: u32,
}

impl Layout {
    fn of(source: &Source, geometry: &Geometry) -> Result<Self> {
        let (regions, blocks) = size(geometry);
        let set = |set| {
            let mut lanes: Vec<(RegionGrid, RegionGrid)> =
                source.grids(set).map(|(ours, theirs)| (theirs, ours)).collect();
            lanes.sort_by_key(|(theirs, _)| (theirs.region, theirs.grid.base));
            let each = lanes.chunk_by(|(one, _), (other, _)| one.region == other.region);
            each.map(|lanes| whole(lanes, geometry)).collect::<Result<Vec<_>>>()
        };
        Ok(Layout {
            sets: (0..source.sets().len()).map(set).collect::<Result<_>>()?,
            regions,
            blocks,
            kernel_per_logical: geometry.kernel_per_logical().max(1),
        })
    }

    /// Returns the peer's kernel blocks that differ from what it has published.
    fn wrong(
        &self,
        read: &[Pairing],
        rows: &Rows,
        read_block: impl Fn(&RegionGrid, u32, &mut [u8]) -> Result<()>,
    ) -> Result<BTreeSet<u32>> {
        let mut wrong = BTreeSet::new();
        let mut bytes = Vec::new();
        for Pairing { set, local, remote } in read {
            for at in 0..remote.len() {
                let (here, block) = (local.at(at), remote.at(at));
                let row = rows.rows.get(&block);
                let generation = rows.generations.get(&(block / self.kernel_per_logical));
                for (region, places) in &self.sets[*set] {
                    let bytes = together(places, &mut bytes, |place, bytes| {
                        read_block(place, here, bytes)
                    })?;
                    let published = row.and_then(|row| row.get(*region as usize));
                    let found = generation.map(|generation| {
                        Origin { pool: rows.pool, generation: *generation, block, region: *region }
                            .digest(bytes)
                    });
                    if found.is_none() || found.as_ref() != published {
                        wrong.insert(block);
                    }
                }
            }
        }
        Ok(wrong)
    }
}

/// Copies the bytes of some places into one buffer, one after the other. The buffer is reused:
/// allocating it for each block costs a tenth to a fifth of the time that hashing takes.
fn together<'a>(
    places: &[RegionGrid],
    buffer: &'a mut Vec<u8>,
    read: impl Fn(&RegionGrid, &mut [u8]) -> Result<()>,
) -> Result<&'a [u8]> {
    let mut end = 0;
    for place in places {
        let start = end;
        end += usize::try_from(place.grid.length).unwrap_or(usize::MAX);
        if buffer.len() < end {
            buffer.resize(end, 0);
        }
        read(place, &mut buffer[start..end])?;
    }
    Ok(&buffer[..end])
}

/// Returns the local places of one region of the peer. Errors: `Incompatible` unless they cover its
/// whole blocks.
fn whole(
    lanes: &[(RegionGrid, RegionGrid)],
    geometry: &Geometry,
) -> Result<(u32, Vec<RegionGrid>)> {
    let number = lanes[0].0.region;
    let region = &geometry.regions()[number as usize];
    let mut end = 0;
    for (theirs, _) in lanes {
        if theirs.grid.base != end || theirs.grid.stride != region.block_stride {
            break;
        }
        end += theirs.grid.length;
    }
    if end != region.block_len {
        return Err(ErrorKind::Incompatible.because(format!(
            "kvx_digest is set, and this engine reads {} bytes of the peer's blocks of {}: a \
             digest covers a whole block, so the tensor-parallel size has to be that of the peer \
             or a divisor of it; else remove kvx_digest from kv_connector_extra_config",
            lanes.iter().map(|(theirs, _)| theirs.grid.length).sum::<u64>(),
            region.block_len
        )));
    }
    Ok((number, lanes.iter().map(|(_, ours)| *ours).collect()))
}

#[cfg(test)]
mod tests {
    use kvx_testkit::Random;

    use super::*;

    const BLOCKS: u32 = 32;
    const REGIONS: usize = 3;
    const LEN: usize = 64;
    const FAULTS: u32 = 1_000_000;

    /// A place here for each block of the peer, by its number. The last region lies in two pieces.
    fn layout() -> Layout {
        let piece = |region, base, length| RegionGrid {
            region,
            grid: Grid { base, stride: LEN as u64, length, count: BLOCKS },
        };
        let half = LEN as u64 / 2;
        let last = vec![piece(2, half, half), piece(2, 0, half)];
        let whole = |region| (region, vec![piece(region, 0, LEN as u64)]);
        Layout {
            sets: vec![vec![whole(0), whole(1), (2, last)]],
            regions: REGIONS,
            blocks: BLOCKS,
            kernel_per_logical: 2,
        }
    }

    /// A block of a region: its bytes and its published digest.
    type DigestedBlock = ([u8; LEN], u64);

    /// Creates the contents of a pool in one life and generation.
    fn contents(random: &mut Random, pool: u64, generation: u64) -> Vec<[DigestedBlock; REGIONS]> {
        let block = |block| {
            std::array::from_fn(|region| {
                // Some blocks have the same bytes.
                let same = random.below(4) == 0;
                let bytes = std::array::from_fn(|_| if same { 7 } else { random.below(256) as u8 });
                let origin = Origin { pool, generation, block, region: region as u32 };
                (bytes, origin.digest(&bytes))
            })
        };
        (0..BLOCKS).map(block).collect()
    }

    /// Checks two requested blocks against what arrived for them: bytes and digests.
    fn check(
        layout: &Layout,
        asked: [u32; 2],
        arrived: &[[DigestedBlock; REGIONS]; 2],
    ) -> BTreeSet<u32> {
        let place = |asked: u32| asked.wrapping_mul(5) % BLOCKS;
        let read = [Pairing {
            set: 0,
            local: asked.map(place).to_vec().into(),
            remote: asked.to_vec().into(),
        }];
        let row = |at: usize| (asked[at], arrived[at].map(|(_, digest)| digest).to_vec());
        let rows = Rows {
            pool: 9,
            generations: asked.iter().map(|block| (block / 2, 4)).collect(),
            rows: [row(0), row(1)].into(),
        };
        let read_block = |grid: &RegionGrid, index: u32, bytes: &mut [u8]| {
            let at =
                asked.iter().position(|asked| place(*asked) == index).expect("one of the places");
            let whole = arrived[at][grid.region as usize].0;
            // The peer's first half lies in the second half here, if the region is split.
            let from = if grid.grid.length as usize == LEN {
                0
            } else {
                LEN / 2 - grid.grid.base as usize
            };
            bytes.copy_from_slice(&whole[from..][..bytes.len()]);
            Ok(())
        };
        layout.wrong(&read, &rows, read_block).expect("nothing fails")
    }

    #[test]
    fn no_flipped_swapped_stale_or_repeated_block_is_accepted() {
        let (layout, mut random) = (layout(), Random::seeded(1));
        let now = contents(&mut random, 9, 4);
        let before = [contents(&mut random, 9, 3), contents(&mut random, 8, 4)];
        let mut injected = [0_u32; 7];
        while injected.iter().sum::<u32>() < FAULTS {
            let one = random.below(BLOCKS as usize);
            let other = (one + 1 + random.below(BLOCKS as usize - 1)) % BLOCKS as usize;
            let asked = [one as u32, other as u32];
            let right = [now[one], now[other]];
            let mut arrived = right;
            let (kind, region) = (random.below(7), random.below(REGIONS));
            match kind {
                0 => {
                    for _ in 0..=random.below(3) {
                        arrived[0][region].0[random.below(LEN)] ^= 1 << random.below(8);
                    }
                }
                // Only the bytes: of the other block, of another region, or of another time.
                1 => {
                    (arrived[0][region].0, arrived[1][region].0) =
                        (right[1][region].0, right[0][region].0)
                }
                2 => arrived[0][region].0 = right[1][region].0,
                3 => arrived[0][region].0 = right[0][(region + 1) % REGIONS].0,
                4 => arrived[0][region].0 = before[random.below(2)][one][region].0,
                // The bytes with their digests.
                5 => arrived[0][region] = before[random.below(2)][one][region],
                _ => arrived[0][region] = right[random.below(2)][(region + 1) % REGIONS],
            }
            let wrong: BTreeSet<u32> =
                (0..2).filter(|at| arrived[*at] != right[*at]).map(|at| asked[at]).collect();
            assert_eq!(
                check(&layout, asked, &arrived),
                wrong,
                "{kind}: {asked:?}, region {region}"
            );
            injected[kind] += u32::from(!wrong.is_empty());
        }
        assert!(injected.iter().all(|count| *count > FAULTS / 20), "{injected:?}");
    }

    #[test]
    fn a_block_without_a_digest_or_a_generation_is_wrong() {
        let layout = layout();
        let now = contents(&mut Random::seeded(3), 9, 4);
        assert!(check(&layout, [4, 9], &[now[4], now[9]]).is_empty());
        let read = [Pairing { set: 0, local: vec![4].into(), remote: vec![4].into() }];
        let read_block = |grid: &RegionGrid, _: u32, bytes: &mut [u8]| {
            bytes.copy_from_slice(&now[4][grid.region as usize].0[..bytes.len()]);
            Ok(())
        };
        let row: Vec<u64> = now[4].iter().map(|(_, digest)| *digest).collect();
        let wrong = |generations: &[(u32, u64)], rows: &[(u32, Vec<u64>)]| {
            let rows = Rows {
                pool: 9,
                generations: generations.iter().copied().collect(),
                rows: rows.iter().cloned().collect(),
            };
            layout.wrong(&read, &rows, read_block).expect("nothing fails")
        };
        assert_eq!(wrong(&[], &[(4, row.clone())]), [4].into());
        assert_eq!(wrong(&[(2, 4)], &[]), [4].into());
        assert_eq!(wrong(&[(2, 4)], &[(4, row[..1].to_vec())]), [4].into());
        assert_eq!(wrong(&[(2, 4)], &[(4, vec![0; REGIONS])]), [4].into());
    }
}
