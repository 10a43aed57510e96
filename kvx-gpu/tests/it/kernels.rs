//! Tests that the kernels' source, run on the host, does the same as the reference in Rust.

mod on_host;

use kvx_core::ErrorKind;
use kvx_core::backend::Hop;
use kvx_gpu::kernels::{
    DeviceGrid, ENTRIES, Launch, LaunchBlocks, PTX, SOURCE, Swap, encode_grids, encode_hops,
};
use kvx_stand_in::reference::{self, BlockLayout};
use kvx_testkit::test;
use proptest::prelude::*;

use on_host::{OnHost, compiled};

/// Returns bytes that differ from adjacent bytes and from those of another seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Bytes at an address with a given offset from a multiple of 16.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new(content: &[u8], beyond: usize) -> Self {
        let mut bytes = vec![0xee; content.len() + 64];
        let start = bytes.as_ptr().align_offset(16) + beyond;
        bytes[start..start + content.len()].copy_from_slice(content);
        Aligned { bytes, start }
    }

    fn address(&mut self) -> u64 {
        self.bytes[self.start..].as_mut_ptr() as u64
    }

    /// Returns the content, after checking that the bytes around it are unchanged.
    fn content(&self, len: usize) -> &[u8] {
        let (before, rest) = self.bytes.split_at(self.start);
        assert!(
            before.iter().chain(&rest[len..]).all(|byte| *byte == 0xee),
            "bytes around it were written"
        );
        &rest[..len]
    }
}

/// Returns the launch with its own grid and with others, which must have the same effect.
fn with_grids(launch: Launch) -> Vec<Launch> {
    let grids = [launch.grid, [1, 1, 1], [3, 2, 2]];
    grids.into_iter().map(|grid| Launch { grid, ..launch.clone() }).collect()
}

#[test]
fn the_compiled_kernels_take_what_is_launched() {
    let place = LaunchBlocks { base: 0, stride: 0, indices: 0 };
    let swap = Swap::heads_to_tokens(2, 3, 4);
    let launches = [
        Launch::grids(true, 0, 0, &[], 0, 0),
        Launch::grids(false, 0, 0, &[], 0, 0),
        Launch::hops(0, &[]),
        Launch::permute(place, place, 0, swap).expect("a small block"),
    ];
    assert_eq!(launches.each_ref().map(|launch| launch.entry), ENTRIES);
    for launch in launches {
        assert!(launch.grid.iter().all(|blocks| *blocks > 0), "{launch:?}");
        let entry = launch.entry;
        assert!(SOURCE.contains(&format!("\n{entry}(")), "{entry}");
        let head = PTX.split_once(&format!(".visible .entry {entry}(")).expect(entry).1;
        let parameters = head.split_once(')').expect("a list of parameters").0;
        assert_eq!(parameters.matches(".param .u64").count(), launch.parameters.len(), "{entry}");
    }
    assert_eq!(PTX.matches(".visible .entry").count(), ENTRIES.len());
}

