//! What decides, and what two agents of kvx post in fact.

use std::ops::Range;
use std::sync::Mutex;

use kvx_core::{Agent, Grid, Memory, Options, Plan, Registry};

use super::*;
use crate::{Rixl, wheel};

const PATIENCE: Duration = Duration::from_secs(10);

/// A slice has copied within its post, and its transfer goes on.
fn between_slices() -> Slicing {
    let mut slicing = Slicing::default();
    slicing.posted(true, false);
    slicing
}

/// However long this test is kept from its core, the last message has only just gone.
fn just_gone(slicing: &mut Slicing) {
    slicing.told = slicing.told.map(|told| told + 60 * PATIENCE);
}

/// The longest slices of transfers of any size.
fn all(slicing: &mut Slicing) -> [u64; 4] {
    [SHORT, WHOLE, WHOLE + 1, u64::MAX].map(|transfer| slicing.most(transfer))
}

const QUIET: [u64; 4] = [WHOLE, WHOLE, LONG, LONG];

#[test]
fn messages_that_flow_make_slices_short_until_they_stop() {
    let mut slicing = between_slices();
    slicing.told();
    just_gone(&mut slicing);
    assert_eq!(all(&mut slicing), QUIET, "one is not many");
    slicing.told();
    just_gone(&mut slicing);
    assert_eq!(all(&mut slicing), [WHOLE, SHORT, SHORT, SHORT]);
    slicing.posted(true, true);
    assert_eq!(all(&mut slicing), [WHOLE, SHORT, SHORT, SHORT], "also those of the next transfer");
    slicing.told = Instant::now().checked_sub(FLOWS_WITHIN);
    assert_eq!(all(&mut slicing), QUIET);
    slicing.posted(true, false);
    slicing.told();
    assert_eq!(all(&mut slicing), QUIET, "it begins anew");
}

#[test]
fn messages_that_wait_for_no_slice_change_nothing() {
    for (ended, last) in [(false, false), (true, true), (false, true)] {
        let mut slicing = Slicing::default();
        for _ in 0..2 {
            slicing.told();
            slicing.told();
            slicing.posted(ended, last);
        }
        assert_eq!(all(&mut slicing), QUIET, "{ended} {last}");
    }
}

/// What this process has posted of one transfer, and beside which of its slices messages flow.
static POSTED: Mutex<(Vec<u64>, Range<usize>)> = Mutex::new((Vec::new(), 0..0));

/// A slice of so many bytes was posted. Whatever has happened before, messages flow beside the next one, or none do.
pub(crate) fn posted(slicing: &mut Slicing, bytes: u64) {
    let (slices, beside) = &mut *POSTED.lock().unwrap();
    slices.push(bytes);
    *slicing = Slicing::default();
    if beside.contains(&slices.len()) {
        *slicing = Slicing { told: Some(Instant::now()), flows: true, ..Slicing::default() };
        just_gone(slicing);
    }
}

/// Longer than any slice, and of no whole number of them.
const BLOCK: usize = 640 << 10;
const BLOCKS: u32 = 12;
const LEN: usize = BLOCK * BLOCKS as usize;

fn agent(name: &str) -> Agent {
    let mut registry = Registry::new();
    registry.add(Rixl).expect("the first");
    let options = Options::parse(r#"{"rixl": {"params": {"engine_config": "NET_DEVICES=lo"}}}"#);
    let builder = Agent::builder(name).backends(["RIXL"]).options(options.expect("well formed"));
    builder.build(&registry).expect("the wheel")
}

/// Transfers of plans that keep their slices: beside messages they go on in short ones, from wherever they are, and
/// afterwards the kept ones are back. Each byte is moved once all the while.
fn beside_messages() {
    let (near, far) = (agent("near"), agent("far"));
    let content: Vec<u8> = (0..LEN as u64 / 8).flat_map(u64::to_le_bytes).collect();
    let blank = vec![0; LEN];
    let mut found = vec![0; LEN];
    let ours = near.register("kv", Memory::owned(blank.clone())).expect("registered");
    let _theirs = far.register("kv", Memory::owned(content.clone())).expect("registered");
    let peer = near.connect(&far.metadata().expect("bytes")).expect("well formed");
    peer.ready(PATIENCE).wait(PATIENCE).expect("it lives");
    let grid = Grid::packed(BLOCK as u64, BLOCKS);
    let scattered: Vec<u32> = (0..BLOCKS).map(|at| at * 5 % BLOCKS).collect();
    let remote = peer.region("kv").and_then(|region| region.grid(grid)).expect("it is there");
    let local = ours.grid(grid).expect("it fits");
    let order: Vec<u32> = (0..BLOCKS).collect();
    let planned = || Plan::read(local.blocks(&order[..]), remote.blocks(&scattered[..])).expect("a plan");

    // What begins in short slices is moved after what has ended in them.
    let mut moves = |plan: &Plan, beside: Range<usize>| {
        *POSTED.lock().unwrap() = (Vec::new(), beside);
        ours.copy_in(0, &blank).expect("it fits");
        let transfer = peer.transfer(plan).deadline(PATIENCE).post().expect("posted");
        transfer.wait(PATIENCE).expect("moved");
        ours.copy_out(0, &mut found).expect("it fits");
        for (here, there) in found.chunks(BLOCK).zip(&scattered) {
            assert!(here == &content[*there as usize * BLOCK..][..BLOCK], "wrong bytes");
        }
        let slices = std::mem::take(&mut POSTED.lock().unwrap().0);
        assert_eq!(slices.iter().sum::<u64>(), LEN as u64, "{slices:?}");
        slices
    };
    let none = || 0..0;
    let plan = planned();
    let quiet = moves(&plan, none());
    assert_eq!(quiet.iter().max(), Some(&LONG));
    assert_eq!(moves(&plan, none()), quiet, "those that were kept");

    for from in 1..quiet.len() {
        let fresh = planned();
        for plan in [&plan, &fresh] {
            let slices = moves(plan, from..usize::MAX);
            assert_eq!(slices[..from], quiet[..from]);
            assert!(slices[from..].iter().all(|slice| *slice <= SHORT), "{from}: {slices:?}");
            let slices = moves(plan, 0..from);
            assert!(slices[..from].iter().all(|slice| *slice <= SHORT), "{from}: {slices:?}");
            assert!(slices[from..].contains(&LONG), "{from}: {slices:?}");
        }
        for plan in [&plan, &fresh, &fresh] {
            assert_eq!(moves(plan, none()), quiet, "{from}");
        }
    }
}

#[test]
fn a_transfer_goes_on_in_short_slices_beside_messages_and_in_long_ones_after() {
    const NAME: &str =
        "slicing::tests::a_transfer_goes_on_in_short_slices_beside_messages_and_in_long_ones_after";
    wheel::alone(NAME, beside_messages);
}
