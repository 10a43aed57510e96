//! A link as the machine sees it: its lanes, the transfers and notifications on it, and whether its peer lives.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::reactor::Outbox;
use kvx_core::transport::LinkState;
use kvx_core::{Bound, Error, Identity, Kind, LinkId, Pair, Result, Ticket, TransferId};
use slab::Slab;

use super::conn::{Conn, Role, Scope};
use super::ending::{Concern, Ending};
use super::error;
use super::frames::{Frame, put_bare, put_cancel, put_frame};
use super::link::Standing;
use super::serve::{NOTICES, NOTICES_BYTES};
use super::staging::{is_staged, share_stages};
use crate::described::{self, Part};

/// Transfers of at most so many bytes go over the small lane.
const SMALL: u64 = 64 << 10;
/// Their descriptions must be small too.
const SMALL_BLOCKS: u64 = 4096;
/// Data of one request of a bulk transfer, about.
const PART: u64 = 4 << 20;

/// A transfer that has not settled.
struct Transfer {
    plan: Arc<Bound>,
    done: Ticket,
    parts: Vec<Part>,
    /// The next part to be requested.
    next: usize,
    /// Parts that are out.
    out: usize,
}

/// A notification that waits to be sent.
struct Notice {
    bytes: Box<[u8]>,
    done: Ticket,
}

/// A notification that was sent.
struct Sent {
    id: u64,
    len: usize,
    done: Ticket,
}

/// A link of ours.
pub(super) struct Peer {
    pub(super) id: LinkId,
    pub(super) who: Identity,
    /// What its lanes have in common.
    pub(super) nonce: [u8; 16],
    pub(super) addresses: Vec<SocketAddr>,
    /// The address that is tried, or that answered.
    pub(super) address: usize,
    /// Connections, by lane; the small one first.
    pub(super) lanes: Vec<Option<usize>>,
    pub(super) lanes_up: usize,
    /// When it must be up.
    up_by: Instant,
    pub(super) standing: Arc<Standing>,
    transfers: HashMap<TransferId, Transfer>,
    small: VecDeque<TransferId>,
    bulk: VecDeque<TransferId>,
    notices: VecDeque<Notice>,
    unacknowledged: VecDeque<Sent>,
    unacknowledged_bytes: usize,
    next_notice: u64,
    heard: Instant,
    /// Since when something is in flight.
    busy_since: Option<Instant>,
    pinged: bool,
}

/// What a look at a peer's silence says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Silence {
    /// Nothing is in flight.
    Idle,
    /// Look again then.
    Until(Instant),
    /// Too long.
    Lost,
}

