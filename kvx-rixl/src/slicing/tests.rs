//! What decides, and what two agents of kvx post in fact.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use kvx_core::{Agent, Grid, Memory, Options, Plan, Registry};

use super::*;
use crate::{Rixl, reach, wheel};

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

/// The slices that this process has posted.
static POSTED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

pub(crate) fn note(bytes: u64) {
    POSTED.lock().unwrap().push(bytes);
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

/// Transfers of one plan, whose slices it keeps: beside messages they go on in short ones, from wherever they are, and
/// afterwards the kept ones are back. Each byte is moved once all the while.
fn beside_messages() {
    if reach::kernel_takes().is_none() {
        return kvx_testkit::skip(BESIDE, "the kernel copies between no processes", "allow process_vm_readv");
    }
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

    let mut moves = |plan: &Plan| {
        ours.copy_in(0, &blank).expect("it fits");
        let transfer = peer.transfer(plan).deadline(PATIENCE).post().expect("posted");
        transfer.wait(PATIENCE).expect("moved");
        ours.copy_out(0, &mut found).expect("it fits");
        for (here, there) in found.chunks(BLOCK).zip(&scattered) {
            assert!(here == &content[*there as usize * BLOCK..][..BLOCK], "wrong bytes");
        }
        let slices = std::mem::take(&mut *POSTED.lock().unwrap());
        assert_eq!(slices.iter().sum::<u64>(), LEN as u64, "{slices:?}");
        slices
    };
    let (plan, mut fresh) = (planned(), planned());
    let quiet = moves(&plan);
    assert_eq!(quiet.iter().max(), Some(&LONG));
    assert_eq!(moves(&plan), quiet, "those that were kept");

    let (end, enough) = (Instant::now() + PATIENCE, AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !enough.load(Ordering::Relaxed) && Instant::now() < end {
                let acknowledged = [(); 4].map(|()| peer.notify(b"moved", PATIENCE));
                for acknowledged in acknowledged {
                    far.notification(PATIENCE).wait().expect("it arrives");
                    acknowledged.wait(PATIENCE).expect("it has arrived");
                }
            }
        });
        let (mut turned, mut short) = (false, false);
        while !(turned && short) && Instant::now() < end {
            fresh = planned();
            moves(&fresh); // whose first slices are short, or turn so while they are made
            let slices = moves(&plan);
            let has_long = slices.contains(&LONG);
            turned |= has_long && slices.len() > quiet.len();
            short |= !has_long;
        }
        enough.store(true, Ordering::Relaxed);
        assert!(turned, "a transfer under way goes on in short slices");
        assert!(short, "and the next has no others");
    });
    for plan in [&plan, &fresh, &fresh] {
        while moves(plan) != quiet {
            assert!(Instant::now() < end + PATIENCE, "they stay short");
        }
    }
}

const BESIDE: &str = "slicing::tests::slices_are_short_beside_messages_and_long_again_after";

#[test]
fn slices_are_short_beside_messages_and_long_again_after() {
    wheel::alone(BESIDE, beside_messages);
}
