//! One side of a link: what is known of the peer, what waits for it, what it holds of ours.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::Ticket;
use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, ErrorKind, Identity, RegionId, Result};

use super::job::PendingTransfer;
use super::library::{EndpointId, Fabric, SendStatus};
use super::shared_link::{Import, SharedLink};
use super::stream::{Incoming, Outgoing};
use crate::control::proof::Claim;
use crate::control::{
    ControlMessage, GrantedRegions, Greeting, HeldBytes, ImportedRegions, NoticesFromPeer,
    NoticesToPeer, Silence,
};
use crate::process::ProcessWatch;

/// The most frames that wait for a peer to read them; one that lets more pile up is cut off.
const MAX_QUEUED: usize = 64 << 10;

/// An initiator whose end nothing would show is asked for a sign of life when it has been silent
/// for so long.
pub(super) const LONG_SILENCE: Duration = Duration::from_secs(60);

/// The peer that the memory of a session counts for: the one that its hello names, or `None` until
/// that is confirmed. All unconfirmed sessions count as one.
pub(super) type HeldBytesOwner = Option<Identity>;
/// What peers have all lanes of a transport hold.
pub(super) type SharedHeldBytes = Mutex<HeldBytes<HeldBytesOwner>>;

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

/// A peer whose first message is not whole yet.
pub(super) struct UnfinishedHello {
    pub(super) incoming: Incoming,
    pub(super) until: Instant,
}

/// A lost peer, which may still have access to regions.
pub(super) struct LostPeer {
    pub(super) granted: GrantedRegions,
    pub(super) process: Option<ProcessWatch>,
}

pub(super) struct Session<F: Fabric> {
    /// Its number, which is its endpoint's as well.
    pub(super) number: u64,
    /// The number of the other side; 0: not known yet.
    pub(super) other: u64,
    pub(super) phase: Phase,
    /// Ours, until it is answered.
    pub(super) greeting: Option<Greeting>,
    /// What the peer has to prove before the session is up.
    pub(super) awaited: Option<Claim>,
    /// The link it carries; `None` on the target's side.
    pub(super) link: Option<Arc<SharedLink>>,
    /// Leads to an agent that is not kvx.
    pub(super) foreign: bool,
    /// The peer has said its last word: nothing needs to be broken off but what is still in flight.
    pub(super) parted: bool,
    pub(super) peer: Identity,
    pub(super) process: Option<ProcessWatch>,
    pub(super) silence: Silence,
    /// Nothing is in flight, and the peer has been asked whether it is there.
    asked: bool,
    pub(super) incoming: Incoming,
    outgoing: Outgoing,

    /// Regions of the peer.
    pub(super) imports: ImportedRegions<Arc<Import>, (Arc<F::Remote>, RegionId)>,
    /// Transfers that wait for them.
    pub(super) waiting: Vec<PendingTransfer>,
    /// Transfers under way.
    pub(super) jobs: usize,
    /// Regions that the peer wants back and transfers still use.
    pub(super) recalled: HashSet<RegionId>,
    pub(super) to_peer: NoticesToPeer,

    pub(super) granted: GrantedRegions,
    pub(super) from_peer: NoticesFromPeer,
    /// The peer that began it has proven that it means it now.
    confirmed: bool,
    /// What is counted as held for its peer.
    pub(super) counted: usize,
}

impl<F: Fabric> Session<F> {
    pub(super) fn new(
        number: u64,
        link: Option<Arc<SharedLink>>,
        peer: Identity,
        until: Instant,
    ) -> Self {
        Session {
            number,
            other: 0,
            phase: Phase::Greeting(until),
            greeting: None,
            awaited: None,
            link,
            foreign: false,
            parted: false,
            peer,
            process: None,
            silence: Silence::new(Instant::now()),
            asked: false,
            incoming: Incoming::default(),
            outgoing: Outgoing::default(),
            imports: ImportedRegions::default(),
            waiting: Vec::new(),
            jobs: 0,
            recalled: HashSet::new(),
            to_peer: NoticesToPeer::default(),
            granted: GrantedRegions::default(),
            from_peer: NoticesFromPeer::default(),
            confirmed: false,
            counted: 0,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.phase == Phase::Up
    }

    /// Returns whether it only waits for its end.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Closing | Phase::Leaving(_) | Phase::Lost)
    }

    fn held_bytes_owner(&self) -> HeldBytesOwner {
        self.confirmed.then(|| self.peer.clone())
    }

    /// Returns whether it belongs to this peer, and has something.
    pub(super) fn is_counted_for(&self, owner: &HeldBytesOwner) -> bool {
        self.counted > 0 && self.held_bytes_owner() == *owner
    }

    /// Counts what its peer has us hold now. Errors: `Exhausted` for one that goes too far.
    pub(super) fn note_held(&mut self, held: &SharedHeldBytes) -> Result<()> {
        if self.link.is_some() {
            return Ok(()); // we began it, and it has bounds of its own
        }
        let bytes = self.incoming.held() + self.outgoing.held() + self.from_peer.held();
        if HeldBytes::<HeldBytesOwner>::rounded_to_step(bytes) == self.counted {
            return Ok(());
        }
        held.lock().note(&self.held_bytes_owner(), &mut self.counted, bytes)
    }

