//! Links that this end opened: their lanes, the transfers and notifications on them, and the
//! detection of silent peers.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::described::{self, Part};
use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::connections::lane::Scope;
use crate::tcp::connections::table::Conns;
use crate::tcp::context::AgentContext;
use crate::tcp::error;
use crate::tcp::frames::auth::InitiatorHandshake;
use crate::tcp::frames::{Frame, put_bare, put_frame};
use crate::tcp::memory::regions::{is_staged, share_stages};
use crate::tcp::socket;
use kvx_backend::control::proof::Keys;
use kvx_backend::control::{NoticesToPeer, Silence, SilenceStatus};
use kvx_backend::reactor::Outbox;
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{BoundPlan, LinkId, Pair, Ticket};
use kvx_core::{Identity, Result, TransferId};

/// The limit in bytes for transfers on the small lane.
const SMALL: u64 = 64 << 10;
/// The limit in blocks for transfers on the small lane, because their descriptions must be small
/// too.
const SMALL_BLOCKS: u64 = 4096;
/// The approximate bytes of data in one request of a bulk transfer.
const PART: u64 = 4 << 20;

/// The description of a link's state for users.
#[derive(Debug, Default)]
pub(crate) struct LinkStanding(Mutex<Option<String>>);

impl LinkStanding {
    pub(crate) fn set(&self, text: String) {
        *self.0.lock() = Some(text);
    }

    pub(crate) fn get(&self) -> Option<String> {
        self.0.lock().clone()
    }
}

/// A transfer that has not settled.
pub(crate) struct UnsettledTransfer {
    pub(crate) plan: Arc<BoundPlan>,
    pub(crate) done: Ticket,
    pub(crate) parts: Vec<Part>,
    /// The index of the next part to request.
    pub(crate) next: usize,
    /// The number of parts in flight.
    pub(crate) out: usize,
}

/// A link that this end opened.
pub(crate) struct OpenedLink {
    pub(crate) id: LinkId,
    pub(crate) who: Identity,
    /// The nonce that all lanes of the link present.
    pub(crate) nonce: [u8; 16],
    pub(crate) greeting_retries: u8,
    /// The keys that authenticate this end to the peer.
    pub(crate) keys: Keys,
    pub(crate) addresses: Vec<SocketAddr>,
    /// The index of the address that is being tried, or that answered.
    pub(crate) address: usize,
    /// The connections by lane, the small one first.
    pub(crate) lanes: Vec<Option<usize>>,
    pub(crate) lanes_up: usize,
    /// The time by which the link must be up.
    up_by: Instant,
    pub(crate) standing: Arc<LinkStanding>,
    pub(crate) transfers: HashMap<TransferId, UnsettledTransfer>,
    pub(crate) small: VecDeque<TransferId>,
    pub(crate) bulk: VecDeque<TransferId>,
    pub(crate) notices: NoticesToPeer,
    pub(crate) silence: Silence,
}

impl OpenedLink {
    pub(crate) fn new(
        id: LinkId,
        (who, keys, nonce): (Identity, Keys, [u8; 16]),
        addresses: Vec<SocketAddr>,
        bulk_lanes: usize,
        standing: Arc<LinkStanding>,
        up_by: Instant,
    ) -> Self {
        OpenedLink {
            id,
            who,
            keys,
            nonce,
            greeting_retries: 0,
            addresses,
            address: 0,
            lanes: vec![None; bulk_lanes + 1],
            lanes_up: 0,
            up_by,
            standing,
            transfers: HashMap::new(),
            small: VecDeque::new(),
            bulk: VecDeque::new(),
            notices: NoticesToPeer::default(),
            silence: Silence::new(up_by),
        }
    }

    /// Sends the hello of a lane whose connect has completed. Returns the error of a failed
    /// connect.
    pub(crate) fn greet(&self, conn: &mut Conn, lane: u8, context: &AgentContext) -> Result<()> {
        socket::connected(conn.socket()).map_err(|errno| error::unreachable(conn.peer, errno))?;
        let (own, which, wish) = (context.agent.clone(), (self.nonce, lane), context.wish());
        let handshake =
            InitiatorHandshake::start(&self.keys, own, which, wish, &mut conn.output.control)?;
        conn.role = Role::Greeting { link: self.id, lane, handshake: Box::new(handshake) };
        Ok(())
    }