impl Peer {
    pub(super) fn new(
        id: LinkId,
        (who, nonce): (Identity, [u8; 16]),
        addresses: Vec<SocketAddr>,
        bulk_lanes: usize,
        standing: Arc<Standing>,
        up_by: Instant,
    ) -> Self {
        Peer {
            id,
            who,
            nonce,
            addresses,
            address: 0,
            lanes: vec![None; bulk_lanes + 1],
            lanes_up: 0,
            up_by,
            standing,
            transfers: HashMap::new(),
            small: VecDeque::new(),
            bulk: VecDeque::new(),
            notices: VecDeque::new(),
            unacknowledged: VecDeque::new(),
            unacknowledged_bytes: 0,
            next_notice: 0,
            heard: up_by,
            busy_since: None,
            pinged: false,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.lanes_up == self.lanes.len()
    }

    /// When a connection that is begun now must be up. The small lane leaves time for the addresses that follow.
    pub(super) fn lane_by(&self, lane: u8, longest: Duration, now: Instant) -> Instant {
        let left = self.up_by.saturating_duration_since(now);
        let addresses = self.addresses.len() - self.address;
        let share = if lane == 0 { left / addresses as u32 } else { left };
        now + share.min(longest)
    }

    /// Takes a transfer; `issue` follows. Says whether it is a small one.
    pub(super) fn post(&mut self, plan: Arc<Bound>, id: TransferId, done: Ticket, out: &mut Outbox) -> bool {
        let size = plan.size();
        let staged = is_staged(&plan);
        let joins = |pair: &Pair, grid| !staged || share_stages(&plan, pair, grid);
        let parts = described::parts(plan.pairs(), PART, joins);
        if parts.is_empty() {
            out.settle(done, Ok(()));
            return false;
        }
        let is_small = size.bytes <= SMALL && size.blocks <= SMALL_BLOCKS;
        if is_small {
            self.small.push_back(id)
        } else {
            self.bulk.push_back(id)
        }
        self.transfers.insert(id, Transfer { plan, done, parts, next: 0, out: 0 });
        is_small
    }

    /// Takes a notification; `issue` follows.
    pub(super) fn notify(&mut self, bytes: Box<[u8]>, done: Ticket) {
        self.notices.push_back(Notice { bytes, done });
    }

    /// Sends out what the lanes have room for. Calls `touched` with the connections that now have output.
    pub(super) fn issue(
        &mut self,
        conns: &mut Slab<Conn>,
        scope: &mut Scope,
        mut touched: impl FnMut(usize),
    ) {
        if !self.is_up() {
            return;
        }
        let mut lanes = self.lanes.iter().flatten().copied();
        let Some(small) = lanes.next() else { return };
        if self.issue_notices(&mut conns[small]) {
            touched(small);
        }
        if self.lanes.iter().flatten().any(|key| is_fenced(&conns[*key])) {
            return;
        }
        while !self.small.is_empty() && has_room(&conns[small]) {
            if issue_next(&mut self.transfers, &mut self.small, &mut conns[small], scope) {
                touched(small);
            }
        }
        while !self.bulk.is_empty() {
            let free = self.lanes[1..].iter().flatten().copied().filter(|key| has_room(&conns[*key]));
            let Some(key) = free.min_by_key(|key| load(&conns[*key])) else { break };
            if issue_next(&mut self.transfers, &mut self.bulk, &mut conns[key], scope) {
                touched(key);
            }
        }
    }

    fn issue_notices(&mut self, conn: &mut Conn) -> bool {
        let mut sent = false;
        while let Some(notice) = self.notices.front() {
            let len = notice.bytes.len();
            let waiting = self.unacknowledged.len();
            if waiting >= NOTICES || waiting > 0 && self.unacknowledged_bytes + len > NOTICES_BYTES {
                break;
            }
            let Some(Notice { bytes, done }) = self.notices.pop_front() else { break };
            let id = self.next_notice;
            self.next_notice += 1;
            put_frame(&mut conn.output.control, Frame::Notify, id, |out| out.extend_from_slice(&bytes));
            self.unacknowledged_bytes += len;
            self.unacknowledged.push_back(Sent { id, len, done });
            sent = true;
        }
        sent
    }

    /// The peer's agent has a notification.
    pub(super) fn acknowledged(&mut self, id: u64, out: &mut Outbox) -> Result<()> {
        if self.unacknowledged.front().is_none_or(|sent| sent.id != id) {
            return Err(Error::new(Kind::Malformed, "the peer acknowledges what was not sent"));
        }
        if let Some(sent) = self.unacknowledged.pop_front() {
            self.unacknowledged_bytes -= sent.len;
            out.settle(sent.done, Ok(()));
        }
        Ok(())
    }

    /// A request of a transfer has ended. Says whether the transfer failed by that: give it up.
    pub(super) fn ended(&mut self, id: TransferId, result: &Result<()>, out: &mut Outbox) -> bool {
        let Some(transfer) = self.transfers.get_mut(&id) else { return false };
        transfer.out -= 1;
        if result.is_err() {
            return true;
        }
        if transfer.out == 0
            && transfer.next == transfer.parts.len()
            && let Some(transfer) = self.transfers.remove(&id)
        {
            out.settle(transfer.done, Ok(()));
        }
        false
    }

    /// Ends a transfer at once: from here on, its memory is not touched, but for copies that a device has begun: it
    /// settles after them. Calls `touched` as `issue` does.
    pub(super) fn give_up(
        &mut self,
        id: TransferId,
        why: Error,
        conns: &mut Slab<Conn>,
        scope: &mut Scope,
        out: &mut Outbox,
        mut touched: impl FnMut(usize),
    ) {
        let Some(transfer) = self.transfers.remove(&id) else { return };
        for queue in [&mut self.small, &mut self.bulk] {
            if queue.len() > 2 * self.transfers.len() + 64 {
                queue.retain(|id| self.transfers.contains_key(id));
            }
        }
        if transfer.out > 0 {
            let mut cancelled = Vec::new();
            for key in self.lanes.iter().flatten().copied() {
                let Conn { role, input, output, .. } = &mut conns[key];
                if let Role::Lane(lane) = role {
                    let number = lane.number;
                    lane.give_up(id, input, output, scope, |id| cancelled.push((id, number)));
                    touched(key);
                }
            }
            if let Some(key) = self.lanes[0] {
                cancelled
                    .iter()
                    .for_each(|(id, lane)| put_cancel(&mut conns[key].output.control, *id, *lane));
                touched(key);
            }
        }
        drop((transfer.plan, transfer.parts));
        self.settle(id, transfer.done, error::of_peer(why, &self.who), &scope.shared.ending, out);
    }

    /// Fails a transfer when no device touches its memory any more.
    fn settle(&self, id: TransferId, done: Ticket, why: Error, ending: &Ending, out: &mut Outbox) {
        let its = Concern::Transfer(self.id, id);
        if let Some((done, result)) = ending.hold(|concern| *concern == its, done, Err(why)) {
            out.settle(done, result);
        }
    }

    /// Fails everything; its connections are gone.
    pub(super) fn fail(&mut self, why: &Error, ending: &Ending, out: &mut Outbox) {
        for (id, Transfer { plan, done, .. }) in std::mem::take(&mut self.transfers) {
            drop(plan);
            self.settle(id, done, why.clone(), ending, out);
        }
        let sent = self.unacknowledged.drain(..).map(|sent| sent.done);
        for done in sent.chain(self.notices.drain(..).map(|notice| notice.done)) {
            out.settle(done, Err(why.clone()));
        }
    }

    /// The link is gone: fails everything and says so.
    pub(super) fn lost(mut self, why: Error, ending: &Ending, out: &mut Outbox) {
        let why = error::of_peer(why, &self.who);
        self.fail(&why, ending, out);
        out.link(self.id, LinkState::Lost(why));
    }

    /// Something came from the peer.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
        self.pinged = false;
    }

