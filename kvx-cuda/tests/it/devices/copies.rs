//! Tests copies: their bytes, the number of driver calls, and when tickets settle.

use kvx_core::DeviceAccess as _;
use kvx_core::backend::{Direction, Hop, Piece};
use kvx_core::{Completion, Memory};

use super::{Bench, Test, all_of, filled, pattern, settled, until, watched};

pub(crate) const ANYWHERE: &[(&str, Test)] = &[
    ("bytes_go_in_and_come_out", bytes_go_in_and_come_out),
    ("nothing_to_copy_settles_at_once", nothing_to_copy_settles_at_once),
];

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("a_grid_is_one_call", a_grid_is_one_call),
    ("pieces_that_continue_each_other_are_one_call", pieces_that_continue_each_other_are_one_call),
    ("scattered_blocks_are_few_calls", scattered_blocks_are_few_calls),
    (
        "scattered_blocks_of_memory_that_is_not_pinned",
        scattered_blocks_of_memory_that_is_not_pinned,
    ),
    ("rows_that_the_driver_rejects_are_copied_without_it", rejected_rows),
    ("hops_are_one_launch", hops_are_one_launch),
    ("more_hops_than_a_table_has", more_hops_than_a_table_has),
    (
        "a_ticket_settles_after_its_copy_and_not_before",
        a_ticket_settles_after_its_copy_and_not_before,
    ),
    ("a_late_event_is_waited_for", a_late_event_is_waited_for),
];

fn bytes_go_in_and_come_out(bench: &Bench<'_>) {
    let pool = bench.device.pool(1 << 20).build().unwrap();
    assert_eq!(pool.kind(), bench.maker.kind);
    assert!(all_of(&pool).iter().all(|byte| *byte == 0), "a new pool is zeroed");
    let bytes = pattern(1, 70_001);
    pool.copy_in(13, &bytes).unwrap();
    let mut back = vec![0; bytes.len()];
    pool.copy_out(13, &mut back).unwrap();
    assert!(back == bytes);
}

/// Returns pieces with consecutive ranges of one host buffer.
fn pieces(memory: &Memory, host: &Memory, blocks: &[(u64, usize)]) -> Vec<Piece> {
    let mut at = 0;
    let piece = |(offset, len): &(u64, usize)| {
        let piece = Piece {
            device: memory.address() + offset,
            host: host.as_ptr().wrapping_add(at),
            len: *len,
        };
        at += len;
        piece
    };
    blocks.iter().map(piece).collect()
}

/// Copies blocks out and, changed, back in. Returns how often each function was called for the
/// first copy.
fn out_and_in(
    bench: &Bench<'_>,
    host: &Memory,
    blocks: &[(u64, usize)],
    functions: &[&str],
) -> Vec<u64> {
    let bytes = pattern(2, 1 << 20);
    let pool = filled(&bench.device, &bytes);
    let total: usize = blocks.iter().map(|(_, len)| len).sum();
    let pieces = pieces(&pool, host, blocks);
    let calls = || functions.iter().map(|name| bench.control.calls(name)).collect::<Vec<_>>();
    let before = calls();
    // SAFETY: the pieces are in the pool and the buffer, which outlive the waits.
    settled(|done| unsafe { bench.device.copy(Direction::ToHost, &pieces, done) }).unwrap();
    let counted = calls().iter().zip(before).map(|(after, before)| after - before).collect();
    let expected: Vec<u8> =
        blocks.iter().flat_map(|(at, len)| &bytes[*at as usize..][..*len]).copied().collect();
    let mut came = vec![0; total];
    host.copy_out(0, &mut came).unwrap();
    assert!(came == expected, "the copied bytes are those of the pool");
    came.iter_mut().for_each(|byte| *byte ^= 0xa5);
    host.copy_in(0, &came).unwrap();
    // SAFETY: the pieces are in the pool and the buffer, which outlive the waits.
    settled(|done| unsafe { bench.device.copy(Direction::ToDevice, &pieces, done) }).unwrap();
    let mut changed = bytes;
    for (at, len) in blocks {
        changed[*at as usize..][..*len].iter_mut().for_each(|byte| *byte ^= 0xa5);
    }
    assert!(
        all_of(&pool) == changed,
        "the blocks are at their positions, and no other byte has changed"
    );
    counted
}

