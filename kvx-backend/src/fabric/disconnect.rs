//! The end of links: closed, lost or silent; and the timer that notices silent peers.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::Errno;

use crate::reactor::Outbox;
use kvx_core::backend::LinkState;
use kvx_core::{Error, RegionId};

use super::library::{EndpointId, Fabric};
use super::machine::{Machine, look_by};
use super::session::{LostPeer, Phase};
use super::shared_link::SharedLink;
use crate::control::errors::{closed, no_handshake, peer_died, peer_silent, still_shared};
use crate::control::{ControlMessage, SilenceStatus};
use crate::error;
use crate::process::{ProcessId, ProcessWatch};

/// The lower and upper limit of the interval at which the machine checks peers that owe an answer:
/// whether their processes live, if they can be watched, and whether they are silent.
const BETWEEN_LOOKS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// The time limit for delivering a session's last messages.
const FAREWELL: Duration = Duration::from_secs(5);
/// The time that a machine that shuts down waits for peers to release regions.
const LAST_PATIENCE: Duration = Duration::from_millis(150);

/// The reason why a session needs attention.
enum AttentionReason {
    /// The peer must be asked for a sign of life.
    Ask,
    /// The peer has been silent for too long.
    Silent,
    /// The peer has not answered the handshake.
    Unanswered,
    /// The peer's process has ended.
    Died,
    /// The time for sending the remaining messages is over.
    Gone,
}

impl<F: Fabric> Machine<F> {
    /// Continues a session whose transfers or messages have ended.
    pub(super) fn after_work(&mut self, number: u64, out: &mut Outbox) {
        let interval = self.time_between_looks();
        // Expected: the work itself ended the session, and removed it.
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if let Some(now) = session.note_awaiting() {
            look_by(&mut self.next_look, now + interval);
        }
        if session.jobs > 0 {
            return;
        }
        match session.phase {
            Phase::Closing if session.other == 0 || session.foreign => self.remove(number, out),
            Phase::Closing => {
                session.imports.clear();
                session.phase = Phase::Leaving(Instant::now() + FAREWELL);
                self.look_by(Instant::now() + FAREWELL);
                self.send(number, &ControlMessage::Bye, out);
            }
            Phase::Leaving(_) if !session.has_waiting() => self.remove(number, out),
            Phase::Lost => self.remove(number, out),
            _ => {}
        }
    }

    /// Removes a session whose transfers have ended.
    pub(super) fn remove(&mut self, number: u64, out: &mut Outbox) {
        // Expected: another event of this turn has already removed it.
        let Some(mut session) = self.sessions.remove(&number) else { return };
        session.release_held(&self.held);
        session.imports.clear();
        self.fabric.disconnect(EndpointId(number));
        if !session.granted.is_empty() {
            self.lost_peers
                .insert(number, LostPeer { granted: session.granted, process: session.process });
            self.check_lost_peers(out);
        }
    }

    /// Releases the regions of lost peers whose processes have ended.
    pub(super) fn check_lost_peers(&mut self, out: &mut Outbox) {
        let ended = |lost: &LostPeer| lost.process.as_ref().is_some_and(ProcessWatch::has_ended);
        let gone: Vec<u64> = self
            .lost_peers
            .iter()
            .filter(|(_, lost)| ended(lost))
            .map(|(number, _)| *number)
            .collect();
        for number in gone {
            self.lost_peers.remove(&number);
            self.confirm(number, None, out);
        }
    }

    /// Ends a session whose peer is unreachable. `gone` means that the peer certainly reaches no
    /// local memory any more.
    pub(super) fn lose(&mut self, number: u64, why: Error, gone: bool, out: &mut Outbox) {
        // Expected: the library reports a broken endpoint, or the kernel an ended process, after
        // the session has been removed.
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let gone = gone || session.process.as_ref().is_some_and(ProcessWatch::has_ended);
        if gone {
            session.granted.clear();
            self.confirm(number, None, out);
        }
        self.end(number, why.clone(), Some(LinkState::Lost(why)), Phase::Lost, out);
    }

    /// Ends the session of a peer that violated the protocol or exceeded its limits. Nothing more
    /// is accepted from it.
    pub(super) fn cut_off(&mut self, number: u64, why: Error, out: &mut Outbox) {
        // Expected: the peer violated the protocol twice in one turn.
        let Some(session) = self.sessions.get(&number) else { return };
        if session.phase == Phase::Lost {
            return;
        }
        tracing::warn!(backend = self.name, peer = ?session.peer, %why, "closed a link");
        let why = self.error(why.kind(), format!("the link was closed: {}", why.sentence()));
        self.end(number, why.clone(), Some(LinkState::Lost(why)), Phase::Lost, out);
    }