    /// It goes, or counts as another's from now on.
    pub(super) fn release_held(&mut self, held: &SharedHeldBytes) {
        if self.counted > 0 {
            held.lock().note(&self.held_bytes_owner(), &mut self.counted, 0).ok(); // too much for its others is seen with them
        }
    }

    /// The peer that began it is up.
    pub(super) fn confirm(&mut self, held: &SharedHeldBytes) {
        self.release_held(held);
        (self.phase, self.confirmed) = (Phase::Up, true);
    }

    /// Queues a message. Errors: `Exhausted` for a peer that does not read.
    pub(super) fn send(&mut self, message: &ControlMessage<'_>, max: usize) -> Result<()> {
        if self.phase == Phase::Lost || self.foreign {
            return Ok(());
        }
        if self.outgoing.len() > MAX_QUEUED {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("the peer has left {MAX_QUEUED} frames unread"),
            ));
        }
        self.outgoing.push(self.other, self.number, &message.encode(), max);
        Ok(())
    }

    /// Sends what the library takes. Says how many frames it took.
    pub(super) fn push_out(&mut self, fabric: &mut F) -> Result<usize> {
        let mut taken = 0;
        while let Some(frame) = self.outgoing.front() {
            if fabric.send(EndpointId(self.number), frame)? == SendStatus::Later {
                break;
            }
            self.outgoing.pop();
            taken += 1;
        }
        Ok(taken)
    }

    /// Returns whether frames wait, or notifications for a foreign agent.
    pub(super) fn has_waiting(&self) -> bool {
        self.outgoing.len() > 0 || self.foreign && self.is_up() && self.to_peer.front().is_some()
    }

    pub(super) fn forget_frames(&mut self) {
        self.outgoing.clear();
    }

    /// Notes whether an answer is awaited, after the work in flight has changed. Returns the time,
    /// if the wait begins now.
    pub(super) fn note_awaiting(&mut self) -> Option<Instant> {
        // A region that was asked for is work when a transfer waits for it: of several lanes, those
        // that the transfers do not take may be answered later than those end.
        let in_flight = !self.waiting.is_empty() || self.to_peer.awaits_answer() || self.jobs > 0;
        self.silence.note(!self.foreign && (in_flight || self.asked), Instant::now)
    }

    /// Something came from the peer.
    pub(super) fn note_activity(&mut self, now: Instant) {
        self.silence.note_activity(now);
        if std::mem::take(&mut self.asked) {
            self.note_awaiting();
        }
    }

    /// Returns whether nothing but its silence would show that it has ended: an initiator of
    /// another host, or of another namespace of processes, of which we want nothing.
    pub(super) fn ends_unseen(&self) -> bool {
        self.link.is_none() && self.is_up() && self.process.is_none()
    }

    /// Has it asked if it has been silent for long. Says when that will be.
    pub(super) fn ask_after_long(&mut self, now: Instant) -> Option<Instant> {
        if self.asked || !self.ends_unseen() {
            return None;
        }
        let at = self.silence.since() + LONG_SILENCE;
        if at > now {
            return Some(at);
        }
        self.asked = true;
        self.note_awaiting();
        None
    }

    /// Sends the notifications that there is room for. Errors as [`send`](Session::send).
    pub(super) fn send_notices(&mut self, max: usize) -> Result<()> {
        while !self.foreign
            && let Some((notice, bytes)) = self.to_peer.next_to_send()
        {
            self.send(&ControlMessage::Notify { notice, bytes: &bytes }, max)?;
        }
        Ok(())
    }

    /// Hands notifications to a foreign agent, as far as the library takes them.
    pub(super) fn notify_foreign(
        &mut self,
        fabric: &mut F,
        settled: &mut Vec<(Ticket, Result<()>)>,
    ) {
        while self.foreign
            && self.is_up()
            && let Some(bytes) = self.to_peer.front()
        {
            let result = match fabric.notify_foreign(EndpointId(self.number), bytes) {
                Ok(SendStatus::Later) => return,
                Ok(SendStatus::Taken) => Ok(()),
                Err(why) => Err(why),
            };
            if let Some((_, done)) = self.to_peer.pop() {
                settled.push((done, result));
            }
        }
    }

    /// Every ticket of what is not in the library's hands.
    pub(super) fn take_tickets(&mut self) -> Vec<Ticket> {
        let waiting = self.waiting.drain(..).map(|waiting| waiting.done);
        self.to_peer.end().chain(waiting).collect()
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::MemoryKind;
    use kvx_core::backend::RegionKey;

    use super::super::hostile::{Quiet, identity};
    use super::super::shared_link::RemoteMemory;
    use super::*;

    #[test]
    fn a_region_that_nobody_waits_for_is_no_work_in_flight() {
        let mut session = Session::<Quiet>::new(1, None, identity("peer"), Instant::now());
        let what = RemoteMemory::Region {
            id: RegionId(1),
            key: RegionKey([0; 16]),
            len: 1,
            kind: MemoryKind::Host,
            export: [].into(),
        };
        session.imports.want(1, Arc::new(Import { number: 1, what }));
        assert_eq!(session.note_awaiting(), None);
        session.jobs = 1;
        assert!(session.note_awaiting().is_some());
        session.jobs = 0;
        assert_eq!(session.note_awaiting(), None);
        session.jobs = 1;
        assert!(session.note_awaiting().is_some(), "it had ended");
    }
}
