//! Regions: their registration and advertisement, and the pairing of both sides' regions.

use kvx_core::{ErrorKind, Indices, Op, Result};
use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::ids::WorkerRank;
use kvx_vllm::mapping::{
    BlockPairs, Caches, Clip, Geometry, GroupKind, Heads, KvLayout, KvRegion, KvTensors,
    LayerCache, MappingOptions, MemoryType, PeerMap, RegionGroup, Remote, Tp,
};
use kvx_vllm::wire::{NixlAgentMetadata, PackedMember};

use super::rows::{descriptor_ids, remote_rows};
use crate::golden;

const MLA: Heads = Heads::Replicated;

fn layer(name: &str, base: u64, group: u32) -> LayerCache {
    LayerCache {
        name: name.into(),
        tensors: KvTensors::Together(base),
        blocks: 8,
        block_len: 4096,
        block_stride: 4096,
        group,
        heads: Heads::Sharded(8),
        memory: MemoryType::Vram,
    }
}

fn caches(layers: Vec<LayerCache>) -> Result<Caches> {
    Caches::of_layers(layers, KvLayout::Lbhnc, 16, 1, 0)
}

/// Returns the map of a single rank to a similar rank.
fn map(local: &Caches, stages: &[Geometry], groups: usize) -> Result<PeerMap> {
    let ranks: Vec<(WorkerRank, Geometry)> = stages
        .iter()
        .enumerate()
        .map(|(pp, stage)| (WorkerRank { pp: pp as u32, tp: 0 }, stage.clone()))
        .collect();
    let remote = Remote { tp_size: 1, pp_size: stages.len() as u32, dcp_size: 1, ranks: &ranks };
    let options = MappingOptions {
        groups: vec![(GroupKind::Attention, Clip::Whole); groups],
        ..MappingOptions::default()
    };
    PeerMap::new(Op::Read, local, Tp::new(0, 1).unwrap(), &remote, &options)
}

// vLLM 21: layers become regions with lengths, base addresses and the memory type of the buffer
//     device
#[test]
fn layers_become_regions_in_natural_order() {
    let caches = caches(vec![
        layer("layers.10.attn", 0xa0000, 0),
        layer("layers.9.attn", 0x90000, 0),
        layer("layers.1.attn", 0x10000, 0),
    ]);
    let caches = caches.unwrap();
    let regions = caches.geometry().regions();
    assert_eq!(
        regions.iter().map(|region| region.base).collect::<Vec<_>>(),
        [0x10000, 0x90000, 0xa0000]
    );
    assert_eq!(*regions[2].layers[0], *"layers.10.attn");
    assert_eq!(
        (regions[0].block_len, regions[0].blocks, regions[0].memory),
        (4096, 8, MemoryType::Vram)
    );
}

// vLLM 21: K and V are one or two regions or two halves of one, and layers may share memory
#[test]
fn k_and_v_apart_are_two_regions_and_halves_are_one_in_two_parts() {
    let apart = LayerCache {
        tensors: KvTensors::Apart { k: 0x10000, v: 0x90000 },
        ..layer("layers.0", 0, 0)
    };
    let caches_apart = caches(vec![apart]).unwrap();
    let bases: Vec<u64> =
        caches_apart.geometry().regions().iter().map(|region| region.base).collect();
    assert_eq!(bases, [0x10000, 0x90000]);
    let halves = LayerCache { tensors: KvTensors::Halves(0x10000), ..layer("layers.0", 0, 0) };
    let caches_halves = caches(vec![halves.clone()]).unwrap();
    assert_eq!(
        (caches_halves.geometry().regions().len(), caches_halves.geometry().parts()),
        (1, 2)
    );
    let map = map(&caches_halves, &[caches_halves.geometry().clone()], 1).unwrap();
    let parts: Vec<(u64, u64)> = map.sources()[0]
        .lanes()
        .iter()
        .map(|lane| (lane.local.grid.base, lane.local.grid.length))
        .collect();
    assert_eq!(parts, [(0, 2048), (2048, 2048)]);
    // The latent of MLA is one region with one part.
    let latent = caches(vec![LayerCache { heads: MLA, ..layer("layers.0", 0x10000, 0) }]).unwrap();
    assert_eq!((latent.geometry().regions().len(), latent.geometry().parts()), (1, 1));
    let mixed = caches(vec![halves.clone(), layer("layers.1", 0x90000, 0)]).unwrap_err();
    assert_eq!(mixed.kind(), ErrorKind::Invalid);
    let odd = caches(vec![LayerCache { block_len: 4095, ..halves }]).unwrap_err();
    assert_eq!(odd.kind(), ErrorKind::Malformed);
}

