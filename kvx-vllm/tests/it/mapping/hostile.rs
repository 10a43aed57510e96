//! A peer's description of its memory never makes this rank compute an address outside a region, or
//! panic.

use kvx_core::Op;
use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::ids::WorkerRank;
use kvx_vllm::mapping::{
    BlockPairs, Caches, Clip, Geometry, GroupKind, Heads, KvLayout, KvRegion, KvTensors,
    LayerCache, MappingOptions, MemoryType, PeerMap, RegionGrid, RegionGroup, Remote, Tokens, Tp,
    handshake_ranks,
};
use kvx_vllm::wire::{NixlAgentMetadata, PackedMember};

use super::cluster::lists;
use super::rows::{local_rows, remote_rows};
use crate::random::Random;

/// Returns a number that may break arithmetic.
fn number(random: &mut Random) -> u64 {
    match random.below(6) {
        0 => random.one_of(&[0, 1, u64::MAX, u64::MAX - 1, 1 << 63, 1 << 32, u64::from(u32::MAX)]),
        1 => random.word(),
        _ => random.one_of(&[16, 32, 64, 100, 128, 256, 4096]),
    }
}

fn small(random: &mut Random) -> u32 {
    match random.below(8) {
        0 => random.one_of(&[0, u32::MAX, u32::MAX - 1, 1 << 31, 1 << 16, 65_537]),
        _ => random.one_of(&[1, 2, 3, 4, 8, 16]),
    }
}

fn layout(random: &mut Random) -> KvLayout {
    match random.below(3) {
        0 => random.one_of(&KvLayout::ALL),
        _ => KvLayout::Lbhnc,
    }
}

/// Returns a local rank with an unusual but valid geometry.
fn local(random: &mut Random) -> Caches {
    let layers = 1 + random.below(4);
    let halves = random.below(4) == 0;
    let block_len = random.one_of(&[64, 128, 256, 512]);
    let block_stride = block_len + random.one_of(&[0, 0, 8, 64]);
    let heads = match random.below(3) {
        0 => Heads::Replicated,
        _ => Heads::Sharded(random.one_of(&[1, 2, 3, 4, 8])),
    };
    let layers = (0..layers).map(|at| {
        let base = 0x1000_0000 + at * 0x10_0000;
        LayerCache {
            name: format!("layers.{at}").into(),
            tensors: if halves { KvTensors::Halves(base) } else { KvTensors::Together(base) },
            blocks: 8,
            block_len,
            block_stride,
            group: (at % 2) as u32,
            heads,
            memory: MemoryType::Vram,
        }
    });
    let (tokens, kernel) = (random.one_of(&[4, 8, 16]), random.one_of(&[1, 1, 2]));
    Caches::of_layers(layers.collect(), layout(random), tokens, kernel, 0).unwrap()
}

/// Returns a peer's rank: the local one with some numbers replaced.
fn peer(random: &mut Random, local: &Caches, stages: u32) -> kvx_core::Result<Geometry> {
    let ours = local.geometry();
    let wild = random.below(4);
    let mut regions: Vec<KvRegion> = ours.regions().to_vec();
    let (scale, larger) = (random.one_of(&[1, 1, 2, 4]), random.below(2) == 0);
    for region in &mut regions {
        region.block_len = if larger { region.block_len * scale } else { region.block_len / scale };
        region.block_stride = region.block_stride.max(region.block_len);
        if random.below(5) >= wild {
            continue;
        }
        match random.below(7) {
            0 => region.base = number(random),
            1 => region.block_len = number(random),
            2 => region.block_stride = number(random),
            3 => region.blocks = small(random),
            4 => {
                region.group = random.one_of(&[
                    RegionGroup::Shared,
                    RegionGroup::Of(0),
                    RegionGroup::Of(u32::MAX),
                ])
            }
            5 => region.packed = vec![("layers.0".into(), number(random), number(random))],
            _ => region.layers = vec![random.one_of(&["layers.0", "layers.1", ""]).into()],
        }
    }
    if stages > 1 || random.below(10) == 0 {
        let keep = random.below(regions.len() as u64 + 1) as usize;
        regions.rotate_left(keep);
        regions.truncate(keep.max(1));
    }
    let tokens = if random.below(6) == 0 {
        small(random)
    } else {
        ours.block_tokens() / random.one_of(&[1, 1, 2, 4])
    };
    let kernel = if random.below(6) == 0 { small(random) } else { ours.kernel_per_logical() };
    let layout = if random.below(4) == 0 { layout(random) } else { ours.layout() };
    let geometry = Geometry::new(regions, layout, tokens, kernel, number(random))?;
    if ours.parts() == 2 && random.below(10) > 0 { geometry.with_halves() } else { Ok(geometry) }
}