    pub(crate) fn is_up(&self) -> bool {
        self.lanes_up == self.lanes.len()
    }

    /// Returns the time by which a connection that begins now must be up. The small lane leaves
    /// time for further addresses.
    pub(crate) fn lane_deadline(&self, lane: u8, longest: Duration, now: Instant) -> Instant {
        let left = self.up_by.saturating_duration_since(now);
        let addresses = self.addresses.len() - self.address;
        let share = if lane == 0 { left / addresses as u32 } else { left };
        now + share.min(longest)
    }

    /// Adds a transfer; `issue` follows. Returns true if it is a small one.
    pub(crate) fn post(
        &mut self,
        plan: Arc<BoundPlan>,
        id: TransferId,
        done: Ticket,
        out: &mut Outbox,
    ) -> bool {
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
        self.transfers.insert(id, UnsettledTransfer { plan, done, parts, next: 0, out: 0 });
        is_small
    }

    /// Adds a notification; `issue` follows.
    pub(crate) fn notify(&mut self, bytes: Box<[u8]>, done: Ticket, out: &mut Outbox) {
        if let Err((done, why)) = self.notices.add(bytes, done) {
            out.settle(done, Err(error::of_peer(why, &self.who)));
        }
    }

    /// Sends as many requests as the lanes have capacity for. Calls `touched` with the connections
    /// that now have output.
    pub(crate) fn issue(
        &mut self,
        conns: &mut Conns,
        scope: &mut Scope,
        mut touched: impl FnMut(usize),
    ) {
        if !self.is_up() {
            return;
        }
        let mut lanes = self.lanes.iter().flatten().copied();
        let Some(small) = lanes.next() else {
            return debug_assert!(false, "a link that is up has lanes");
        };
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
            let free =
                self.lanes[1..].iter().flatten().copied().filter(|key| has_room(&conns[*key]));
            let Some(key) = free.min_by_key(|key| load(&conns[*key])) else { break };
            if issue_next(&mut self.transfers, &mut self.bulk, &mut conns[key], scope) {
                touched(key);
            }
        }
    }

    fn issue_notices(&mut self, conn: &mut Conn) -> bool {
        let mut sent = false;
        while let Some((id, bytes)) = self.notices.next_to_send() {
            put_frame(&mut conn.output.control, Frame::Notify, id, |out| {
                out.extend_from_slice(&bytes)
            });
            sent = true;
        }
        sent
    }

    /// Records that the peer has sent something.
    pub(crate) fn note_activity(&mut self, now: Instant) {
        self.silence.note_activity(now);
    }

    /// Records whether an operation is in flight, including those that were given up and have not
    /// ended. Returns the time of the first silence check if that has just begun.
    pub(crate) fn note_busy(
        &mut self,
        now: Instant,
        timeout: Duration,
        conns: &Conns,
    ) -> Option<Instant> {
        let owed = || self.lanes.iter().flatten().any(|key| owes_ends(&conns[*key]));
        let in_flight = !self.transfers.is_empty() || self.notices.awaits_answer() || owed();
        let begun = self.silence.note(self.is_up() && in_flight, || now)?;
        Some(begun + Silence::step(timeout))
    }

    /// Checks whether the peer is silent with work in flight. Sends a ping at the first silent
    /// check.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        timeout: Duration,
        conns: &mut Conns,
        mut touched: impl FnMut(usize),
    ) -> SilenceStatus {
        if self.lanes.iter().flatten().any(|key| conns[*key].may_have_unread()) {
            // this end is slow, because of other turns or a device
            self.note_activity(now);
        }
        let look = self.silence.look(now, timeout);
        if let (SilenceStatus::Ask(_), Some(key)) = (look, self.lanes[0]) {
            put_bare(&mut conns[key].output.control, Frame::Ping, 0);
            touched(key);
        }
        look
    }
}

fn has_room(conn: &Conn) -> bool {
    matches!(&conn.role, Role::Requests(lane) if lane.has_room())
}

fn owes_ends(conn: &Conn) -> bool {
    matches!(&conn.role, Role::Requests(lane) if lane.owes_ends())
}