fn a_grid_is_one_call(bench: &Bench<'_>) {
    let host = bench.device.pinned(1 << 20).unwrap();
    let grid: Vec<_> = (0..100).map(|at| (500 + at * 8192, 4096)).collect();
    let calls =
        out_and_in(bench, &host, &grid, &[bench.maker.names.rows, bench.maker.names.launch]);
    assert_eq!(calls, [1, 0]);
}

/// Drivers need not accept distances between rows that they have not chosen.
fn rejected_rows(bench: &Bench<'_>) {
    let host = bench.device.pinned(1 << 20).unwrap();
    let rows = bench.maker.names.rows;
    bench.control.command(&format!("fail {rows} 1 always"));
    let grid: Vec<_> = (0..100).map(|at| (500 + at * 8192, 4096)).collect();
    assert_eq!(out_and_in(bench, &host, &grid, &[rows]), [1]);
    assert_eq!(out_and_in(bench, &host, &grid, &[rows]), [0], "the call is not tried again");
    let bytes = pattern(6, 1 << 20);
    let (from, to) = (filled(&bench.device, &bytes), bench.device.pool(1 << 20).build().unwrap());
    let hop =
        |at: u64| Hop { from: from.address() + at * 9000, to: to.address() + at * 9000, len: 5000 };
    let hops: Vec<_> = (0..100).map(hop).collect();
    // SAFETY: both pools outlive the wait.
    settled(|done| unsafe { bench.device.hop(&hops, done) }).unwrap();
    let copied = all_of(&to);
    assert!((0..100).all(|at| copied[at * 9000..][..5000] == bytes[at * 9000..][..5000]));
    // Other errors are not hidden by further attempts.
    bench.control.command("well");
    let other = (bench.maker.devices)().unwrap().remove(1);
    let pool = other.pool(1 << 20).build().unwrap();
    bench.control.fail(rows, 999, 1);
    let pieces = pieces(&pool, &host, &grid[..8]);
    // SAFETY: the pieces are in the pool and the buffer, which outlive the wait.
    let error =
        settled(|done| unsafe { other.copy(Direction::ToHost, &pieces, done) }).unwrap_err();
    assert_eq!(error.native().map(|native| native.code), Some(999));
}

fn pieces_that_continue_each_other_are_one_call(bench: &Bench<'_>) {
    let host = bench.device.pinned(1 << 20).unwrap();
    let row: Vec<_> = (0..64).map(|at| (100 + at * 1000, 1000)).collect();
    let names = &bench.maker.names;
    let calls = out_and_in(
        bench,
        &host,
        &row,
        &[names.rows, names.launch, names.batch.unwrap_or(names.rows)],
    );
    assert_eq!(calls, [0, 0, 0]);
}

/// Returns blocks that are neither a grid nor contiguous.
fn scattered(count: u64) -> Vec<(u64, usize)> {
    (0..count).map(|at| (at * 2048 + at * at % 700, 1000 + (at * 37 % 300) as usize)).collect()
}

fn scattered_blocks_are_few_calls(bench: &Bench<'_>) {
    let host = bench.device.pinned(1 << 20).unwrap();
    let names = &bench.maker.names;
    let one = names.batch.unwrap_or(names.launch);
    let calls = out_and_in(bench, &host, &scattered(300), &[one, names.rows]);
    assert_eq!(calls, [1, 0]);
}

fn scattered_blocks_of_memory_that_is_not_pinned(bench: &Bench<'_>) {
    let host = Memory::owned(vec![0; 1 << 20]);
    let calls = out_and_in(bench, &host, &scattered(300), &[bench.maker.names.launch]);
    assert_eq!(calls, [0], "kernels cannot access it");
}