fn within(side: RegionGrid, geometry: &Geometry) {
    let region = &geometry.regions()[side.region as usize];
    let (grid, whole) = (side.grid, region.grid());
    grid.check(whole.end().unwrap()).unwrap();
    // No block of the grid crosses into the next block of the region or into its padding.
    for index in [0, grid.count / 2, grid.count - 1] {
        let start = grid.offset(index) % region.block_stride;
        assert!(start + grid.length <= region.block_len, "{grid:?} of {region:?}");
    }
}

#[test]
fn no_geometry_leads_outside_of_a_region() {
    let (mut drawn, mut moved, mut refused) = (0, 0, 0);
    for seed in 0..60_000 {
        let mut random = Random(seed);
        let random = &mut random;
        let local = local(random);
        let size = random.one_of(&[1, 1, 2, 4, 8]);
        let tp = Tp::new(random.below(u64::from(size)) as u32, size).unwrap();
        let tp_size =
            if random.below(10) == 0 { small(random) } else { random.one_of(&[1, 1, 2, 4, 8]) };
        let pp_size = if random.below(10) == 0 { small(random) } else { random.one_of(&[1, 1, 2]) };
        let Ok(known) = handshake_ranks(tp, tp_size, 1) else { continue };
        let mut ranks = Vec::new();
        let count = pp_size.min(3);
        let made = Random(seed ^ 0x5eed);
        for tp in known {
            for pp in 0..count {
                // The ranks of an engine are mostly alike.
                let mut same = Random(made.0 + u64::from(pp));
                let chosen = if random.below(8) == 0 { &mut *random } else { &mut same };
                if let Ok(geometry) = peer(chosen, &local, pp_size) {
                    ranks.push((WorkerRank { pp, tp }, geometry));
                }
            }
        }
        let groups = random.one_of(&[1, 2, 2, 2, 3]);
        let options = MappingOptions {
            groups: vec![
                (
                    GroupKind::Attention,
                    random.one_of(&[Clip::Whole, Clip::Whole, Clip::Window])
                );
                groups
            ],
            permute: random.below(2) == 0,
            host_buffer: random.below(8) == 0,
        };
        let op = random.one_of(&[Op::Read, Op::Read, Op::Write]);
        let dcp_size = if random.below(20) == 0 { small(random) } else { 1 };
        let Ok(map) = PeerMap::new(
            op,
            &local,
            tp,
            &Remote { tp_size, pp_size, dcp_size, ranks: &ranks },
            &options,
        ) else {
            refused += 1;
            continue;
        };
        drawn += 1;
        for source in map.sources() {
            let (_, theirs) = ranks.iter().find(|(rank, _)| *rank == source.rank()).unwrap();
            for set in 0..source.sets().len() {
                for (here, there) in source.grids(set) {
                    assert_eq!(here.grid.length, there.grid.length);
                    within(here, local.geometry());
                    within(there, theirs);
                }
            }
            let rows = local_rows(source, local.geometry());
            assert!(rows.into_iter().chain(remote_rows(source, theirs)).all(|row| {
                row.address.checked_add((row.count - 1) * row.stride + row.len).is_some()
            }));
        }
        let list = |random: &mut Random| {
            let len = random.below(6);
            (0..len)
                .map(|_| if random.below(12) == 0 { small(random) } else { random.below(4) as u32 })
                .collect::<Vec<u32>>()
        };
        for _ in 0..4 {
            let mut side = || lists(&(0..groups).map(|_| list(random)).collect::<Vec<_>>());
            let (here, there) = (side(), side());
            let tokens = match random.below(3) {
                0 => None,
                1 => Some(Tokens { producer: small(random), wanted: small(random) }),
                _ => Some(Tokens { producer: 40, wanted: 40 }),
            };
            let Ok(moves) = map.moves(&BlockPairs { local: &here, remote: &there, tokens }) else {
                continue;
            };
            moved += usize::from(moves.blocks > 0);
            assert_eq!(moves.ranks.len() + moves.notify_only.len(), map.sources().len());
            for (source, pairing) in moves
                .ranks
                .iter()
                .flat_map(|rank| rank.pairings.iter().map(|pairing| (rank.source, pairing)))
            {
                let (own, theirs) = map.sources()[source].sets()[pairing.set].counts();
                assert_eq!(pairing.local.len(), pairing.remote.len());
                assert!(
                    pairing.local.max().unwrap() < own && pairing.remote.max().unwrap() < theirs
                );
            }
            for covered in &moves.covered {
                let ratio = map.block_size_ratio();
                assert!(
                    covered
                        .blocks()
                        .all(|(_, filled)| filled.start <= filled.end && filled.end <= ratio)
                );
            }
        }
    }
    assert!(
        drawn > 2000 && moved > 2000 && refused > 5000,
        "{drawn} mapped, {moved} moved, {refused} refused"
    );
}

