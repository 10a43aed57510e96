//! Compares kernels that the device's thread launches with their reference in plain Rust.

use std::sync::Arc;

use kvx_core::ErrorKind;
use kvx_gpu::kernels::{DeviceGrid, Swap};
use kvx_gpu::{BlockSelection, DevicePtr, StridedBlocks};
use kvx_stand_in::reference;

use super::{Bench, Test, all_of, filled, pattern, settled};

pub(crate) const ANYWHERE: &[(&str, Test)] = &[
    ("gather_and_scatter_are_each_others_reverse", gather_and_scatter),
    ("more_indices_than_a_table_has", more_indices),
    ("blocks_change_their_layout", permute),
    ("sides_of_different_counts_are_refused", different_counts),
];

pub(crate) const TESTS: &[(&str, Test)] =
    &[("a_gather_and_a_scatter_are_one_launch_each", one_launch_each)];

/// Collects blocks of two grids, spreads them over another pool, and compares with the reference.
pub(crate) fn gather_scatter(bench: &Bench<'_>, indices: &[u32], stride: u64, length: u64) {
    let bytes = pattern(6, 1 << 20);
    let pool = filled(&bench.device, &bytes);
    let count = indices.len() as u64;
    let grids = |base: u64| {
        [0, 1].map(|layer| DeviceGrid {
            base: base + layer * (1 << 19) + layer * 2,
            stride,
            length,
            at: layer * count * length,
        })
    };
    let packed = bench.device.pool((2 * count * length) as usize).build().unwrap();
    let chosen: Arc<[u32]> = indices.into();
    let at = DevicePtr(packed.address());
    // SAFETY: all blocks are in pools that outlive the waits, here and below.
    settled(|done| unsafe { bench.device.gather(at, &grids(pool.address()), &chosen, done) })
        .unwrap();
    let mut expected = vec![0; packed.len()];
    reference::gather(&bytes, &grids(0), indices, &mut expected).unwrap();
    assert!(all_of(&packed) == expected);
    let other = bench.device.pool(1 << 20).build().unwrap();
    // SAFETY: all blocks are in pools that outlive the wait.
    settled(|done| unsafe { bench.device.scatter(at, &grids(other.address()), &chosen, done) })
        .unwrap();
    let mut spread = vec![0; 1 << 20];
    reference::scatter(&mut spread, &grids(0), indices, &expected).unwrap();
    assert!(all_of(&other) == spread);
}

fn gather_and_scatter(bench: &Bench<'_>) {
    let indices: Vec<u32> = (0..100).map(|at| at * 37 % 101).collect();
    gather_scatter(bench, &indices, 4096, 4000);
    gather_scatter(bench, &[3, 1, 2], 17, 13);
}

fn one_launch_each(bench: &Bench<'_>) {
    let before = bench.control.calls(bench.maker.names.launch);
    gather_and_scatter(bench);
    assert_eq!(bench.control.calls(bench.maker.names.launch), before + 4);
}

fn more_indices(bench: &Bench<'_>) {
    let indices: Vec<u32> = (0..20_000).rev().collect();
    gather_scatter(bench, &indices, 24, 20);
}

fn permute(bench: &Bench<'_>) {
    let swaps = [
        Swap::heads_to_tokens(4, 16, 32),
        Swap::tokens_to_heads(4, 16, 32),
        Swap::heads_to_tokens(3, 5, 7),
        Swap::merge(2, 4, 16, 32).unwrap(),
        Swap::split(2, 4, 16, 32).unwrap(),
    ];
    for swap in swaps {
        let length = swap.length().unwrap();
        let stride = length + 6;
        let bytes = pattern(7, (stride * 12) as usize);
        let from = filled(&bench.device, &bytes);
        let to = bench.device.pool(bytes.len()).build().unwrap();
        let indices: Arc<[u32]> = [7, 0, 11, 3].into();
        let at = |base: u64, selection| StridedBlocks { base: DevicePtr(base), stride, selection };
        let source = at(from.address(), BlockSelection::Indices(Arc::clone(&indices)));
        let target = at(to.address(), BlockSelection::First(4));
        // SAFETY: all blocks are in pools that outlive the wait, and those that are written do not
        // overlap.
        settled(|done| unsafe { bench.device.permute(&target, &source, swap, done) }).unwrap();
        let mut expected = vec![0; bytes.len()];
        let place = |indices| reference::BlockLayout { base: 0, stride, indices };
        let (from, to_place) = ((&bytes[..], place(Some(&indices[..]))), place(None));
        reference::permute(from, (&mut expected, to_place), 4, swap).unwrap();
        assert!(all_of(&to) == expected, "{swap:?}");
    }
}

fn different_counts(bench: &Bench<'_>) {
    let side = |count| StridedBlocks {
        base: DevicePtr(4096),
        stride: 64,
        selection: BlockSelection::First(count),
    };
    let swap = Swap::heads_to_tokens(2, 2, 16);
    // SAFETY: the call copies no bytes.
    let error = settled(|done| unsafe { bench.device.permute(&side(1), &side(2), swap, done) })
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

/// For [`super::roles`]: the driver rejects kvx's kernels, but accepts those that a compiler on the
/// machine has compiled.
pub(crate) fn compiled_on_this_machine(bench: &Bench<'_>) {
    let load = bench.maker.names.load;
    bench.control.fail(load, 222, 1);
    gather_and_scatter(bench);
    permute(bench);
    assert_eq!(bench.control.calls(load), 2, "rejected, then accepted");
    assert!(bench.control.calls(bench.maker.names.launch) > 0);
}
