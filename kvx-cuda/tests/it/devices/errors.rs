//! Tests that a driver's errors reach the caller with their reason, and that tickets settle.

use kvx_core::DeviceAccess as _;
use kvx_core::ErrorKind;
use kvx_core::backend::{Direction, Hop, Piece};
use kvx_testkit::Child;

use super::{Bench, LONG, ROLE, Test, all_of, filled, pattern, settled};

pub(crate) const ANYWHERE: &[(&str, Test)] = &[
    ("an_address_that_nobody_has_ends_what_is_in_flight_and_what_comes", illegal),
    ("no_room_is_said", no_room_is_said),
];

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("a_refused_copy_says_what_the_driver_said", a_refused_copy_says_what_the_driver_said),
    ("a_list_that_is_refused_in_the_middle_settles_with_the_error", refused_in_the_middle),
    ("an_event_that_is_not_recorded_at_once_is_recorded_later", recorded_later),
    ("a_driver_that_does_not_answer_for_a_while_is_asked_again", asked_again),
    ("a_broken_device_ends_what_is_in_flight_and_what_comes", broken),
    ("a_driver_that_never_answers_costs_memory_and_nothing_else", never_answers),
    ("an_allocation_that_is_refused_is_said", a_refused_allocation),
    ("an_error_has_its_name_once_in_every_release", named_once),
    ("without_kernels_scattered_blocks_are_copied_one_by_one", without_kernels),
    ("no_library_no_device_and_an_old_library_are_unavailable", unavailable),
];

fn a_refused_copy_says_what_the_driver_said(bench: &Bench<'_>) {
    let pool = bench.device.pool(4096).build().unwrap();
    bench.control.fail(bench.maker.names.to_device, 1, 1);
    let error = pool.copy_in(0, &[1; 64]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Native);
    let native = error.native().expect("the driver gave a code");
    assert_eq!(native.code, 1);
    assert!(native.text.to_lowercase().contains("invalid"), "{error}");
    pool.copy_in(0, &[1; 64]).unwrap();
}

fn refused_in_the_middle(bench: &Bench<'_>) {
    let bytes = pattern(5, 65536);
    let pool = filled(&bench.device, &bytes);
    let host = bench.device.pinned(65536).unwrap();
    let piece = |at: usize| Piece {
        device: pool.address() + at as u64 * 9000,
        host: host.as_ptr().wrapping_add(at * at * 1000),
        len: 500,
    };
    let pieces: Vec<_> = (0..5).map(piece).collect();
    bench.control.command(&format!("fail {} 999 1 3", bench.maker.names.to_device));
    bench.control.command("delay 3000");
    // SAFETY: the memory outlives the wait.
    let error = settled(|done| unsafe { bench.device.copy(Direction::ToDevice, &pieces, done) })
        .unwrap_err();
    assert_eq!(error.native().map(|native| native.code), Some(999));
    // The ticket has settled, so the three copies that were started have ended and the bytes no
    // longer change.
    let now = all_of(&pool);
    for at in 0..3 {
        assert!(now[at * 9000..][..500].iter().all(|byte| *byte == 0), "piece {at} was started");
    }
    assert!(now[3 * 9000..][..500] == bytes[3 * 9000..][..500]);
}

fn recorded_later(bench: &Bench<'_>) {
    let pool = bench.device.pool(4096).build().unwrap();
    bench.control.fail(bench.maker.names.record, 999, 3);
    pool.copy_in(0, &[9; 4096]).unwrap();
    assert!(all_of(&pool) == [9; 4096]);
}

fn asked_again(bench: &Bench<'_>) {
    let pool = bench.device.pool(4096).build().unwrap();
    bench.control.fail(bench.maker.names.query, 999, 5);
    pool.copy_in(0, &[8; 4096]).unwrap();
    assert!(all_of(&pool) == [8; 4096]);
}

/// Runs in its own process, because the device ends all of its work.
fn illegal(_: &Bench<'_>) {
    let child = Child::start_self(ROLE, "illegal").expect("a process starts");
    assert_eq!(child.hear(LONG).expect("it says how it went"), "all tickets settled");
}

/// Runs in its own process, because a driver that has failed stays so.
fn broken(_: &Bench<'_>) {
    let child = Child::start_self(ROLE, "broken").expect("a process starts");
    assert_eq!(child.hear(LONG).expect("it says how it went"), "all tickets settled");
}

/// Runs in its own process, because the quarantined memory stays so.
fn never_answers(_: &Bench<'_>) {
    let child = Child::start_self(ROLE, "silent").expect("a process starts");
    assert_eq!(child.hear(LONG).expect("it says how it went"), "lost one copy");
}

