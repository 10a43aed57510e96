//! One side of a link: the peer's state, the work that waits for it, and the local regions that it
//! holds.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::Ticket;
use kvx_core::backend::sync::Mutex;
use kvx_core::{ErrorKind, Identity, RegionId, Result};

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

/// The limit for frames that wait for a peer to read them; a peer that exceeds it is disconnected.
const MAX_QUEUED: usize = 64 << 10;

/// The silence after which an initiator is asked for a sign of life if nothing else would show its
/// end.
pub(super) const LONG_SILENCE: Duration = Duration::from_secs(60);

/// The peer for which a session's memory counts: the one that its hello names, or `None` until that
/// is confirmed. All unconfirmed sessions count as one.
pub(super) type HeldBytesOwner = Option<Identity>;
/// The memory held for peers, over all lanes of a transport.
pub(super) type SharedHeldBytes = Mutex<HeldBytes<HeldBytesOwner>>;

/// The phase of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The handshake must be done by this time.
    Greeting(Instant),
    Up,
    /// Transfers are still ending; then the peer is notified.
    Closing,
    /// The peer is notified, or cannot be; queued messages are still sent until this time.
    Leaving(Instant),
    /// The peer is lost; transfers are still ending.
    Lost,
}

/// A peer whose first message is incomplete.
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
    /// The session's number, which is also that of its endpoint.
    pub(super) number: u64,
    /// The number of the peer's session; 0 if it is not known yet.
    pub(super) other: u64,
    pub(super) phase: Phase,
    /// The local greeting, until the peer answers it.
    pub(super) greeting: Option<Greeting>,
    /// The claim that the peer must prove before the session is up.
    pub(super) awaited: Option<Claim>,
    /// The link of this session; `None` on the target's side.
    pub(super) link: Option<Arc<SharedLink>>,
    /// True if the peer is a foreign agent.
    pub(super) foreign: bool,
    /// True if the peer has sent its last message: only work in flight must still be aborted.
    pub(super) parted: bool,
    pub(super) peer: Identity,
    pub(super) process: Option<ProcessWatch>,
    pub(super) silence: Silence,
    /// True if nothing is in flight and the peer was asked for a sign of life.
    asked: bool,
    pub(super) incoming: Incoming,
    outgoing: Outgoing,

    /// Regions of the peer.
    pub(super) imports: ImportedRegions<Arc<Import>, (Arc<F::Remote>, RegionId)>,
    /// Transfers that wait for regions to be granted.
    pub(super) waiting: Vec<PendingTransfer>,
    /// The number of transfers in progress.
    pub(super) jobs: usize,
    /// Regions that the peer has recalled and transfers still use.
    pub(super) recalled: HashSet<RegionId>,
    pub(super) to_peer: NoticesToPeer,

    pub(super) granted: GrantedRegions,
    pub(super) from_peer: NoticesFromPeer,
    /// True if the peer that initiated the session has proven that its hello is not a replay.
    confirmed: bool,
    /// The bytes that are counted as held for the peer.
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

    /// Returns true if the session only waits for its end.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Closing | Phase::Leaving(_) | Phase::Lost)
    }

    fn held_bytes_owner(&self) -> HeldBytesOwner {
        self.confirmed.then(|| self.peer.clone())
    }

    /// Returns true if the session counts for this peer and holds something.
    pub(super) fn is_counted_for(&self, owner: &HeldBytesOwner) -> bool {
        self.counted > 0 && self.held_bytes_owner() == *owner
    }

    /// Counts the memory that this end now holds for the peer. Returns `Exhausted` for a peer over
    /// its limit.
    pub(super) fn note_held(&mut self, held: &SharedHeldBytes) -> Result<()> {
        if self.link.is_some() {
            return Ok(()); // this end initiated it, and its own limits apply
        }
        let bytes = self.incoming.held() + self.outgoing.held() + self.from_peer.held();
        if HeldBytes::<HeldBytesOwner>::rounded_to_step(bytes) == self.counted {
            return Ok(());
        }
        held.lock().note(&self.held_bytes_owner(), &mut self.counted, bytes)
    }

    /// Ends the count of memory that the session holds for the peer, because the session ends or
    /// counts for another owner.
    pub(super) fn release_held(&mut self, held: &SharedHeldBytes) {
        if self.counted > 0 {
            // An excess of the peer's other sessions is noticed with them.
            held.lock().note(&self.held_bytes_owner(), &mut self.counted, 0).ok();
        }
    }

    /// Marks a session as up whose initiator has proven itself.
    pub(super) fn confirm(&mut self, held: &SharedHeldBytes) {
        self.release_held(held);
        (self.phase, self.confirmed) = (Phase::Up, true);
    }

    /// Queues a message. Returns `Exhausted` for a peer that does not read.
    pub(super) fn send(&mut self, message: &ControlMessage<'_>, max: usize) -> Result<()> {
        if self.phase == Phase::Lost || self.foreign {
            return Ok(());
        }
        if self.outgoing.len() > MAX_QUEUED {
            return Err(ErrorKind::Exhausted
                .because(format!("the peer has left {MAX_QUEUED} frames unread")));
        }
        self.outgoing.push(self.other, self.number, &message.encode(), max);
        Ok(())
    }

    /// Sends the frames that the library takes. Returns how many it took.
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

    /// Returns true if frames wait, or notifications for a foreign agent.
    pub(super) fn has_waiting(&self) -> bool {
        self.outgoing.len() > 0 || self.foreign && self.is_up() && self.to_peer.front().is_some()
    }

    pub(super) fn forget_frames(&mut self) {
        self.outgoing.clear();
    }

    /// Records whether an answer is outstanding, after the work in flight has changed. Returns the
    /// time if the wait begins now.
    pub(super) fn note_awaiting(&mut self) -> Option<Instant> {
        // A requested region counts as work only while a transfer waits for it: on lanes that no
        // transfer uses, the grant may arrive after the transfers have ended.
        let in_flight = !self.waiting.is_empty() || self.to_peer.awaits_answer() || self.jobs > 0;
        self.silence.note(!self.foreign && (in_flight || self.asked), Instant::now)
    }

    /// Records that the peer sent something.
    pub(super) fn note_activity(&mut self, now: Instant) {
        self.silence.note_activity(now);
        if std::mem::take(&mut self.asked) {
            self.note_awaiting();
        }
    }

    /// Returns true if only silence would show that the peer has ended: an initiator on another
    /// host or in another PID namespace, from which this end requests nothing.
    pub(super) fn ends_unseen(&self) -> bool {
        self.link.is_none() && self.is_up() && self.process.is_none()
    }

    /// Marks a peer that has been silent for long as asked. Otherwise returns the time when that is
    /// due.
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

    /// Sends the notifications that fit into the window. Returns the errors of
    /// [`send`](Session::send).
    pub(super) fn send_notices(&mut self, max: usize) -> Result<()> {
        while !self.foreign
            && let Some((notice, bytes)) = self.to_peer.next_to_send()
        {
            self.send(&ControlMessage::Notify { notice, bytes: &bytes }, max)?;
        }
        Ok(())
    }

    /// Passes notifications for a foreign agent to the library until the library accepts no more.
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

    /// Returns the tickets of all operations that were not passed to the library.
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
    fn a_requested_region_without_a_transfer_is_not_work_in_flight() {
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
        assert!(session.note_awaiting().is_some(), "the wait had ended");
    }
}
