//! The machine of one lane: its state, and sending messages.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::{Context, Events, LinkId, Ticket};
use kvx_core::{Error, ErrorKind, Identity, Result};
use rustix::event::epoll;
use slab::Slab;

use super::foreign_notices::ForeignNotices;
use super::job::JobState;
use super::library::{Event, Fabric};
use super::regions::{RegionRecord, Regions};
use super::session::{LostPeer, Session, SharedHeldBytes, UnfinishedHello};
use crate::control::proof::Keys;
use crate::control::{ControlMessage, Recalls};
use crate::process::ProcessId;
use crate::rate_limit::RateLimited;
use crate::reactor::{Outbox, Turn, WorkQueue, no_poller};

/// The interval at which a lane checks whether peers hold too much over all lanes.
const BETWEEN_LANES: Duration = Duration::from_millis(100);

pub(super) struct Machine<F: Fabric> {
    pub(super) name: &'static str,
    pub(super) me: Identity,
    /// The keys that authenticate peers.
    pub(super) keys: Keys,
    pub(super) unauthenticated: RateLimited,
    pub(super) fabric: F,
    pub(super) events: Arc<dyn Events>,
    pub(super) peer_timeout: Duration,
    pub(super) regions: Arc<Regions<F::Local>>,
    pub(super) address: Arc<dyn Fn() -> Result<Vec<u8>> + Send + Sync>,
    pub(super) process: ProcessId,
    pub(super) max_message: usize,
    pub(super) sessions: BTreeMap<u64, Session<F>>,
    pub(super) held: Arc<SharedHeldBytes>,
    pub(super) links: BTreeMap<LinkId, u64>,
    /// Peers whose first message is incomplete, by session number.
    pub(super) unfinished_hellos: HashMap<u64, UnfinishedHello>,
    /// The jobs, boxed so that moving one is cheap.
    pub(super) jobs: Slab<Box<JobState<F>>>,
    pub(super) turns: WorkQueue<usize>,
    /// Jobs that wait for capacity in the library.
    pub(super) stalled: Vec<usize>,
    /// Sessions with something to send.
    pub(super) sending: Vec<u64>,
    /// Revocations, by the numbers of the sessions whose peers hold the region.
    pub(super) recalls: Recalls<u64, (Arc<RegionRecord<F::Local>>, Ticket)>,
    /// Regions that every peer has released but the library has not unregistered.
    pub(super) released: Vec<(Arc<RegionRecord<F::Local>>, Ticket)>,
    /// Lost peers, by the numbers of their sessions.
    pub(super) lost_peers: HashMap<u64, LostPeer>,
    /// Notifications of foreign agents that did not fit into the agent's queue.
    pub(super) foreign_notices: ForeignNotices,
    pub(super) fabric_events: Vec<Event>,
    /// The epoll descriptor for the library's descriptors and the end of peers' processes.
    pub(super) poller: OwnedFd,
    pub(super) fds: [RawFd; 1],
    pub(super) next_look: Option<Instant>,
    /// Sessions whose peers' processes have ended, recorded outside of a turn.
    pub(super) ended: Vec<u64>,
    /// True if a caller's thread had this turn only to post something small and has done so; the
    /// turn does nothing else.
    pub(super) lent_turn: bool,
    /// True if this turn did more than transfers that completed as they were posted.
    pub(super) left_something: bool,
    /// The library's last scheduling request.
    pub(super) polled: Turn,
    pub(super) shutdown: Vec<Ticket>,
}

