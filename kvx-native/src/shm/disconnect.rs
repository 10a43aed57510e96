//! The end of connections: lost, closed or silent; and the timer that notices silent peers.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kvx_backend::control::errors::{closed, no_handshake, peer_closed, peer_died, peer_silent};
use kvx_backend::control::{ControlMessage, SilenceStatus};
use kvx_backend::reactor::Outbox;
use kvx_core::Error;
use kvx_core::backend::{LinkId, LinkState};

use super::connection::{End, Phase};
use super::error::{NAME, error};
use super::flights::FlightPurpose;
use super::machine::{ALL, Machine};
use super::socket;
use super::work::Work;
use crate::clock;

/// The time that a machine that ends waits for peers to release regions.
const LAST_PATIENCE: Duration = Duration::from_millis(150);

/// The interval at which it meanwhile checks copies of devices, which no longer wake it.
const LAST_LOOK: Duration = Duration::from_millis(1);

impl Machine {
    /// Ends a connection: fails all operations in flight and releases the peer's regions. Regions
    /// that the peer may still read are released once it is known that it does not.
    pub(crate) fn end(
        &mut self,
        at: usize,
        reason: Error,
        end: End,
        report: Option<LinkState>,
        out: &mut Outbox,
    ) {
        if !self.connections[at].is_leaving() {
            self.release_all(at, &reason, out);
            let link = self.connections[at].link.clone();
            if let Some(link) = link
                && self.links.remove(&link.id).is_some()
            {
                link.gone.set(reason.clone()).ok(); // the first reason stays
                if let Some(state) = report {
                    out.link(link.id, state);
                }
            }
        }
        let busy_windows = self.connections[at].has_busy_windows(None);
        if busy_windows {
            self.look_by(clock::now());
        }
        let proven = end == End::Proven;
        let flying = busy_windows
            || self.flights.any_at(at)
            || self.openings.any_at(at)
            || !proven && self.close_devices(at);
        let connection = &mut self.connections[at];
        for (done, result) in connection.writes.fail_all(&reason, proven) {
            out.settle(done, result);
        }
        if proven || !flying && connection.writes.is_empty() && connection.granted.is_empty() {
            connection.granted.clear();
            connection.unwatch(&self.poller);
            connection.release_held(&mut self.held);
            let owner = connection.held_bytes_owner();
            // The peer sees the end of the socket, and may free its memory, after these closes.
            self.close_devices(at);
            self.connections.remove(at).socket.close();
            for flight in self.flights.iter_mut().filter(|flight| flight.at == Some(at)) {
                flight.detach(owner.clone(), &mut self.held);
            }
            self.openings.detach(at);
            self.confirm(at, None, out);
            return;
        }
        if !connection.is_leaving() {
            connection.clear_queue();
            connection.flush(&self.poller);
            connection.phase = Phase::Leaving;
            connection.note_held(&mut self.held).ok(); // cannot fail: it holds less
        }
        // The shutdown tells the peer that this end holds nothing of it.
        if !flying && !std::mem::replace(&mut connection.finished, true) {
            socket::finish(connection.socket.as_fd());
        }
    }

    fn release_all(&mut self, at: usize, reason: &Error, out: &mut Outbox) {
        for work in self.turns.extract(|work| work.connection() == Some(at)) {
            if let Work::Pull(pull) = &work {
                self.forget_pull(at, pull.cost);
            }
            work.settle(reason.clone(), out);
        }
        for flight in self.flights.iter_mut().filter(|flight| flight.at == Some(at)) {
            if let FlightPurpose::Pull { write, .. } = &mut flight.purpose {
                *write = None; // the peer no longer waits for an answer
            }
        }
        self.stop_flights(|flight| flight.at == Some(at), reason, out);
        self.populates.retain(|populate| populate.at != at);
        let connection = &mut self.connections[at];
        for waiting in connection.waiting.drain(..) {
            out.settle(waiting.done, Err(reason.clone()));
        }
        for done in connection.to_peer.end() {
            out.settle(done, Err(reason.clone()));
        }
        connection.shut_windows(|_| true);
        connection.imports.clear();
        connection.watched = None;
        connection.lent.clear();
        connection.releasing.clear();
        connection.from_peer.clear();
        connection.pulls = 0;
    }

    /// Processes the messages of a peer that has ended or closed, then ends the connection.
    pub(crate) fn take_peer_end(&mut self, at: usize, out: &mut Outbox) {
        self.receive(at, ALL, out);
        // Expected: the peer's last message ended the connection.
        let Some(connection) = self.connections.get(at) else { return };
        let ended = connection.process.has_ended_with(connection.socket.as_fd());
        // An exiting process loses its memory first, and may still copy until its last thread has
        // ended.
        let proven = ended || !connection.process.still_behind(connection.socket.as_fd());
        let reason = if ended || !proven { peer_died() } else { peer_closed() }.with_backend(NAME);
        let end = if proven { End::Proven } else { End::Ours };
        self.end(at, reason.clone(), end, Some(LinkState::Lost(reason)), out);
    }

