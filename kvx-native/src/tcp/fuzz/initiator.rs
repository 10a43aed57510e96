//! Fuzz target: an initiator with transfers, whose owner answers as a script says.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use kvx_backend::control::proof::Keys;
use kvx_backend::reactor::Outbox;
use kvx_core::backend::wire::Reader;
use kvx_core::backend::{
    BoundPlan, Invitation, LinkId, LocalRegion, LocalSide, Pair, PlacedGrid, RegionKey, RemoteSide,
    Ticket,
};
use kvx_core::{ErrorKind, Grid, Indices, Op, RegionId, TransferId};

use super::{FuzzStep, LANES, Lanes, WatchedMemory, next, who};
use crate::tcp::connections::connection::Role;
use crate::tcp::connections::lane::Effect;
use crate::tcp::connections::requests::RequestLane;
use crate::tcp::frames::Frame;
use crate::tcp::links::OpenedLink;
use crate::tcp::memory::regions::TcpRemote;
use crate::tcp::seal::Seal;

pub(super) const LINK: LinkId = LinkId(1);
/// The block sizes of the concurrent transfers, each with its own memory: three for the small lane,
/// and one that is too large for it.
pub(super) const SLOTS: [u64; 4] = [64, 64, 128, 2100];
/// The number of blocks of each, some of which are moved.
pub(super) const BLOCKS: u32 = 32;

/// The state of a transfer that has not settled; the others are its results.
pub(super) const OPEN: u8 = 0;
pub(super) const DONE: u8 = 1;
const FAILED: u8 = 2;

/// A slot for a transfer.
pub(super) struct Slot {
    pub(super) watched: WatchedMemory,
    pub(super) posted: Option<(TransferId, Arc<AtomicU8>)>,
}

/// A local region without behaviour: plans refer to their local memory directly.
struct LocalByPlan;

impl LocalRegion for LocalByPlan {
    fn export(&self) -> &[u8] {
        &[]
    }

    fn revoke(&self, done: Ticket) {
        done.settle(Ok(()));
    }
}

/// Runs a script.
pub(crate) fn initiator(bytes: &[u8]) {
    Seal::NAMED.into_iter().for_each(|(_, seal)| run(bytes, seal));
}

fn run(bytes: &[u8], seal: Seal) {
    let mut lanes =
        Lanes::new(seal, |key, lane| Role::Requests(Box::new(RequestLane::new(key, LINK, lane))));
    let (mut peer, mut slots) = (opened(), SLOTS.map(Slot::new));
    let mut posted = 0;
    let mut script = Reader::new("script", bytes);
    while let Some(step) = next(&mut script) {
        lanes.take(&step);
        let mut out = Outbox::default();
        match step {
            FuzzStep::Own(0, how) => {
                let at = usize::from(how) % SLOTS.len();
                if slots[at].posted.is_none() {
                    posted += 1;
                    post(&mut peer, &mut slots[at], (at, how, 1), TransferId(posted), &mut out);
                }
            }
            FuzzStep::Own(1, at) => {
                if let Some((id, _)) = &slots[usize::from(at) % SLOTS.len()].posted {
                    let why = ErrorKind::Cancelled.because("cancelled by the script");
                    peer.give_up(*id, why, &mut lanes.conns, &mut lanes.scope, &mut out, |_| {});
                }
            }
            FuzzStep::Own(2, len) => {
                peer.notify(vec![len; len.into()].into(), Ticket::new(|_| {}), &mut out);
            }
            _ => {}
        }
        settle(&mut slots, out);
        let ended = go_on(&mut lanes, &mut peer, &mut slots).is_err();
        slots.iter().for_each(|slot| slot.watched.check());
        if ended {
            break;
        }
    }
    lanes.end();
    let mut out = Outbox::default();
    peer.lost(
        ErrorKind::PeerLost.because("the script has ended"),
        &lanes.scope.context.deferred,
        &mut out,
    );
    settle(&mut slots, out);
    assert!(
        slots.iter().all(|slot| slot.posted.is_none()),
        "a transfer did not settle at the end of its link"
    );
}

impl Slot {
    /// Creates a slot for blocks of this size.
    pub(super) fn new(block: u64) -> Self {
        let mut watched = WatchedMemory::new(BLOCKS as usize * block as usize);
        watched.keep();
        Slot { watched, posted: None }
    }
}

/// Returns a link whose lanes are up.
pub(super) fn opened() -> OpenedLink {
    let keys = Keys::new(&Invitation::from_bytes([2; 32]), None);
    let who = (who(3), keys, [8; 16]);
    let addresses = vec![([127, 0, 0, 1], 1).into()];
    let mut peer = OpenedLink::new(LINK, who, addresses, LANES - 1, Arc::default(), Instant::now());
    (peer.lanes, peer.lanes_up) = ((0..LANES).map(Some).collect(), LANES);
    peer
}

