//! One side of a link: what is known of the peer, what waits for it, what it holds of ours.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Error, Identity, Kind, RegionId, Result, Ticket};

use super::handle::{Import, Wiring};
use super::jobs::Waiting;
use super::messages::Message;
use super::stream::{Incoming, Outgoing};
use super::{EndpointId, Fabric, Sent};
use crate::process::Watched;

/// The most notifications of one link that are not acknowledged: what the target may have to park.
pub(super) const WINDOW: usize = 16;
/// The most bytes of notifications that wait on one link for the peer.
const MAX_WAITING: usize = 64 << 20;
/// The most frames that wait for a peer to read them; one that lets more pile up is cut off.
const MAX_QUEUED: usize = 64 << 10;

/// Where a session stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The handshake is to be done by then.
    Greeting(Instant),
    Up,
    /// Transfers are still ending; then the peer is told.
    Closing,
    /// The peer is told, or cannot be: what is queued is still sent, until then.
    Leaving(Instant),
    /// The peer is lost: transfers are still ending.
    Lost,
}

/// What became of an import.
pub(super) enum Imported<R> {
    Wanted(Arc<Import>),
    Held(Arc<R>, RegionId),
    Refused(Error),
}

/// A notification on its way out.
pub(super) struct Notice {
    pub(super) bytes: Box<[u8]>,
    pub(super) done: Ticket,
}

/// What is known of the peer's life.
pub(super) struct Life {
    /// When something came from it.
    heard: Instant,
    /// Since when an answer has been awaited.
    awaited: Option<Instant>,
    /// When it was asked for a sign of life that has not come.
    pinged: Option<Instant>,
}

/// What [`Life::look`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pulse {
    Idle,
    Fine,
    Ask,
    Silent,
}

impl Life {
    fn begins(now: Instant) -> Self {
        Life { heard: now, awaited: None, pinged: None }
    }

    pub(super) fn hear(&mut self) {
        (self.heard, self.pinged) = (Instant::now(), None);
    }

    /// Whether the peer is silent although it owes an answer.
    pub(super) fn look(&mut self, now: Instant, pace: Duration, timeout: Duration) -> Pulse {
        let Some(awaited) = self.awaited else { return Pulse::Idle };
        let silent = now.saturating_duration_since(awaited.max(self.heard));
        // Whoever was stopped himself must not blame the peer: it has had the time since the ping.
        let pinged = self.pinged.map(|pinged| now.saturating_duration_since(pinged));
        if silent >= timeout && pinged.is_some_and(|time| time >= timeout / 2) {
            return Pulse::Silent;
        }
        if silent >= pace && pinged.is_none() {
            self.pinged = Some(now);
            return Pulse::Ask;
        }
        Pulse::Fine
    }
}

pub(super) struct Session<F: Fabric> {
    /// Its number, which is its endpoint's as well.
    pub(super) number: u64,
    /// The number of the other side; 0: not known yet.
    pub(super) other: u64,
    pub(super) phase: Phase,
    /// The link it carries; `None` on the target's side.
    pub(super) link: Option<Arc<Wiring>>,
    /// Leads to an agent that is not kvx.
    pub(super) foreign: bool,
    /// The peer has said its last word: nothing needs to be broken off but what is still in flight.
    pub(super) parted: bool,
    pub(super) peer: Identity,
    pub(super) process: Option<Watched>,
    pub(super) life: Life,
    pub(super) incoming: Incoming,
    outgoing: Outgoing,

    /// Regions of the peer, by their numbers: looked up for each transfer.
    pub(super) imports: BTreeMap<u64, Imported<F::Remote>>,
    /// Imports that are not answered.
    pub(super) wanted: usize,
    /// Transfers that wait for them.
    pub(super) waiting: Vec<Waiting>,
    /// Transfers under way.
    pub(super) jobs: usize,
    /// Regions that the peer wants back and transfers still use.
    pub(super) recalled: Vec<RegionId>,
    /// Notifications that were sent, by number, and those that were not.
    pub(super) sent: HashMap<u64, Ticket>,
    pub(super) notices: VecDeque<Notice>,
    notice_bytes: usize,
    next_notice: u64,

    /// Regions of ours that the peer was granted, and has not released.
    pub(super) granted: HashSet<RegionId>,
    /// The peer's notifications that found no room.
    pub(super) parked: VecDeque<(u64, Box<[u8]>)>,
}

impl<F: Fabric> Session<F> {
    pub(super) fn new(number: u64, link: Option<Arc<Wiring>>, peer: Identity, until: Instant) -> Self {
        Session {
            number,
            other: 0,
            phase: Phase::Greeting(until),
            link,
            foreign: false,
            parted: false,
            peer,
            process: None,
            life: Life::begins(Instant::now()),
            incoming: Incoming::default(),
            outgoing: Outgoing::default(),
            imports: BTreeMap::new(),
            wanted: 0,
            waiting: Vec::new(),
            jobs: 0,
            recalled: Vec::new(),
            sent: HashMap::new(),
            notices: VecDeque::new(),
            notice_bytes: 0,
            next_notice: 0,
            granted: HashSet::new(),
            parked: VecDeque::new(),
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.phase == Phase::Up
    }

    /// Whether it only waits for its end.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Closing | Phase::Leaving(_) | Phase::Lost)
    }

    /// Queues a message. Errors: `Exhausted` for a peer that does not read.
    pub(super) fn send(&mut self, message: &Message<'_>, max: usize) -> Result<()> {
        if self.phase == Phase::Lost || self.foreign {
            return Ok(());
        }
        if self.outgoing.len() > MAX_QUEUED {
            return Err(Error::new(Kind::Exhausted, format!("the peer has left {MAX_QUEUED} frames unread")));
        }
        self.outgoing.push(self.other, self.number, &message.encode(), max);
        Ok(())
    }