    /// Ends a session: operations in flight fail, and the session is removed once they have ended.
    pub(super) fn end(
        &mut self,
        number: u64,
        why: Error,
        report: Option<LinkState>,
        phase: Phase,
        out: &mut Outbox,
    ) {
        // Expected: `confirm` before this call removed the session with its last transfer.
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let ending = session.is_ending();
        let (was, severs) = (session.phase, phase == Phase::Lost && session.phase != Phase::Lost);
        if !ending || severs {
            session.phase = phase;
        }
        for done in session.take_tickets() {
            out.settle(done, Err(why.clone()));
        }
        session.from_peer.clear();
        session.note_held(&self.held).ok(); // cannot fail: the session holds less
        if let Some(link) = session.link.clone()
            && self.links.remove(&link.id).is_some()
            && link.gone.set(why.clone()).is_ok() // the first lane's reason counts
            && let Some(state) = report
        {
            out.link(link.id, state);
        }
        if severs {
            session.forget_frames();
            if !session.parted || session.jobs > 0 {
                self.fabric.sever(EndpointId(number));
            }
        } else if phase == Phase::Closing
            && matches!(was, Phase::Greeting(_))
            && session.greeting.is_some()
        {
            // The target may already have the hello: this end closes the session when the answer
            // arrives, or when the handshake times out.
            session.phase = was;
        }
        self.fail_jobs(|running| running.session == number, &why, out);
        self.after_work(number, out);
    }

    pub(super) fn close(&mut self, link: &SharedLink, out: &mut Outbox) {
        if let Some(number) = self.links.get(&link.id).copied() {
            // If another lane was lost, its reason counts.
            let why = link.gone.get().cloned().unwrap_or_else(|| closed().with_backend(self.name));
            self.end(number, why, None, Phase::Closing, out);
        }
    }

    fn time_between_looks(&self) -> Duration {
        (self.peer_timeout / 4).clamp(BETWEEN_LOOKS.0, BETWEEN_LOOKS.1)
    }

    /// Runs the timers that are due.
    pub(super) fn look(&mut self, out: &mut Outbox) -> usize {
        let Some(next) = self.next_look else { return 0 };
        let now = Instant::now();
        if now < next {
            return 0;
        }
        self.next_look = None;
        self.unfinished_hellos.retain(|_, greeting| greeting.until > now);
        let soon = now + self.time_between_looks();
        let mut due: Vec<(u64, AttentionReason)> = Vec::new();
        let mut again: Option<Instant> =
            self.unfinished_hellos.values().map(|greeting| greeting.until).min();
        let mut look_at = |at: Instant| again = Some(again.map_or(at, |next| next.min(at)));
        for (number, session) in &mut self.sessions {
            let look = match session.phase {
                Phase::Greeting(until) if until <= now => {
                    due.push((*number, AttentionReason::Unanswered));
                    continue;
                }
                Phase::Leaving(until) if until <= now => {
                    due.push((*number, AttentionReason::Gone));
                    continue;
                }
                Phase::Greeting(until) | Phase::Leaving(until) => {
                    look_at(until);
                    continue;
                }
                Phase::Lost => continue,
                Phase::Up | Phase::Closing => {
                    session.ask_after_long(now).into_iter().for_each(&mut look_at);
                    session.silence.look(now, self.peer_timeout)
                }
            };
            if look != SilenceStatus::Idle {
                look_at(soon);
            }
            let ended = session.process.as_ref().is_some_and(ProcessWatch::has_ended);
            match look {
                _ if ended => due.push((*number, AttentionReason::Died)),
                SilenceStatus::Ask(_) => due.push((*number, AttentionReason::Ask)),
                SilenceStatus::Lost => due.push((*number, AttentionReason::Silent)),
                SilenceStatus::Idle | SilenceStatus::Until(_) => {}
            }
        }
        if let Some(again) = again {
            self.look_by(again);
        }
        for (number, due) in due {
            match due {
                AttentionReason::Ask => self.send(number, &ControlMessage::Ping, out),
                AttentionReason::Gone => self.remove(number, out),
                AttentionReason::Died => self.peer_died(number, out),
                AttentionReason::Unanswered => self.fail_handshake(number, out),
                AttentionReason::Silent => {
                    let why = peer_silent(self.peer_timeout).with_backend(self.name);
                    self.lose(number, why, false, out);
                }
            }
        }
        self.check_lost_peers(out);
        self.drop_greediest(out);
        self.look_at_lanes();
        1
    }

