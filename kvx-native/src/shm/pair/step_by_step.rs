//! Links that end at any packet of their life: of the handshake, of grants with their files, of
//! reads, writes, notifications and revocations, and of their end. And regions that are revoked at
//! any turn of a long transfer.

use kvx_core::Op;
use kvx_testkit::Random;

use super::end::{Resources, alone};
use super::{LONG, MANY, Pair, RegionRole, Role, SMALL, Shape, cut};

/// Slots with grants and loans with files, and without.
const SLOTS: [Shape; 2] =
    [Shape { on_pools: Some(true), ..SMALL }, Shape { on_pools: Some(false), ..MANY }];

/// The end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Closed,
    Broken,
    Killed(Role),
}

const FATES: [Fate; 4] =
    [Fate::Closed, Fate::Broken, Fate::Killed(Role::Initiator), Fate::Killed(Role::Owner)];

/// Runs the life of a link up to `packets` packets. Returns true if it was complete.
fn life(pair: &mut Pair, packets: u64) -> bool {
    let goes_on = |pair: &mut Pair, what, is_so: fn(&Pair) -> bool| {
        let is_over = || cut::moved() >= packets;
        pair.until(what, |pair| is_over() || is_so(pair));
        !is_over()
    };
    pair.connect();
    let begun = goes_on(pair, "a link", |pair| pair.up().is_some());
    let post = |pair: &mut Pair, op| (0..SLOTS.len()).all(|at| pair.post(at, op, op == Op::Write));
    let revoke = |pair: &mut Pair, which| (0..SLOTS.len()).for_each(|at| pair.revoke(at, which));
    begun
        && post(pair, Op::Read)
        && goes_on(pair, "reads", Pair::is_idle)
        && post(pair, Op::Write)
        && goes_on(pair, "writes", Pair::is_idle)
        && {
            pair.notify(100);
            goes_on(pair, "a notification", Pair::is_idle)
        }
        && {
            // The granted regions are revoked during transfers.
            post(pair, Op::Read);
            RegionRole::ALL[1..].iter().for_each(|which| revoke(pair, *which));
            goes_on(pair, "regions that were granted", Pair::is_idle)
        }
        && {
            post(pair, Op::Write);
            revoke(pair, RegionRole::Local);
            goes_on(pair, "regions that were lent", Pair::is_idle)
        }
        && {
            pair.close();
            goes_on(pair, "the end", Pair::is_apart)
        }
}

/// Runs once. Returns true if the life of the link was longer than `packets`.
fn run(fate: Fate, packets: u64) -> bool {
    cut::step_by_step();
    let before = Resources::now();
    let mut pair = Pair::new(Random::seeded(1), &SLOTS);
    let whole = life(&mut pair, packets);
    match fate {
        Fate::Closed => pair.close(),
        Fate::Broken => pair.break_link(),
        Fate::Killed(who) => pair.kill(who),
    }
    cut::off();
    pair.has_ended();
    pair.all_works();
    drop(pair);
    assert_eq!(Resources::now(), before, "a run leaves resources behind");
    !whole
}

fn at_every_packet() {
    for fate in FATES {
        let mut packets = 0;
        loop {
            let ran = std::panic::catch_unwind(|| run(fate, packets));
            if !ran.unwrap_or_else(|_| panic!("{fate:?} at packet {packets}")) {
                break;
            }
            packets += 1;
        }
        assert!(packets > 80, "the link lived for {packets} packets");
    }
}

#[test]
fn a_link_that_ends_at_any_packet_leaves_nothing_behind_and_the_next_one_works() {
    alone(
        module_path!(),
        "a_link_that_ends_at_any_packet_leaves_nothing_behind_and_the_next_one_works",
        at_every_packet,
    );
}

/// Revokes a region after `turns` turns of a transfer that uses it.
fn take_back(op: Op, which: RegionRole, on_pools: bool, turns: u32) {
    let before = Resources::now();
    let slot = Shape { count: 80, on_pools: Some(on_pools), ..LONG };
    let mut pair = Pair::new(Random::seeded(turns.into()), &[slot]);
    pair.connect();
    pair.until("a link", |pair| pair.up().is_some());
    for op in [Op::Read, Op::Write] {
        assert!(pair.post(0, op, false));
        pair.until("the transfers that make the regions known", Pair::is_idle);
    }
    assert!(pair.post(0, op, true));
    for _ in 0..turns {
        pair.turn();
    }
    assert!(!pair.is_idle(), "the transfer takes more than {turns} turns");
    pair.revoke(0, which);
    pair.until("the end of both", Pair::is_idle);
    pair.close();
    pair.has_ended();
    drop(pair);
    assert_eq!(Resources::now(), before, "a run leaves resources behind");
}

fn at_every_turn() {
    cut::off();
    for (op, which) in [
        (Op::Read, RegionRole::Source),
        (Op::Write, RegionRole::Local),
        (Op::Write, RegionRole::Sink),
    ] {
        for (on_pools, turns) in (0..8).map(|number| (number % 2 == 0, number / 2)) {
            let ran = std::panic::catch_unwind(|| take_back(op, which, on_pools, turns));
            assert!(ran.is_ok(), "{op:?}, {which:?}, on pools: {on_pools}, after {turns} turns");
        }
    }
}

#[test]
fn a_region_revoked_in_mid_transfer_is_not_touched_afterwards() {
    alone(
        module_path!(),
        "a_region_revoked_in_mid_transfer_is_not_touched_afterwards",
        at_every_turn,
    );
}