    /// Sends what the library takes. Says how many frames it took.
    pub(super) fn push_out(&mut self, fabric: &mut F) -> Result<usize> {
        let mut taken = 0;
        while let Some(frame) = self.outgoing.front() {
            if fabric.send(EndpointId(self.number), frame)? == Sent::Later {
                break;
            }
            self.outgoing.pop();
            taken += 1;
        }
        Ok(taken)
    }

    /// Whether frames wait, or notifications for a foreign agent.
    pub(super) fn has_waiting(&self) -> bool {
        self.outgoing.len() > 0 || self.foreign && self.is_up() && !self.notices.is_empty()
    }

    pub(super) fn forget_frames(&mut self) {
        self.outgoing.clear();
    }

    /// Notes whether an answer is awaited, after what is in flight changed. Says when, if that began just now.
    pub(super) fn note_awaiting(&mut self) -> Option<Instant> {
        // A region that was asked for is work when a transfer waits for it: of several lanes, those that the transfers do
        // not take may be answered later than those end.
        let awaits = !self.foreign && (!self.waiting.is_empty() || !self.sent.is_empty() || self.jobs > 0);
        match (awaits, self.life.awaited) {
            (true, None) => {
                self.life.awaited = Some(Instant::now());
                self.life.awaited
            }
            (false, Some(_)) => {
                (self.life.awaited, self.life.pinged) = (None, None);
                None
            }
            _ => None,
        }
    }

    /// Queues a notification. Errors: `Exhausted`, with the ticket.
    pub(super) fn add_notice(&mut self, bytes: Box<[u8]>, done: Ticket) -> Result<(), (Ticket, Error)> {
        if self.notice_bytes + bytes.len() > MAX_WAITING {
            let why = format!(
                "{MAX_WAITING} bytes of notifications wait for this peer already: it does not take them"
            );
            return Err((done, Error::new(Kind::Exhausted, why)));
        }
        self.notice_bytes += bytes.len();
        self.notices.push_back(Notice { bytes, done });
        Ok(())
    }

    /// Sends the notifications that there is room for. Errors as [`send`](Session::send).
    pub(super) fn send_notices(&mut self, max: usize) -> Result<()> {
        while !self.foreign
            && self.sent.len() < WINDOW
            && let Some(Notice { bytes, done }) = self.notices.pop_front()
        {
            self.notice_bytes -= bytes.len();
            let notice = self.next_notice;
            self.next_notice += 1;
            self.sent.insert(notice, done);
            self.send(&Message::Notify { notice, bytes: &bytes }, max)?;
        }
        Ok(())
    }

    /// Hands notifications to a foreign agent, as far as the library takes them.
    pub(super) fn notify_foreign(&mut self, fabric: &mut F, settled: &mut Vec<(Ticket, Result<()>)>) {
        while self.foreign
            && self.is_up()
            && let Some(notice) = self.notices.front()
        {
            let result = match fabric.notify_foreign(EndpointId(self.number), &notice.bytes) {
                Ok(Sent::Later) => return,
                Ok(Sent::Taken) => Ok(()),
                Err(why) => Err(why),
            };
            if let Some(Notice { bytes, done }) = self.notices.pop_front() {
                self.notice_bytes -= bytes.len();
                settled.push((done, result));
            }
        }
    }

    /// Every ticket of what is not in the library's hands.
    pub(super) fn take_tickets(&mut self) -> Vec<Ticket> {
        let mut tickets: Vec<Ticket> = self.sent.drain().map(|(_, done)| done).collect();
        tickets.extend(self.notices.drain(..).map(|notice| notice.done));
        tickets.extend(self.waiting.drain(..).map(|waiting| waiting.done));
        (self.wanted, self.notice_bytes) = (0, 0);
        tickets
    }
}

#[cfg(test)]
mod tests {
    use super::super::hostile::{Quiet, identity};
    use super::*;

    #[test]
    fn a_region_that_nobody_waits_for_is_no_work_in_flight() {
        let mut session = Session::<Quiet>::new(1, None, identity("peer"), Instant::now());
        session.wanted = 1;
        assert_eq!(session.note_awaiting(), None);
        session.jobs = 1;
        assert!(session.note_awaiting().is_some() && session.life.awaited.is_some());
        session.jobs = 0;
        assert_eq!((session.note_awaiting(), session.life.awaited), (None, None));
    }

    #[test]
    fn only_a_peer_that_owes_an_answer_and_was_asked_is_silent() {
        let (pace, timeout) = (Duration::from_secs(1), Duration::from_secs(4));
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut life = Life::begins(start);
        assert_eq!(life.look(at(100), pace, timeout), Pulse::Idle);
        life.awaited = Some(at(100));
        assert_eq!(life.look(at(100), pace, timeout), Pulse::Fine);
        assert_eq!(life.look(at(101), pace, timeout), Pulse::Ask);
        assert_eq!(life.look(at(102), pace, timeout), Pulse::Fine);
        assert_eq!(life.look(at(104), pace, timeout), Pulse::Silent);
        // Stopped ourselves for a long time: the peer is asked first.
        let mut life = Life { awaited: Some(start), ..Life::begins(start) };
        assert_eq!(life.look(at(60), pace, timeout), Pulse::Ask);
        assert_eq!(life.look(at(61), pace, timeout), Pulse::Fine);
    }
}