/// Returns the operation of a transfer with this `how`.
pub(super) fn op_of(how: u8) -> Op {
    if how & 4 == 0 { Op::Read } else { Op::Write }
}

/// Returns the blocks that it moves, in the order for `by`.
pub(super) fn blocks(how: u8, by: u32) -> Indices {
    match how & 8 == 0 {
        true => (0..BLOCKS).into(),
        false => (0..BLOCKS - 8).map(|index| index * by % BLOCKS).collect::<Vec<_>>().into(),
    }
}

/// The multipliers of the orders here and at the peer.
pub(super) const ORDERS: [u32; 2] = [3, 5];

/// Posts a transfer in the free slot `at`, to or from the peer's `region`.
pub(super) fn post(
    peer: &mut OpenedLink,
    slot: &mut Slot,
    (at, how, region): (usize, u8, u64),
    id: TransferId,
    out: &mut Outbox,
) {
    let op = op_of(how);
    let grids = || -> Arc<[PlacedGrid]> {
        Arc::from([PlacedGrid { region: 0, grid: Grid::packed(SLOTS[at], BLOCKS) }])
    };
    let pair = Pair {
        local: grids(),
        remote: grids(),
        local_indices: blocks(how, ORDERS[0]),
        remote_indices: blocks(how, ORDERS[1]),
    };
    let (id_of_region, key) = (RegionId(region), RegionKey([region as u8; 16]));
    let memory = Arc::clone(&slot.watched.memory);
    let len = memory.len() as u64;
    let local = LocalSide { id: id_of_region, key, memory, region: Arc::new(LocalByPlan) };
    let remote =
        RemoteSide { id: id_of_region, key, len, region: Arc::new(TcpRemote { stage: 0 }) };
    let plan: BoundPlan = kvx_core::fuzz::bound(op, LINK, pair, local, remote);
    let standing = Arc::new(AtomicU8::new(OPEN));
    let done = Ticket::new({
        let standing = Arc::clone(&standing);
        move |result| {
            let now = if result.is_ok() { DONE } else { FAILED };
            assert_eq!(standing.swap(now, Ordering::Relaxed), OPEN);
        }
    });
    slot.posted = Some((id, standing));
    if op == Op::Read {
        slot.watched.kept = None;
    }
    peer.post(Arc::new(plan), id, done, out);
}

/// Runs all lanes until nothing moves. Returns an error if the link has ended.
fn go_on(lanes: &mut Lanes, peer: &mut OpenedLink, slots: &mut [Slot; 4]) -> Result<(), ()> {
    let mut moves = true;
    while moves {
        moves = false;
        for key in 0..LANES {
            peer.issue(&mut lanes.conns, &mut lanes.scope, |_| {});
            let says = |frame| match frame {
                Frame::Read | Frame::Write | Frame::Data | Frame::Stop => {}
                Frame::Cancel | Frame::Notify | Frame::Ping => {
                    assert_eq!(key, 0, "{frame:?} was sent on a bulk lane")
                }
                other => panic!("an initiator does not send {other:?}"),
            };
            moves |= lanes.turn(key, |header| says(header.frame)).map_err(drop)?;
            let mut out = Outbox::default();
            for effect in std::mem::take(&mut lanes.scope.effects) {
                apply_effects(effect, lanes, peer, &mut out)?;
            }
            settle(slots, out);
        }
    }
    Ok(())
}

/// Applies the effects as the machine does.
pub(super) fn apply_effects(
    effect: Effect,
    lanes: &mut Lanes,
    peer: &mut OpenedLink,
    out: &mut Outbox,
) -> Result<(), ()> {
    let (transfer, why) = match effect {
        Effect::Ended { transfer: Some(transfer), result, .. } => {
            match (peer.ended(transfer, &result, out), result) {
                (true, Err(why)) => (transfer, why),
                _ => return Ok(()),
            }
        }
        Effect::Ended { transfer: None, .. } => return Ok(()),
        Effect::Failed { transfer, why, .. } => (transfer, why),
        Effect::Acked { id, .. } => return peer.acknowledged(id, out).map_err(drop),
        other => panic!("an initiator does not report {other:?}"),
    };
    peer.give_up(transfer, why, &mut lanes.conns, &mut lanes.scope, out, |_| {});
    Ok(())
}

/// Settles the results of a turn; the memory of these transfers must stay unchanged.
pub(super) fn settle(slots: &mut [Slot; 4], mut out: Outbox) {
    kvx_backend::fuzz::deliver(&mut out);
    for slot in slots {
        if slot.posted.take_if(|(_, standing)| standing.load(Ordering::Relaxed) != OPEN).is_some() {
            slot.watched.keep();
        }
    }
}