fn no_room_is_said(bench: &Bench<'_>) {
    let error = bench.device.pool(1 << 40).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    let error = bench.device.pool(0).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

fn a_refused_allocation(bench: &Bench<'_>) {
    bench.control.fail(bench.maker.names.allocate, 2, 1);
    assert_eq!(bench.device.pool(64).build().unwrap_err().kind(), ErrorKind::Exhausted);
}

/// Runs in separate processes, because a library has one version.
fn named_once(bench: &Bench<'_>) {
    for release in bench.maker.releases {
        let child = Child::start_self(ROLE, &format!("named {release}")).expect("a process starts");
        let text = child.hear(LONG).expect("it says the driver's text");
        let name = text.split(':').next().unwrap();
        assert!(name.to_lowercase().ends_with("value"), "{release}: {text}");
        assert_eq!(text.matches(name).count(), 1, "{release}: {text}");
    }
}

/// For [`super::roles`]: returns the driver's name and text of an error.
pub(crate) fn text_of_an_error(bench: &Bench<'_>) -> String {
    bench.control.fail(bench.maker.names.allocate, 1, 1);
    let error = bench.device.pool(64).build().unwrap_err();
    error.native().expect("the driver gave a code").text.to_string()
}

fn without_kernels(_: &Bench<'_>) {
    let child = Child::start_self(ROLE, "without-kernels").expect("a process starts");
    assert_eq!(child.hear(LONG).expect("it says how it went"), "copied, not permuted");
}

fn unavailable(_: &Bench<'_>) {
    for (role, reason, cure) in [
        ("unavailable nowhere", "not found", "_LIB"),
        ("unavailable no-device", "no", "container"),
        ("unavailable too-old", "kvx needs", "install"),
        ("unavailable other-library", "no symbol", "too old"),
    ] {
        let child = Child::start_self(ROLE, role).expect("a process starts");
        let why =
            child.hear(LONG).expect("a process without a device says why, and does not panic");
        assert!(why.contains(reason) && why.contains(cure), "{role}: {why}");
    }
}

/// For [`super::roles`]: it is unknown whether the copy has ended, so its ticket is dropped; later
/// copies work.
pub(crate) fn say_nothing(bench: &Bench<'_>) {
    let pool = bench.device.pool(4096).build().unwrap();
    bench.control.command(&format!("fail {} 999 always", bench.maker.names.query));
    assert_eq!(pool.copy_in(0, &[1; 64]).unwrap_err().kind(), ErrorKind::Forgotten);
    bench.control.command("well");
    pool.copy_in(0, &[2; 64]).unwrap();
    assert!(all_of(&pool)[..64] == [2; 64]);
}

/// For [`super::roles`]: copies fail with the driver's error, and so do all later ones.
pub(crate) fn break_the_device(bench: &Bench<'_>) {
    let pool = bench.device.pool(1 << 20).build().unwrap();
    let host = bench.device.pinned(1 << 20).unwrap();
    let piece = Piece { device: pool.address(), host: host.as_ptr(), len: 1 << 20 };
    bench.control.command("delay 20000");
    bench.control.command(&format!("fail {} 700 always", bench.maker.names.query));
    let outcomes: Vec<_> = (0..4)
        .map(|at| {
            let (outcome, ticket) = super::watched();
            // SAFETY: the memory is never freed, because the process ends first.
            unsafe {
                match at % 2 {
                    0 => bench.device.copy(Direction::ToDevice, &[piece], ticket),
                    _ => {
                        let hop =
                            Hop { from: pool.address(), to: pool.address() + 4096, len: 4096 };
                        bench.device.hop(&[hop], ticket);
                    }
                }
            }
            outcome
        })
        .collect();
    for outcome in outcomes {
        super::until("a ticket settles", || outcome.lock().unwrap().is_some());
        let result = outcome.lock().unwrap().take().unwrap();
        assert_eq!(result.unwrap_err().native().map(|native| native.code), Some(700));
    }
    let error = pool.copy_in(0, &[1]).unwrap_err();
    assert_eq!(error.native().map(|native| native.code), Some(700));
    assert!(error.to_string().contains("start the process again"), "{error}");
    std::mem::forget((pool, host));
}

/// For [`super::roles`]: a kernel reads unmapped memory, which ends all work on the device.
pub(crate) fn reach_where_nothing_is(bench: &Bench<'_>) {
    let pool = bench.device.pool(1 << 20).build().unwrap();
    let nowhere = 1 << 44;
    // Neither contiguous nor of equal length: not a grid, so a launch.
    let hop = |at: u64| Hop {
        from: nowhere + at * 10_000,
        to: pool.address() + at * 20_000,
        len: 1000 + at as usize * 16,
    };
    let hops: Vec<_> = (0..8).map(hop).collect();
    // SAFETY: no memory of this program is read, and the pool is never freed, because the process
    // ends first.
    let error = settled(|done| unsafe { bench.device.hop(&hops, done) }).unwrap_err();
    assert!(error.to_string().contains("start the process again"), "{error}");
    let error = pool.copy_in(0, &[1]).unwrap_err();
    assert!(error.to_string().contains("start the process again"), "{error}");
    std::mem::forget(pool);
}