impl<F: Fabric> Machine<F> {
    pub(super) fn new(
        context: Context,
        name: &'static str,
        fabric: F,
        regions: Arc<Regions<F::Local>>,
        address: Arc<dyn Fn() -> Result<Vec<u8>> + Send + Sync>,
        held: Arc<SharedHeldBytes>,
    ) -> Result<Self> {
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(no_poller)?;
        for fd in fabric.fds() {
            // SAFETY: the fabric keeps its descriptors open for as long as it lives.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(*fd) };
            epoll::add(&poller, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .map_err(no_poller)?;
        }
        Ok(Machine {
            name,
            keys: Keys::new(&context.invitation, context.secret.as_ref()),
            unauthenticated: RateLimited::default(),
            me: context.agent,
            events: context.events,
            peer_timeout: context.peer_timeout,
            regions,
            address,
            process: ProcessId::current(),
            max_message: fabric.max_message(),
            fabric,
            sessions: BTreeMap::new(),
            held,
            links: BTreeMap::new(),
            unfinished_hellos: HashMap::new(),
            jobs: Slab::new(),
            turns: WorkQueue::default(),
            stalled: Vec::new(),
            sending: Vec::new(),
            recalls: Recalls::default(),
            released: Vec::new(),
            lost_peers: HashMap::new(),
            foreign_notices: ForeignNotices::default(),
            fabric_events: Vec::new(),
            fds: [poller.as_raw_fd()],
            poller,
            next_look: None,
            ended: Vec::new(),
            lent_turn: false,
            left_something: true,
            polled: Turn::did(0),
            shutdown: Vec::new(),
        })
    }

    /// Schedules the next check at `at` or earlier.
    pub(super) fn look_by(&mut self, at: Instant) {
        look_by(&mut self.next_look, at);
    }

    pub(super) fn error(
        &self,
        kind: ErrorKind,
        sentence: impl Into<std::borrow::Cow<'static, str>>,
    ) -> Error {
        Error::new(kind, sentence).with_backend(self.name)
    }

    /// Sends a message, now or when the library has capacity.
    pub(super) fn send(&mut self, number: u64, message: &ControlMessage<'_>, out: &mut Outbox) {
        // Expected: an earlier message of this turn ended the session.
        let Some(session) = self.sessions.get_mut(&number) else { return };
        match session.send(message, self.max_message) {
            Ok(()) => {
                self.push_out(number, out);
            }
            Err(why) => self.cut_off(number, why, out),
        }
    }

    pub(super) fn push_out(&mut self, number: u64, out: &mut Outbox) -> usize {
        // Expected: the session ended while its frames waited to be sent.
        let Some(session) = self.sessions.get_mut(&number) else { return 0 };
        match session.push_out(&mut self.fabric) {
            Ok(taken) => {
                if taken > 0 {
                    session.note_held(&self.held).ok(); // cannot fail: the session holds less
                }
                if session.has_waiting() {
                    if !self.sending.contains(&number) {
                        self.sending.push(number);
                    }
                } else {
                    self.after_work(number, out);
                }
                taken
            }
            Err(why) => {
                self.lose(number, why, false, out);
                1
            }
        }
    }

    /// Counts the memory that this end holds for a peer. A peer over its limit loses the session.
    pub(super) fn count_held(&mut self, number: u64, out: &mut Outbox) {
        // Expected: the message that was just taken ended the session.
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let was = session.counted;
        let noted = session.note_held(&self.held);
        if session.counted == was {
            return;
        }
        if let Err(why) = noted {
            self.cut_off(number, why, out);
        }
        self.drop_greediest(out);
        self.look_at_lanes();
    }

    /// Schedules a check: the memory counted here may become too much because of other lanes, which
    /// cannot end this lane's sessions.
    pub(super) fn look_at_lanes(&mut self) {
        if Arc::strong_count(&self.held) > 1
            && self.sessions.values().any(|session| session.counted > 0)
        {
            self.look_by(Instant::now() + BETWEEN_LANES);
        }
    }

    /// Updates the count of memory that this end holds for a peer, after it has released some.
    pub(super) fn held_less(&mut self, number: u64) {
        if let Some(session) = self.sessions.get_mut(&number) {
            session.note_held(&self.held).ok(); // an excess is noticed when it grows
        }
    }

    /// Ends the sessions of the peer that holds most, if all peers together hold too much. Other
    /// lanes end theirs.
    pub(super) fn drop_greediest(&mut self, out: &mut Outbox) {
        let held = self.held.lock();
        let Some(greediest) = held.greediest(|_| true) else { return };
        let why = held.too_much();
        drop(held);
        let its = self.sessions.iter().filter(|(_, session)| session.is_counted_for(&greediest));
        for number in its.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.cut_off(number, why.clone(), out);
        }
    }

    /// Tries again to send waiting messages.
    pub(super) fn send_waiting(&mut self, out: &mut Outbox) -> usize {
        let mut taken = 0;
        for number in std::mem::take(&mut self.sending) {
            if self.sessions.get(&number).is_some_and(|session| session.foreign) {
                taken += self.notify_foreign(number, out);
            } else {
                taken += self.push_out(number, out);
            }
        }
        taken
    }
}

/// Moves the time of the next check forward to `at`, if that is earlier.
pub(super) fn look_by(next_look: &mut Option<Instant>, at: Instant) {
    *next_look = Some(next_look.map_or(at, |next| next.min(at)));
}