/// Copies from one pool to another and checks the bytes. Returns the number of launches.
fn hop(bench: &Bench<'_>, blocks: &[(u64, u64, usize)]) -> u64 {
    let (source, target) = (pattern(3, 1 << 20), pattern(4, 1 << 20));
    let (from, to) = (filled(&bench.device, &source), filled(&bench.device, &target));
    let hops = |(a, b, len): &(u64, u64, usize)| Hop {
        from: from.address() + a,
        to: to.address() + b,
        len: *len,
    };
    let hops: Vec<_> = blocks.iter().map(hops).collect();
    let before = bench.control.calls(bench.maker.names.launch);
    // SAFETY: the hops are in the pools, which outlive the wait, and write each position once.
    settled(|done| unsafe { bench.device.hop(&hops, done) }).unwrap();
    let launches = bench.control.calls(bench.maker.names.launch) - before;
    let mut expected = target;
    for (a, b, len) in blocks {
        expected[*b as usize..][..*len].copy_from_slice(&source[*a as usize..][..*len]);
    }
    assert!(all_of(&to) == expected);
    assert!(all_of(&from) == source);
    launches
}

fn hops_are_one_launch(bench: &Bench<'_>) {
    let blocks: Vec<_> =
        (0..200u64).map(|at| (at * 4001, (at * 71 % 200) * 5000, 1 + at as usize * 19)).collect();
    assert_eq!(hop(bench, &blocks), 1);
    assert_eq!(hop(bench, &[(5, 77, 100_000)]), 0, "one hop is a plain copy of the driver");
    let grid: Vec<_> = (0..100).map(|at| (at * 8192, at * 4096 * 2 + 1, 4096)).collect();
    assert_eq!(hop(bench, &grid), 0, "so is a grid");
}

fn more_hops_than_a_table_has(bench: &Bench<'_>) {
    let blocks: Vec<_> =
        (0..6000u64).map(|at| (at * 130 + at % 3, (5999 - at) * 170, 100)).collect();
    assert_eq!(hop(bench, &blocks), 3);
}

fn a_ticket_settles_after_its_copy_and_not_before(bench: &Bench<'_>) {
    let pool = bench.device.pool(4096).build().unwrap();
    let host = bench.device.pinned(4096).unwrap();
    host.copy_in(0, &[7; 4096]).unwrap();
    let piece = Piece { device: pool.address(), host: host.as_ptr(), len: 4096 };
    bench.control.command("hold");
    let copied = bench.control.calls(bench.maker.names.to_device);
    let tickets: Vec<_> = (0..5).map(|_| watched()).collect();
    let mut outcomes = Vec::new();
    for (outcome, ticket) in tickets {
        // SAFETY: the memory outlives the wait at the end.
        unsafe { bench.device.copy(Direction::ToDevice, &[piece], ticket) };
        outcomes.push(outcome);
    }
    until("the copies are started", || {
        bench.control.calls(bench.maker.names.to_device) == copied + 5
    });
    assert!(
        outcomes.iter().all(|outcome| outcome.lock().unwrap().is_none()),
        "the stream has not moved"
    );
    bench.control.command("release");
    for outcome in &outcomes {
        until("a copy ends", || matches!(*outcome.lock().unwrap(), Some(Ok(()))));
    }
    assert!(all_of(&pool) == [7; 4096]);
}

fn a_late_event_is_waited_for(bench: &Bench<'_>) {
    bench.control.command("late 30000");
    let pool = bench.device.pool(4096).build().unwrap();
    let begun = std::time::Instant::now();
    let (completion, ticket) = Completion::with_ticket();
    let host = bench.device.pinned(4096).unwrap();
    let piece = Piece { device: pool.address(), host: host.as_ptr(), len: 4096 };
    // SAFETY: the memory outlives the wait.
    unsafe { bench.device.copy(Direction::ToDevice, &[piece], ticket) };
    completion.wait_blocking(super::LONG).unwrap();
    assert!(begun.elapsed().as_micros() >= 30_000, "it settled before its event");
}

fn nothing_to_copy_settles_at_once(bench: &Bench<'_>) {
    let (outcome, ticket) = watched();
    // SAFETY: no memory is passed.
    unsafe { bench.device.copy(Direction::ToHost, &[], ticket) };
    assert!(matches!(*outcome.lock().unwrap(), Some(Ok(()))));
}
