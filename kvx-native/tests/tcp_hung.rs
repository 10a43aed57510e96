//! A page that does not come: what waits for it, and what does not. Clause P12 has more, with processes.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used)]

mod tcp_pair;

use std::time::{Duration, Instant};

use kvx_core::{Grid, Kind, Memory, Peer, Plan, Region, Transfer};
use kvx_testkit::{HungPage, skip};
use tcp_pair::{CUT_OFF, Pair, agent, pattern};

const LEN: usize = 4 << 20;
/// Of what waits for the page.
const DEADLINE: Duration = Duration::from_millis(500);
/// It is not so, and does not become so.
const STAYS: Duration = Duration::from_millis(300);

fn cannot(test: &str) -> bool {
    let refused = HungPage::refused();
    if let Some(why) = &refused {
        skip(test, why, "run the tests as root");
    }
    refused.is_some()
}

/// Reads all of a region of the peer's into this one.
fn read(peer: &Peer, name: &str, into: &Region, deadline: Duration) -> Transfer {
    let whole = Grid::packed(LEN as u64, 1);
    let from = peer.region(name).unwrap().grid(whole).unwrap().blocks(vec![0]);
    let plan = Plan::read(into.grid(whole).unwrap().blocks(vec![0]), from).unwrap();
    peer.transfer(&plan).deadline(deadline).post().unwrap()
}

#[test]
fn an_owners_page_holds_up_its_region_and_no_other() {
    if cannot("an_owners_page_holds_up_its_region_and_no_other") {
        return;
    }
    let pair = Pair::new(LEN);
    let bytes = pattern(LEN, 9);
    let well = pair.owner.register("well", Memory::owned(bytes.clone())).unwrap();
    let other = agent("other");
    let into = other.register("into", Memory::owned(vec![0; LEN])).unwrap();
    let to_owner = other.connect(pair.owner.metadata().unwrap()).unwrap();
    to_owner.ready(CUT_OFF).wait(CUT_OFF).unwrap();

    let page = HungPage::of(pair.theirs.memory()).unwrap();
    let held_up = read(&pair.peer, "kv", &pair.ours, DEADLINE);
    for _ in 0..20 {
        read(&to_owner, "well", &into, CUT_OFF).wait(CUT_OFF).unwrap();
    }
    assert_eq!(Pair::all(&into), bytes);
    assert!(matches!(held_up.wait(CUT_OFF).unwrap_err().kind(), Kind::TimedOut | Kind::PeerLost));
    // Nobody is in this one, and whoever is in the other may go on to touch it.
    well.revoke(CUT_OFF).wait(CUT_OFF).unwrap();
    assert_eq!(pair.theirs.revoke(STAYS).wait(CUT_OFF).unwrap_err().kind(), Kind::StillShared);
    assert_eq!(kvx_core::quarantined_bytes(), LEN as u64);
    drop(page);
    let until = Instant::now() + CUT_OFF;
    while kvx_core::quarantined_bytes() > 0 {
        assert!(Instant::now() < until, "the memory stays quarantined although the page has come");
        std::thread::sleep(Duration::from_millis(10));
    }
    // The reader connects again and goes on.
    let again = pair.owner.register("again", Memory::owned(pair.bytes.clone())).unwrap();
    let peer = pair.reader.connect(pair.owner.metadata().unwrap()).unwrap();
    read(&peer, "again", &pair.ours, CUT_OFF).wait(CUT_OFF).unwrap();
    assert_eq!(Pair::all(&pair.ours), pair.bytes);
    drop(again);
}