    pub(super) fn fail_handshake(&mut self, number: u64, out: &mut Outbox) {
        self.lose(number, no_handshake().with_backend(self.name), false, out);
    }

    pub(super) fn peer_died(&mut self, number: u64, out: &mut Outbox) {
        self.lose(number, peer_died().with_backend(self.name), true, out);
    }

    /// Has the machine wake when a peer's process ends.
    pub(super) fn watch(&mut self, number: u64, process: ProcessId) {
        let watched = process.watch().unwrap_or_else(|cause| {
            tracing::warn!(
                backend = self.name,
                %cause,
                "cannot watch a peer's process; its end will be noticed later"
            );
            None
        });
        if let (Some(watched), Some(session)) = (watched, self.sessions.get_mut(&number)) {
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
            if let Err(cause) =
                epoll::add(&self.poller, watched.fd(), epoll::EventData::new_u64(number), flags)
            {
                tracing::warn!(
                    backend = self.name,
                    %cause,
                    "cannot watch a peer's process; raise ulimit -n"
                );
            }
            session.process = Some(watched);
        }
    }

    /// Records which peers' processes have ended.
    pub(super) fn see_ends(&mut self) {
        let mut events: [epoll::Event; 16] = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = match epoll::wait(&self.poller, &mut events[..], Some(&now)) {
            Ok(count) => count,
            // Expected: a signal arrived. The descriptors stay readable for the next call.
            Err(Errno::INTR) => return,
            Err(cause) => {
                return tracing::error!(
                    backend = self.name,
                    %cause,
                    "cannot check whether peers' processes have ended"
                );
            }
        };
        self.ended.extend(
            events[..count].iter().map(|event| event.data.u64()).filter(|number| *number != 0),
        );
    }

    /// Ends the links to processes that have ended. Returns how many.
    pub(super) fn take_ends(&mut self, out: &mut Outbox) -> usize {
        let ended = std::mem::take(&mut self.ended);
        for number in &ended {
            self.peer_died(*number, out);
        }
        if !ended.is_empty() {
            self.check_lost_peers(out);
        }
        ended.len()
    }

    /// Ends every link, gives peers a moment to release regions, and then shuts the library down.
    pub(super) fn end_all(&mut self, out: &mut Outbox) {
        let why = error::closed().with_backend(self.name);
        let all: Vec<u64> = self.sessions.keys().copied().collect();
        for number in all {
            let target = self.sessions.get(&number).is_some_and(|session| session.link.is_none());
            if target
                && self.sessions.get(&number).is_some_and(|session| !session.granted.is_empty())
            {
                self.send(number, &ControlMessage::Leave, out);
            } else {
                self.end(
                    number,
                    why.clone(),
                    Some(LinkState::Lost(why.clone())),
                    Phase::Closing,
                    out,
                );
            }
        }
        let until = Instant::now() + LAST_PATIENCE;
        while !(self.sessions.is_empty() && self.released.is_empty()) && Instant::now() < until {
            self.see_ends();
            if self.poll(out) + self.send_waiting(out) + self.take_ends(out) + self.unregister(out)
                == 0
            {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        self.end_library(&why, out);
    }

    /// Shuts the library down. Memory that peers may still reach, or the library may still touch,
    /// is never freed.
    fn end_library(&mut self, why: &Error, out: &mut Outbox) {
        let numbers: Vec<u64> = self.sessions.keys().copied().collect();
        let mut shared: HashSet<RegionId> = HashSet::new();
        for number in &numbers {
            if let Some(session) = self.sessions.get_mut(number) {
                for done in session.take_tickets() {
                    out.settle(done, Err(why.clone()));
                }
                shared.extend(session.granted.iter());
            }
        }
        shared.extend(self.lost_peers.values().flat_map(|lost| lost.granted.iter()));
        let quiet = self.fabric.stop();
        if quiet {
            self.settle_all(why, out);
        } else {
            self.forget_all();
        }
        self.sessions.clear();
        for (region, done) in self.recalls.abandon(|_| true) {
            let id = region.id;
            region.quarantine();
            out.settle(done, Err(still_shared(id)));
        }
        for (region, done) in self.released.drain(..) {
            let result = if quiet { Ok(()) } else { Err(still_shared(region.id)) };
            if quiet {
                region.free();
            } else {
                region.quarantine();
            }
            out.settle(done, result);
        }
        for region in self.regions.close() {
            if !quiet || shared.contains(&region.id) {
                region.quarantine();
            } else if region.release() {
                region.free();
            }
        }
    }
}