    /// Ends the connection of a peer that violated the protocol or exceeded its limits. Nothing
    /// more is read from it.
    pub(crate) fn cut_off(&mut self, at: usize, reason: Error, out: &mut Outbox) {
        let connection = &self.connections[at];
        let (pid, peer) = (connection.process.pid, connection.peer.as_ref());
        tracing::warn!(pid, ?peer, %reason, "SHM: closed a connection");
        let reason = error(reason.kind(), format!("the link was closed: {}", reason.sentence()));
        self.end(at, reason.clone(), End::Ours, Some(LinkState::Lost(reason)), out);
    }

    /// Closes a link for core.
    pub(crate) fn close(&mut self, link: LinkId, out: &mut Outbox) {
        if let Some(&at) = self.links.get(&link) {
            self.end(at, closed().with_backend(NAME), End::Ours, None, out);
        }
        self.connecting.retain(|connecting| connecting.link.id != link);
    }

    /// Runs the timers that are due.
    pub(crate) fn look(&mut self, out: &mut Outbox) -> usize {
        let Some(next) = self.next_look else { return 0 };
        let now = clock::now();
        if now < next {
            return 0;
        }
        self.next_look = None;
        self.accept_again();
        self.connect_again(now, out);
        self.look_at_copies(now);
        self.release_busy_windows(out);
        let (mut late, mut exiting) = (Vec::new(), Vec::new());
        let mut again: Option<Instant> = None;
        for (at, connection) in &mut self.connections {
            if connection.crowded {
                connection.flush(&self.poller);
                connection.note_held(&mut self.held).ok(); // cannot fail: it holds less
            }
            match connection.phase {
                Phase::Hello(until) if until <= now => late.push(at),
                Phase::Hello(until) => again = Some(again.map_or(until, |next| next.min(until))),
                Phase::Leaving => {}
                Phase::Up => {
                    if connection.is_paused() {
                        // The peer may have answered: no message of a paused connection is read.
                        connection.silence.note_activity(now);
                    }
                    let status = connection.silence.look(now, self.peer_timeout);
                    // A process with much to free, like one with a GPU, exits for seconds before
                    // its end shows. It answers nothing any more.
                    let has_waited = !connection.is_paused() && connection.silence.since() == now;
                    if has_waited && connection.process.is_exiting() {
                        exiting.push(at);
                        continue;
                    }
                    let next = match status {
                        SilenceStatus::Idle => continue,
                        SilenceStatus::Lost => {
                            late.push(at);
                            continue;
                        }
                        SilenceStatus::Ask(next) => {
                            connection.send(&self.poller, ControlMessage::Ping);
                            next
                        }
                        SilenceStatus::Until(next) => next,
                    };
                    again = Some(again.map_or(next, |again| again.min(next)));
                }
            }
        }
        if let Some(again) = again {
            self.look_by(again);
        }
        for at in late {
            let silent = self.connections[at].is_up();
            let reason = if silent { peer_silent(self.peer_timeout) } else { no_handshake() }
                .with_backend(NAME);
            self.end(at, reason.clone(), End::Ours, Some(LinkState::Lost(reason)), out);
        }
        for at in exiting {
            let reason = peer_died().with_backend(NAME);
            self.end(at, reason.clone(), End::Ours, Some(LinkState::Lost(reason)), out);
        }
        1
    }

    /// Ends every connection when the machine ends: gives peers a moment to release regions, and
    /// never frees regions that they have not released.
    pub(crate) fn end_all(&mut self, out: &mut Outbox) {
        let closed = closed().with_backend(NAME);
        let all: Vec<usize> = self.connections.iter().map(|(at, _)| at).collect();
        for at in all {
            self.end(at, closed.clone(), End::Ours, Some(LinkState::Lost(closed.clone())), out);
        }
        for connecting in std::mem::take(&mut self.connecting) {
            out.link(connecting.link.id, LinkState::Lost(closed.clone()));
        }
        let until = Instant::now() + LAST_PATIENCE;
        while Instant::now() < until {
            self.take_device_reports(out);
            let flying = self.flights.under_way();
            if flying.is_empty() && self.connections.is_empty() {
                break;
            }
            if self.handle_events(out) == 0 {
                let waits = !flying.is_empty() || self.openings.any();
                let longest = if waits { LAST_LOOK } else { LAST_PATIENCE };
                self.poller.wait(until.saturating_duration_since(Instant::now()).min(longest));
            }
            flying.into_iter().for_each(|number| self.take_batch_ends(number, out));
            self.release_busy_windows(out);
        }
        self.keep_unproven(out);
        let left: Vec<usize> = self.connections.iter().map(|(at, _)| at).collect();
        for at in left {
            self.close_devices(at); // their sockets end after that
        }
        for (_, mut connection) in std::mem::take(&mut self.connections) {
            let count = connection.writes.forget_all();
            if count > 0 {
                let peer = connection.peer.as_ref();
                tracing::error!(
                    ?peer,
                    count,
                    "SHM: quarantined the memory of writes that a peer may still read"
                );
            }
        }
    }
}