#[test]
fn no_metadata_makes_an_impossible_geometry() {
    let mut understood = 0;
    for seed in 0..20_000 {
        let mut random = Random(seed);
        let random = &mut random;
        let mut metadata = NixlAgentMetadata::new("peer", Version::V0_33);
        let regions = random.below(4);
        let numbers = |random: &mut Random| {
            let count = if random.below(12) == 0 { random.below(5) } else { regions };
            (0..count).map(|_| number(random)).collect::<Vec<u64>>()
        };
        metadata.kv_caches_base_addr = numbers(random);
        metadata.block_lens = vec![64; regions as usize];
        metadata.block_strides =
            if random.below(3) == 0 { numbers(random) } else { vec![64; regions as usize] };
        metadata.num_blocks = number(random);
        metadata.region_num_blocks = (random.below(2) == 0).then(|| numbers(random));
        metadata.block_size = number(random);
        metadata.physical_blocks_per_logical_kv_block = small(random);
        metadata.kv_cache_layout =
            random.one_of(&["LBHNC", "HND", "NHD", "LBHNC", "XYZ", ""]).into();
        let ids = |random: &mut Random| {
            (0..regions)
                .map(|_| random.one_of(&[0, 1, -1, 0, 1, -1, -2, i64::MIN, i64::MAX]))
                .collect()
        };
        metadata.region_group_ids = (random.below(2) == 0).then(|| ids(random));
        metadata.region_mem_types = (random.below(2) == 0).then(|| {
            (0..regions).map(|_| random.one_of(&["VRAM", "DRAM", "VRAM", "?"]).into()).collect()
        });
        metadata.region_names =
            (random.below(2) == 0).then(|| (0..regions).map(|at| format!("layers.{at}")).collect());
        if random.below(3) == 0 {
            let (offset, len) = (number(random), number(random));
            metadata.packed_member_layouts.push(PackedMember {
                layer: "layers.0".into(),
                offset,
                len,
            });
        }
        let Ok(geometry) = Geometry::advertised(&metadata) else { continue };
        understood += 1;
        assert_eq!(geometry.regions().len(), metadata.regions());
        for region in geometry.regions() {
            assert!(
                region.block_len > 0
                    && region.block_stride >= region.block_len
                    && region.blocks > 0
            );
            assert!(region.end().is_some());
        }
        let spans = geometry.spans();
        for at in 0..geometry.regions().len() as u32 {
            let (span, offset) = geometry.place(at, &spans).unwrap();
            let region = &geometry.regions()[at as usize];
            assert!(offset + (region.end().unwrap() - region.base) <= spans[span].len);
        }
    }
    assert!(understood > 500, "{understood}");
}