#[test]
fn layers_at_one_address_share_a_region() {
    let shared = caches(vec![
        layer("layers.0", 0x10000, 0),
        layer("layers.1", 0x20000, 0),
        layer("layers.2", 0x10000, 1),
        layer("layers.3", 0x20000, 0),
    ]);
    let shared = shared.unwrap();
    let regions = shared.geometry().regions();
    assert_eq!(
        regions.iter().map(|region| region.group).collect::<Vec<_>>(),
        [RegionGroup::Shared, RegionGroup::Of(0)]
    );
    assert_eq!(
        regions[0].layers.iter().map(|layer| &**layer).collect::<Vec<_>>(),
        ["layers.0", "layers.2"]
    );
    let unlike = LayerCache { block_len: 2048, ..layer("layers.1", 0x10000, 0) };
    assert_eq!(
        caches(vec![layer("layers.0", 0x10000, 0), unlike]).unwrap_err().kind(),
        ErrorKind::Invalid
    );
    let twice =
        caches(vec![layer("layers.0", 0x10000, 0), layer("layers.0", 0x20000, 0)]).unwrap_err();
    assert!(twice.to_string().contains("layers.0 is given twice"), "{twice}");
}

/// Returns rows that hold the blocks of four layers, and padding.
fn rows() -> Caches {
    let row = |at: u64| LayerCache {
        block_stride: 4 * 4096 + 512,
        ..layer(&format!("layers.{at}"), 0x10000 + at * 4096, 0)
    };
    caches((0..4).map(row).collect()).unwrap()
}

// vLLM 22: packed rows are registered whole, and their padding is not moved
#[test]
fn whole_rows_are_registered_and_their_padding_is_not_moved() {
    let caches = rows();
    let spans = caches.geometry().spans();
    assert_eq!(spans.len(), 1);
    assert_eq!((spans[0].address, spans[0].len), (0x10000, 7 * (4 * 4096 + 512) + 4 * 4096));
    assert_eq!(caches.geometry().place(3, &spans), Some((0, 3 * 4096)));
    assert_eq!(caches.geometry().place(4, &spans), None);
    let map = map(&caches, &[caches.geometry().clone()], 1).unwrap();
    let local: Vec<Indices> = vec![[3, 7].into()];
    let moves = map.moves(&BlockPairs { local: &local, remote: &local, tokens: None }).unwrap();
    assert_eq!((moves.blocks, moves.bytes), (8, 8 * 4096));
    let apart =
        self::caches(vec![layer("layers.0", 0x10000, 0), layer("layers.1", 0x90000, 0)]).unwrap();
    assert_eq!(apart.geometry().spans().len(), 2);
}

/// Returns the metadata of a peer that registers rows as one region, with the places of the layers
/// in them.
fn one_row(names: &[&str], lens: &[u64]) -> NixlAgentMetadata {
    let mut metadata = NixlAgentMetadata::new("prefill", Version::V0_33);
    metadata.kv_caches_base_addr = vec![0x70_0000];
    metadata.block_lens = vec![4 * 4096];
    metadata.block_strides = vec![4 * 4096 + 512];
    metadata.num_blocks = 9;
    metadata.block_size = 16;
    metadata.kv_cache_layout = "LBHNC".into();
    metadata.region_names = Some(vec!["layers.0".into()]);
    let mut offset = 0;
    for (name, len) in names.iter().zip(lens) {
        metadata.packed_member_layouts.push(PackedMember {
            layer: (*name).into(),
            offset,
            len: *len,
        });
        offset += len;
    }
    metadata
}

// vLLM 22: a peer's packed rows are split into layers
#[test]
fn rows_of_a_peer_are_split_into_layers() {
    let names = ["layers.0", "layers.1", "layers.2", "layers.3"];
    let peer = Geometry::advertised(&one_row(&names, &[4096; 4])).unwrap();
    let map = map(&rows(), std::slice::from_ref(&peer), 1).unwrap();
    let made = remote_rows(&map.sources()[0], &peer);
    let bases: Vec<u64> = made.iter().map(|row| row.address).collect();
    assert_eq!(bases, [0x70_0000, 0x70_1000, 0x70_2000, 0x70_3000]);
    assert!(made.iter().all(|row| row.stride == 4 * 4096 + 512 && row.len == 4096));
    // A layer without a place in the row, and places outside it.
    let missing = Geometry::advertised(&one_row(&names[..3], &[4096; 3])).unwrap();
    assert_eq!(self::map(&rows(), &[missing], 1).unwrap_err().kind(), ErrorKind::Incompatible);
    for (offset, len) in [(3 * 4096, 4097), (u64::MAX, 1), (0, 0), (1, u64::MAX)] {
        let mut metadata = one_row(&names, &[4096; 4]);
        let last = &mut metadata.packed_member_layouts[3];
        (last.offset, last.len) = (offset, len);
        assert_eq!(Geometry::advertised(&metadata).unwrap_err().kind(), ErrorKind::Malformed);
    }
    let mut elsewhere = one_row(&names, &[4096; 4]);
    elsewhere.region_names = Some(vec!["another".into()]);
    assert_eq!(Geometry::advertised(&elsewhere).unwrap_err().kind(), ErrorKind::Malformed);
}