    fn is_busy(&self) -> bool {
        self.is_up() && !(self.transfers.is_empty() && self.unacknowledged.is_empty())
    }

    /// Notes whether something is in flight. `Some`: it has just begun, look at the silence then.
    pub(super) fn note_busy(&mut self, now: Instant, timeout: Duration) -> Option<Instant> {
        match (self.is_busy(), self.busy_since) {
            (true, None) => {
                self.busy_since = Some(now);
                Some(now + ping_after(timeout))
            }
            (false, _) => {
                self.busy_since = None;
                None
            }
            (true, Some(_)) => None,
        }
    }

    /// How long the peer has been silent with work in flight; asks it for a sign of life.
    pub(super) fn look(
        &mut self,
        now: Instant,
        timeout: Duration,
        conns: &mut Slab<Conn>,
        mut touched: impl FnMut(usize),
    ) -> Silence {
        let Some(busy_since) = self.busy_since else { return Silence::Idle };
        let since = self.heard.max(busy_since);
        let silence = now.saturating_duration_since(since);
        if silence >= timeout {
            return Silence::Lost;
        }
        if silence < ping_after(timeout) {
            return Silence::Until(since + ping_after(timeout));
        }
        if !self.pinged
            && let Some(key) = self.lanes[0]
        {
            self.pinged = true;
            put_bare(&mut conns[key].output.control, Frame::Ping, 0);
            touched(key);
        }
        Silence::Until(since + timeout)
    }
}

/// A peer that is silent for so long is asked.
fn ping_after(timeout: Duration) -> Duration {
    timeout / 4
}

fn has_room(conn: &Conn) -> bool {
    matches!(&conn.role, Role::Lane(lane) if lane.has_room())
}

fn is_fenced(conn: &Conn) -> bool {
    matches!(&conn.role, Role::Lane(lane) if lane.is_fenced())
}

fn load(conn: &Conn) -> u64 {
    if let Role::Lane(lane) = &conn.role { lane.load() } else { u64::MAX }
}

/// Requests the next part of the next transfer of a queue. Says whether there was one.
fn issue_next(
    transfers: &mut HashMap<TransferId, Transfer>,
    queue: &mut VecDeque<TransferId>,
    conn: &mut Conn,
    scope: &mut Scope,
) -> bool {
    let Some(id) = queue.pop_front() else { return false };
    let Some(transfer) = transfers.get_mut(&id) else { return false };
    let Conn { role: Role::Lane(lane), output, .. } = conn else { return false };
    let Some(part) = transfer.parts.get(transfer.next) else { return false };
    lane.request(&transfer.plan, part, id, output, scope);
    transfer.next += 1;
    transfer.out += 1;
    if transfer.next < transfer.parts.len() {
        queue.push_back(id);
    }
    true
}