fn is_fenced(conn: &Conn) -> bool {
    matches!(&conn.role, Role::Requests(lane) if lane.is_fenced())
}

fn load(conn: &Conn) -> u64 {
    if let Role::Requests(lane) = &conn.role { lane.load() } else { u64::MAX }
}

/// Requests the next part of the next transfer of a queue. Returns true if there was one.
fn issue_next(
    transfers: &mut HashMap<TransferId, UnsettledTransfer>,
    queue: &mut VecDeque<TransferId>,
    conn: &mut Conn,
    scope: &mut Scope,
) -> bool {
    let Some(id) = queue.pop_front() else { return false };
    // given up while it was queued
    let Some(transfer) = transfers.get_mut(&id) else { return false };
    let Conn { role: Role::Requests(lane), output, .. } = conn else {
        debug_assert!(false, "only a lane that is up has capacity");
        return false;
    };
    let Some(part) = transfer.parts.get(transfer.next) else {
        debug_assert!(false, "a transfer is queued while it has parts to be requested");
        return false;
    };
    lane.request(&transfer.plan, part, id, output, scope);
    transfer.next += 1;
    transfer.out += 1;
    if transfer.next < transfer.parts.len() {
        queue.push_back(id);
    }
    true
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use kvx_core::Incarnation;
    use kvx_core::backend::Invitation;
    use kvx_core::backend::fork::Private;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(4);

    /// A link that is up and waits for an acknowledgement since `now`, on a clock that the test
    /// moves.
    struct SilentPeer {
        peer: OpenedLink,
        conns: Conns,
        now: Instant,
    }

    impl SilentPeer {
        fn new() -> Self {
            let (now, mut conns) = (Instant::now(), Conns::default());
            let (socket, address) = (
                Private::from(OwnedFd::from(std::fs::File::open("/dev/null").unwrap())),
                ([127, 0, 0, 1], 1).into(),
            );
            let role = Role::Connecting { link: LinkId(1), lane: 0 };
            let lane = conns.insert(Conn::new(socket, address, role, now));
            let keys = Keys::new(&Invitation::from_bytes([2; 32]), None);
            let who = (
                Identity { name: "peer".into(), incarnation: Incarnation([1; 16]) },
                keys,
                [0; 16],
            );
            let mut peer = OpenedLink::new(LinkId(1), who, vec![address], 0, Arc::default(), now);
            (peer.lanes[0], peer.lanes_up) = (Some(lane), 1);
            peer.notify(Box::default(), Ticket::new(|_| {}), &mut Outbox::default());
            peer.notices.next_to_send().unwrap();
            assert_eq!(peer.note_busy(now, TIMEOUT, &conns), Some(now + TIMEOUT / 4));
            SilentPeer { peer, conns, now }
        }

        fn after(&mut self, time: Duration) -> SilenceStatus {
            self.now += time;
            self.peer.look(self.now, TIMEOUT, &mut self.conns, |_| {})
        }

        /// Returns the number of pings.
        fn asked(&self) -> usize {
            let ping = Frame::Ping as u8;
            self.conns
                .iter()
                .flat_map(|(_, conn)| conn.output.control.chunks(16))
                .filter(|frame| frame[0] == ping)
                .count()
        }
    }

    #[test]
    fn a_silent_peer_is_pinged_and_then_lost() {
        let mut waiting = SilentPeer::new();
        let step = TIMEOUT / 4;
        assert_eq!(waiting.after(step), SilenceStatus::Ask(waiting.now + step));
        for _ in 0..2 {
            assert_eq!(waiting.after(step), SilenceStatus::Until(waiting.now + step));
        }
        assert_eq!((waiting.after(step), waiting.asked()), (SilenceStatus::Lost, 1));
    }

    #[test]
    fn a_peer_with_unread_bytes_is_not_silent() {
        let mut waiting = SilentPeer::new();
        for (_, conn) in waiting.conns.iter_mut() {
            conn.event(true, false, false);
        }
        for _ in 0..20 {
            assert_eq!(waiting.after(TIMEOUT), SilenceStatus::Until(waiting.now + TIMEOUT / 4));
        }
    }
}