// vLLM 22: each region is limited by its own capacity
#[test]
fn regions_of_different_capacity_are_bounded_by_their_own() {
    let sized = |name: &str, base, group, blocks| LayerCache { blocks, ..layer(name, base, group) };
    let local = caches(vec![
        sized("layers.0", 0x100000, 0, 10),
        sized("layers.1", 0x200000, 1, 4),
        sized("layers.2", 0x300000, 0, 10),
        sized("layers.3", 0x300000, 1, 10),
    ]);
    let local = local.unwrap();
    let map = map(&local, &[local.geometry().clone()], 2).unwrap();
    let lists = |first: u32, second: u32| -> Vec<Indices> { vec![[first].into(), [second].into()] };
    let moves = |local: Vec<Indices>, remote: Vec<Indices>| {
        map.moves(&BlockPairs { local: &local, remote: &remote, tokens: None })
    };
    let done = moves(lists(2, 3), lists(9, 0)).unwrap();
    let source = &map.sources()[0];
    // vLLM's count: regions of 10, 4 and 10 blocks, the last one shared by both groups.
    let ids: Vec<u64> = done.ranks[0]
        .pairings
        .iter()
        .flat_map(|pairing| descriptor_ids(source, pairing).0)
        .collect();
    assert_eq!(ids, [2, 16, 13, 17]);
    assert_eq!(moves(lists(9, 3), lists(9, 4)).unwrap_err().kind(), ErrorKind::OutOfBounds);
    assert_eq!(moves(lists(10, 3), lists(9, 3)).unwrap_err().kind(), ErrorKind::OutOfBounds);
    assert_eq!(moves(lists(9, 4), lists(9, 3)).unwrap_err().kind(), ErrorKind::OutOfBounds);
    assert_eq!(moves(vec![[1].into()], vec![[1].into()]).unwrap_err().kind(), ErrorKind::Invalid);
}