#[test]
fn blocks_of_four_gigabytes_are_not_permuted() {
    let place = LaunchBlocks { base: 0, stride: 0, indices: 0 };
    for swap in
        [Swap::heads_to_tokens(1 << 16, 1 << 16, 1), Swap::heads_to_tokens(1 << 32, 1 << 32, 2)]
    {
        let error = Launch::permute(place, place, 1, swap).expect_err("too much");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    assert!(
        Launch::permute(place, place, 1, Swap::heads_to_tokens(1 << 16, (1 << 16) - 1, 1)).is_ok()
    );
}

/// Returns small shapes with elements of 1, 2 and 4 bytes, and with whole rows of them.
fn shapes() -> impl Iterator<Item = Swap> {
    let runs = [1, 2, 3, 4, 6, 8, 16, 20, 48];
    let dimensions = (1..=2).flat_map(|outer| {
        (1..=4).flat_map(move |rows| (1..=5).map(move |columns| (outer, rows, columns)))
    });
    dimensions
        .flat_map(move |(outer, rows, columns)| runs.map(|run| Swap { outer, rows, columns, run }))
}

#[test]
fn every_byte_of_a_permuted_block_is_at_its_computed_position() {
    // Two heads of three tokens of one two-byte element.
    let heads_first = [1, 1, 2, 2, 3, 3, 11, 11, 12, 12, 13, 13];
    let mut tokens_first = [0; 12];
    reference::permute_block(&heads_first, &mut tokens_first, Swap::heads_to_tokens(2, 3, 2))
        .expect("the right lengths");
    assert_eq!(tokens_first, [1, 1, 11, 11, 2, 2, 12, 12, 3, 3, 13, 13]);
    for swap in shapes() {
        let from = pattern(swap.length().expect("small") as usize, 1);
        let mut to = vec![0; from.len()];
        reference::permute_block(&from, &mut to, swap).expect("the right lengths");
        let Swap { outer, rows, columns, run } = swap;
        for (plane, row, column) in (0..outer)
            .flat_map(|p| (0..rows).flat_map(move |r| (0..columns).map(move |c| (p, r, c))))
        {
            for byte in 0..run {
                let before = ((plane * rows + row) * columns + column) * run + byte;
                let after = ((plane * columns + column) * rows + row) * run + byte;
                assert_eq!(to[after as usize], from[before as usize], "{swap:?}");
            }
        }
        let mut back = vec![0; from.len()];
        reference::permute_block(&to, &mut back, swap.back()).expect("the right lengths");
        assert_eq!(back, from, "{swap:?}");
    }
}

/// Sub-blocks by definition: token `t` of head `h` is in sub-block `t / small`, at `t % small`.
#[test]
fn sub_blocks_are_merged_and_split_again() {
    for (ratio, heads, small, content) in [(1, 1, 1, 1), (2, 3, 2, 2), (3, 2, 4, 4), (4, 5, 1, 8)] {
        let tokens = ratio * small;
        let parts = pattern((heads * tokens * content) as usize, 2);
        let token_of = |head: u64, token: u64| {
            let at = ((token / small * heads + head) * small + token % small) * content;
            &parts[at as usize..(at + content) as usize]
        };
        let heads_first: Vec<u8> = (0..heads)
            .flat_map(|head| (0..tokens).flat_map(move |token| token_of(head, token).to_vec()))
            .collect();
        let tokens_first: Vec<u8> = (0..tokens)
            .flat_map(|token| (0..heads).flat_map(move |head| token_of(head, token).to_vec()))
            .collect();
        let swapped = |swap: Swap, from: &[u8]| {
            let mut to = vec![0; from.len()];
            reference::permute_block(from, &mut to, swap).expect("the right lengths");
            to
        };
        let of = |make: fn(u64, u64, u64, u64) -> kvx_core::Result<Swap>| {
            make(ratio, heads, tokens, content).expect("the ratio divides the tokens")
        };
        assert_eq!(swapped(of(Swap::merge), &parts), heads_first);
        assert_eq!(swapped(of(Swap::merge_to_tokens), &parts), tokens_first);
        assert_eq!(swapped(of(Swap::split), &heads_first), parts);
        assert_eq!(
            swapped(Swap::heads_to_tokens(heads, tokens, content), &heads_first),
            tokens_first
        );
        assert_eq!(
            swapped(Swap::tokens_to_heads(heads, tokens, content), &tokens_first),
            heads_first
        );
    }
    for (ratio, tokens) in [(0, 4), (3, 4), (5, 4)] {
        for make in [Swap::merge, Swap::split, Swap::merge_to_tokens] {
            assert_eq!(
                make(ratio, 2, tokens, 2).expect_err("the ratio does not divide the tokens").kind(),
                ErrorKind::Invalid
            );
        }
    }
}

#[test]
fn the_reference_rejects_blocks_out_of_bounds() {
    let grid = DeviceGrid { base: 8, stride: 16, length: 8, at: 0 };
    let mut packed = [0; 16];
    let mut region = [0; 48];
    assert!(reference::gather(&region, &[grid], &[0, 2], &mut packed).is_ok());
    let wrong = [
        (DeviceGrid { base: 9, ..grid }, 2),
        (grid, 3),
        (grid, u32::MAX),
        (DeviceGrid { stride: u64::MAX, ..grid }, 1),
        (DeviceGrid { base: u64::MAX, ..grid }, 0),
        (DeviceGrid { length: u64::MAX, ..grid }, 0),
        (DeviceGrid { at: 1, ..grid }, 0),
        (DeviceGrid { at: u64::MAX, ..grid }, 0),
    ];
    for (grid, index) in wrong {
        let read = reference::gather(&region, &[grid], &[0, index], &mut packed);
        assert_eq!(read.expect_err("beyond").kind(), ErrorKind::OutOfBounds, "{grid:?} {index}");
        let written = reference::scatter(&mut region, &[grid], &[0, index], &packed);
        assert_eq!(written.expect_err("beyond").kind(), ErrorKind::OutOfBounds, "{grid:?} {index}");
    }
    for hop in [
        Hop { from: 41, to: 0, len: 8 },
        Hop { from: 0, to: 9, len: 8 },
        Hop { from: u64::MAX, to: 0, len: 1 },
        Hop { from: 0, to: 0, len: usize::MAX },
    ] {
        let error = reference::hops(&region, &mut packed, &[hop]).expect_err("beyond");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    }
    let place = BlockLayout { base: 0, stride: 8, indices: None };
    let swap = Swap::heads_to_tokens(2, 2, 2);
    assert!(reference::permute((&region, place), (&mut packed, place), 2, swap).is_ok());
    for (count, from, to) in [
        (3, place, place),
        (2, BlockLayout { indices: Some(&[1]), ..place }, place),
        (1, place, BlockLayout { indices: Some(&[2]), ..place }),
    ] {
        let error = reference::permute((&region, from), (&mut packed, to), count, swap)
            .expect_err("beyond");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    }
}

/// Compares a gather and a scatter of the source with the reference. `beyond`: the offset of
/// addresses from a multiple of 16.
fn compare_over_grids(
    on_host: &OnHost,
    grids: &[DeviceGrid],
    indices: &[u32],
    region: usize,
    beyond: usize,
) {
    let len: u64 = grids.iter().map(|grid| grid.length * indices.len() as u64).sum();
    let [content, spread] = [pattern(region, 3), pattern(len as usize, 4)];
    let mut gathered = vec![0; len as usize];
    reference::gather(&content, grids, indices, &mut gathered).expect("within bounds");
    let mut scattered = content.clone();
    reference::scatter(&mut scattered, grids, indices, &spread).expect("within bounds");

    let table = |base: u64| -> Vec<DeviceGrid> {
        grids.iter().map(|grid| DeviceGrid { base: base + grid.base, ..*grid }).collect()
    };
    let launches = |base: u64, packed: u64, gather: bool| {
        let table = table(base);
        let encoded = Aligned::new(&encode_grids(&table), 0);
        let address = encoded.bytes[encoded.start..].as_ptr() as u64;
        let (at, count) = (indices.as_ptr() as u64, indices.len());
        (with_grids(Launch::grids(gather, packed, address, &table, at, count)), encoded)
    };
    let turns = with_grids(Launch::hops(0, &[])).len();
    for turn in 0..turns {
        let mut source = Aligned::new(&content, beyond);
        let mut packed = Aligned::new(&vec![0; len as usize], beyond);
        let (launch, _table) = launches(source.address(), packed.address(), true);
        // SAFETY: the reference found all blocks within the bounds of the two.
        unsafe { on_host.run(&launch[turn]) };
        assert!(
            packed.content(len as usize) == gathered,
            "gather {grids:?} {indices:?} {:?}",
            launch[turn]
        );

        let mut target = Aligned::new(&content, beyond);
        let mut packed = Aligned::new(&spread, beyond);
        let (launch, _table) = launches(target.address(), packed.address(), false);
        // SAFETY: the reference found all blocks within the bounds of the two.
        unsafe { on_host.run(&launch[turn]) };
        assert!(
            target.content(region) == scattered,
            "scatter {grids:?} {indices:?} {:?}",
            launch[turn]
        );
    }
}

#[test]
fn gather_and_scatter_do_what_the_reference_does() {
    let Some(on_host) = compiled("gather_and_scatter_do_what_the_reference_does") else { return };
    let orders: [&[u32]; 4] = [&[], &[0], &[3, 0, 2], &[0, 1, 2, 3]];
    for length in [1, 2, 3, 4, 7, 8, 16, 17, 48, 4095, 4096, 16_384, 16_384 + 16 + 5] {
        for gap in [0, 16, 3] {
            for beyond in [0, 1, 2, 4, 8] {
                let stride = length + gap;
                let grid = DeviceGrid { base: 0, stride, length, at: 0 };
                for indices in orders {
                    let second =
                        DeviceGrid { base: 4 * stride, at: length * indices.len() as u64, ..grid };
                    let region = 8 * stride as usize;
                    compare_over_grids(on_host, &[grid], indices, region, beyond);
                    compare_over_grids(on_host, &[grid, second], indices, region, beyond);
                }
            }
        }
    }
}

#[test]
fn hops_do_what_the_reference_does() {
    let Some(on_host) = compiled("hops_do_what_the_reference_does") else { return };
    let table = [
        (0, 5, 0),
        (1, 0, 3),
        (16, 16, 64),
        (200, 100, 1),
        (300, 128, 8192),
        (8, 8400, 8),
        (12, 8420, 9),
    ];
    let table = table.map(|(from, to, len)| Hop { from, to, len });
    let source = pattern(10_000, 5);
    let mut expected = vec![0; 9000];
    reference::hops(&source, &mut expected, &table).expect("within bounds");
    for turn in 0..with_grids(Launch::hops(0, &table)).len() {
        let mut from = Aligned::new(&source, 0);
        let mut to = Aligned::new(&vec![0; 9000], 0);
        let [source, target] = [from.address(), to.address()];
        let placed =
            table.map(|hop| Hop { from: source + hop.from, to: target + hop.to, len: hop.len });
        let mut encoded = Aligned::new(&encode_hops(&placed), 0);
        let launch = &with_grids(Launch::hops(encoded.address(), &placed))[turn];
        // SAFETY: the reference found all ranges within the bounds of the two.
        unsafe { on_host.run(launch) };
        assert!(to.content(9000) == expected, "{launch:?}");
    }
}

#[test]
fn permutations_do_what_the_reference_does() {
    let Some(on_host) = compiled("permutations_do_what_the_reference_does") else { return };
    let lists: [Option<&[u32]>; 2] = [None, Some(&[2, 0])];
    let large = [
        Swap { outer: 1, rows: 8, columns: 16, run: 256 },
        Swap { outer: 2, rows: 8, columns: 9, run: 34 },
    ];
    for (swap, lists) in shapes()
        .chain(large)
        .flat_map(|swap| lists.map(|from| (swap, from)))
        .flat_map(|(swap, from)| lists.map(|to| (swap, (from, to))))
    {
        let (from_list, to_list) = lists;
        let length = swap.length().expect("small");
        let stride = length + 16 - length % 16;
        let region = 3 * stride as usize;
        for beyond in [0, 1, 2, 4, 8] {
            let content = pattern(region, 6);
            let place = |indices| BlockLayout { base: 0, stride, indices };
            let mut expected = vec![0; region];
            reference::permute(
                (&content, place(from_list)),
                (&mut expected, place(to_list)),
                2,
                swap,
            )
            .expect("within bounds");
            let [mut from, mut to] =
                [Aligned::new(&content, beyond), Aligned::new(&vec![0; region], beyond)];
            let list = |list: Option<&[u32]>| list.map_or(0, |list| list.as_ptr() as u64);
            let source = LaunchBlocks { base: from.address(), stride, indices: list(from_list) };
            let target = LaunchBlocks { base: to.address(), stride, indices: list(to_list) };
            for launch in
                with_grids(Launch::permute(target, source, 2, swap).expect("a small block"))
            {
                to.bytes[to.start..to.start + region].fill(0);
                // SAFETY: the reference found all blocks within the bounds of the two.
                unsafe { on_host.run(&launch) };
                assert!(to.content(region) == expected, "{swap:?} {launch:?}");
            }
        }
    }
}

/// Generates disjoint grids of a grid set with their packed positions, indices, and the number of
/// bytes of the region.
fn grid_sets() -> impl Strategy<Value = (Vec<DeviceGrid>, Vec<u32>, usize)> {
    let grids = prop::collection::vec((1_u64..40, 0_u64..20), 1..4);
    let indices = Just((0_u32..6).collect::<Vec<_>>()).prop_shuffle().prop_flat_map(|all| {
        (Just(all), 0_usize..=6).prop_map(|(all, count)| all[..count].to_vec())
    });
    (grids, indices).prop_map(|(sizes, indices)| {
        let [mut base, mut at] = [0; 2];
        let grids = sizes.into_iter().map(|(length, gap)| {
            let grid = DeviceGrid { base, stride: length + gap, length, at };
            base += 6 * grid.stride;
            at += length * indices.len() as u64;
            grid
        });
        (grids.collect(), indices, base as usize)
    })
}

fn many_cases() -> ProptestConfig {
    ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn kernels_and_reference_agree_on_any_grid_set() {
    let Some(on_host) = compiled("kernels_and_reference_agree_on_any_grid_set") else { return };
    proptest!(many_cases(), |((grids, indices, len) in grid_sets(), beyond in 0_usize..16)| {
        compare_over_grids(on_host, &grids, &indices, len, beyond);
    });
}

proptest! {
    #![proptest_config(many_cases())]

    #[test]
    fn gathered_blocks_are_scattered_to_their_original_positions((grids, indices, len) in grid_sets(), seed: u64) {
        let content = pattern(len, seed);
        let packed_len: u64 = grids.iter().map(|grid| grid.length * indices.len() as u64).sum();
        let mut packed = vec![0; packed_len as usize];
        reference::gather(&content, &grids, &indices, &mut packed).expect("within bounds");
        let mut target = vec![0; len];
        reference::scatter(&mut target, &grids, &indices, &packed).expect("within bounds");
        // The chosen blocks have been written, and nothing else.
        let mut expected = vec![0; len];
        for (grid, index) in grids.iter().flat_map(|grid| indices.iter().map(move |index| (grid, *index))) {
            let start = (grid.base + u64::from(index) * grid.stride) as usize;
            let block = start..start + grid.length as usize;
            expected[block.clone()].copy_from_slice(&content[block]);
        }
        prop_assert_eq!(target, expected);
    }

    #[test]
    fn a_permutation_loses_nothing(
        (outer, rows, columns, run) in (1_u64..4, 1_u64..9, 1_u64..9, 1_u64..33),
        seed: u64,
    ) {
        let swap = Swap { outer, rows, columns, run };
        let from = pattern(swap.length().expect("small") as usize, seed);
        let [mut there, mut back] = [vec![0; from.len()], vec![0; from.len()]];
        reference::permute_block(&from, &mut there, swap).expect("the right lengths");
        reference::permute_block(&there, &mut back, swap.back()).expect("the right lengths");
        prop_assert_eq!(back, from);
    }
}