// vLLM 8: regions of pipeline stages are collected by (pp, tp), and every rank is required
// vLLM 22: pipeline stages are paired by layer name; missing, duplicate and inconsistent names are
//     rejected
// vLLM 44: each pipeline stage of the peer is a source with its own lanes
// vLLM 47: pushed layers are aligned by name; missing, duplicate and inconsistent names are
//     rejected
#[test]
fn stages_of_a_pipeline_are_paired_by_layer_names() {
    let layers = |range: std::ops::Range<u64>| {
        caches(range.map(|at| layer(&format!("layers.{at}"), 0x100000 * (at + 1), 0)).collect())
            .unwrap()
    };
    let local = layers(0..5);
    let stages = [layers(0..2).geometry().clone(), layers(2..5).geometry().clone()];
    let map = map(&local, &stages, 1).unwrap();
    let lanes: Vec<usize> = map.sources().iter().map(|source| source.lanes().len()).collect();
    assert_eq!(lanes, [2, 3]);
    assert_eq!(map.sources()[1].rank(), WorkerRank { pp: 1, tp: 0 });
    assert_eq!(map.sources()[1].lanes()[0].local.region, 2);
    assert_eq!(map.sources()[1].lanes()[0].remote.region, 0);

    let refused = |stages: &[Geometry], word: &str| {
        let error = self::map(&local, stages, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Incompatible, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    refused(&[stages[0].clone(), layers(2..4).geometry().clone()], "layers.4 is missing");
    refused(&[stages[0].clone(), layers(1..5).geometry().clone()], "layers.1 is in 2 regions");
    refused(
        &[stages[0].clone(), layers(2..6).geometry().clone()],
        "layers.5 is in 1 regions at the peer but in 0 here",
    );
    // Layers that share memory here must share it at the peer.
    let shared =
        caches(vec![layer("layers.0", 0x10000, 0), layer("layers.1", 0x10000, 0)]).unwrap();
    let error = self::map(&shared, &[layers(0..2).geometry().clone()], 1).unwrap_err();
    assert!(error.to_string().contains("shares a region"), "{error}");
    // Without names, the stages cannot be paired.
    let unnamed = |geometry: &Geometry| {
        let regions = geometry
            .regions()
            .iter()
            .map(|region| KvRegion { layers: Vec::new(), ..region.clone() });
        Geometry::new(regions.collect(), KvLayout::Lbhnc, 16, 1, 0).unwrap()
    };
    refused(&[unnamed(&stages[0]), unnamed(&stages[1])], "have no layer names");
    refused(&[unnamed(&stages[0])], "5 regions here and 2 at the peer");
    assert!(self::map(&local, &[unnamed(local.geometry())], 1).is_ok());
    // Groups must match too.
    let five = layers(0..5);
    let other_group = five
        .geometry()
        .regions()
        .iter()
        .cloned()
        .enumerate()
        .map(|(at, region)| KvRegion { group: RegionGroup::Of(at as u32 % 2), ..region });
    refused(&[Geometry::new(other_group.collect(), KvLayout::Lbhnc, 16, 1, 0).unwrap()], "group");
}

// vLLM 21: each version is sent only metadata that it understands
#[test]
fn what_is_advertised_is_what_a_peer_understands() {
    let two_groups = caches(vec![
        layer("layers.0", 0x100000, 0),
        layer("layers.1", 0x100000, 1),
        LayerCache {
            blocks: 4,
            memory: MemoryType::Dram,
            block_stride: 5000,
            ..layer("layers.2", 0x300000, 1)
        },
    ]);
    for (caches, versions) in [
        (two_groups.unwrap(), &[Version::V0_31, Version::V0_32, Version::V0_33][..]),
        (
            caches(vec![layer("layers.0", 0x100000, 0), layer("layers.1", 0x200000, 0)]).unwrap(),
            &Version::SPOKEN[..],
        ),
    ] {
        for version in versions {
            let mut metadata = NixlAgentMetadata::new("decode", *version);
            caches.advertise(&mut metadata, *version).unwrap();
            let told = NixlAgentMetadata::decode(&metadata.encode(), *version).unwrap();
            let geometry = Geometry::advertised(&told).unwrap();
            if *version >= Version::V0_30 {
                assert_eq!(geometry, *caches.geometry(), "{version}");
            } else {
                let layout = if *version < Version::V0_29 { "HND" } else { "LBHNC" };
                assert_eq!(told.kv_cache_layout, layout, "{version}");
                assert!(geometry.regions().iter().all(|region| region.layers.is_empty()));
            }
            let groups = if caches.geometry().regions()[0].layers.len() > 1 { 2 } else { 1 };
            assert!(map(&caches, &[geometry], groups).is_ok(), "{version}");
        }
        if versions.len() < 4 {
            let mut metadata = NixlAgentMetadata::new("decode", Version::V0_20);
            let error = caches.advertise(&mut metadata, Version::V0_20).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Incompatible);
        }
    }
}

#[test]
fn unsupported_metadata_is_rejected_with_a_reason() {
    for (fault, word) in [
        ((|m| m.ssm_sizes = (64, 64)) as fn(&mut NixlAgentMetadata), "state-space"),
        (|m| m.pcp_size = 2, "prefill context"),
        (|m| m.ple_block_len = Some(64), "per-layer"),
    ] {
        let mut metadata = one_row(&["layers.0"], &[4096]);
        fault(&mut metadata);
        let error = Geometry::advertised(&metadata).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(word), "{error}");
    }
}

// vLLM 21: metadata of a live vLLM is parsed as a geometry and written back byte for byte
#[test]
fn golden_captured_metadata_is_a_geometry() {
    let read = |side: &str| {
        let bytes = golden::bytes(&format!("handshake/{side}.agent_metadata.bin"));
        let metadata = NixlAgentMetadata::decode(&bytes, Version::V0_32).unwrap();
        (Geometry::advertised(&metadata).unwrap(), metadata)
    };
    let ((decode, metadata), (prefill, _)) = (read("decode"), read("prefill"));
    let layers =
        decode.regions().iter().zip(&metadata.kv_caches_base_addr).map(|(region, base)| {
            LayerCache {
                name: region.layers[0].clone(),
                tensors: KvTensors::Together(*base),
                blocks: region.blocks,
                block_len: region.block_len,
                block_stride: region.block_stride,
                group: 0,
                heads: Heads::Sharded(2),
                memory: region.memory,
            }
        });
    let own =
        Caches::of_layers(layers.collect(), decode.layout(), decode.block_tokens(), 1, 0).unwrap();
    // CPU_ATTN keeps K transposed, so only another such rank may read it.
    assert_eq!(
        map(&own, std::slice::from_ref(&prefill), 1).unwrap_err().kind(),
        ErrorKind::Incompatible
    );
    let own = own.with_transposed_keys();
    assert_eq!(*own.geometry(), decode);
    let map = map(&own, std::slice::from_ref(&prefill), 1).unwrap();
    assert_eq!(map.sources()[0].lanes().len(), metadata.kv_caches_base_addr.len());
    let rows = remote_rows(&map.sources()[0], &prefill);
    assert!(rows.iter().zip(prefill.regions()).all(|(row, region)| row.address == region.base));
    let mut again = metadata.clone();
    own.advertise(&mut again, Version::V0_32).unwrap();
    assert_eq!(again, metadata);
}
