//! The machine behind the reactor's thread: commands, events and turns.

use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Duration;

use kvx_backend::control::ControlMessage as Shared;
use kvx_backend::control::errors::{cancelled, closed, malformed, peer_closed, peer_died};
use kvx_backend::reactor::{Armed, Outbox, Progress, Queued, SLICE, Turn};
use kvx_core::backend::{BoundPlan, LinkState, Ticket};
use kvx_core::{Error, ErrorKind, Result, TransferId};

use super::connection::{Connection, End, HeldBytesOwner, PendingTransfer};
use super::error::{NAME, error, refused};
use super::flights::{Flight, FlightPurpose};
use super::handshake::ProbeWork;
use super::machine::{ALL, Machine};
use super::memory::RevokedRegion;
use super::messages::{MAX_MESSAGE, Message, RegionAccess};
use super::shared_link::{Import, SharedLink};
use super::socket::{self, Ready, RecvOutcome, token};
use super::work::Work;
use crate::clock;

/// The limit for messages taken from one connection in a turn.
const MESSAGES: usize = 32;
/// The bytes above which a turn counts as part of a burst, rather than as a request or two.
const BURST: u64 = 64 << 10;
/// The limit for pieces of work done in a turn.
const WORKS: usize = 32;

/// The time after which sending files is tried again that the kernel did not take.
const CROWDED: Duration = Duration::from_millis(20);

/// A request of another thread to the machine.
pub(crate) enum Command {
    Connect {
        link: Arc<SharedLink>,
        socket: Vec<u8>,
    },
    Import {
        link: Arc<SharedLink>,
        import: Arc<Import>,
    },
    /// Posts a transfer. A small read may be done at once on the thread `inline_on`.
    Post {
        link: Arc<SharedLink>,
        plan: Arc<BoundPlan>,
        id: TransferId,
        done: Ticket,
        inline_on: Option<ThreadId>,
    },
    Notify {
        link: Arc<SharedLink>,
        bytes: Box<[u8]>,
        done: Ticket,
    },
    Cancel {
        link: Arc<SharedLink>,
        id: TransferId,
    },
    Close {
        link: Arc<SharedLink>,
    },
    Revoke {
        region: RevokedRegion,
        done: Ticket,
    },
    /// Reports that a device or a thread has ended a batch of this flight.
    BatchEnded {
        number: u64,
    },
    /// Reports that a device has opened or closed memory of a peer.
    DeviceReported,
    Resume,
    Shutdown {
        done: Ticket,
    },
}

impl Machine {
    /// Handles the events of the sockets. Returns their number.
    pub(crate) fn handle_events(&mut self, out: &mut Outbox) -> usize {
        let ready = self.poller.take();
        for (token, flags) in &ready {
            match token::descriptor(*token) {
                token::Descriptor::Listener(listener) => self.accept(listener, out),
                token::Descriptor::Socket(at) => {
                    if flags.contains(Ready::OUT)
                        && let Some(connection) = self.connections.get_mut(at)
                    {
                        if let Some(reason) = connection.broken.take() {
                            self.cut_off(at, reason, out);
                            continue;
                        }
                        connection.flush(&self.poller);
                        self.pump(at, out);
                    }
                    if self.connections.get(at).is_some_and(Connection::is_paused) {
                        // Only the end of the peer is reported.
                        if flags.intersects(Ready::HUP | Ready::ERR) {
                            self.take_peer_end(at, out);
                        }
                        continue;
                    }
                    self.receive(at, MESSAGES, out);
                    self.count_held(at, out);
                }
                // Another connection may have this place by now: only the end of its own process
                // counts.
                token::Descriptor::Life(at) => {
                    if self
                        .connections
                        .get(at)
                        .is_some_and(|connection| connection.process.has_ended())
                    {
                        self.take_peer_end(at, out);
                    }
                }
            }
        }
        let count = ready.len();
        self.poller.recycle(ready);
        count
    }

    /// Takes up to `most` messages from a connection, or [`ALL`] even while it is paused.
    pub(crate) fn receive(&mut self, at: usize, most: usize, out: &mut Outbox) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(MAX_MESSAGE, 0);
        for _ in 0..most {
            // Expected: the previous message ended the connection.
            let Some(connection) = self.connections.get_mut(at) else { break };
            if connection.is_paused() && most != ALL {
                break;
            }
            let received = match socket::receive(connection.socket.as_fd(), &mut buffer) {
                Ok(RecvOutcome::Message(len, file)) => {
                    connection.silence.note_activity(clock::now());
                    Message::decode(&buffer[..len])
                        .and_then(|message| self.take(at, message, file, out))
                }
                Ok(RecvOutcome::Nothing) => break,
                Ok(RecvOutcome::TooLong) => Err(error(
                    ErrorKind::Malformed,
                    format!("malformed SHM message: longer than {MAX_MESSAGE} bytes"),
                )),
                Ok(RecvOutcome::End) => {
                    // Only users of a link learn whether the peer has died. Finding out may take
                    // milliseconds, which clients that come and go must not cost.
                    let died = connection.link.is_some()
                        && connection.process.has_ended_with(connection.socket.as_fd());
                    if !died && self.greet_again(at, out) {
                        break;
                    }
                    let reason = if died { peer_died() } else { peer_closed() }.with_backend(NAME);
                    self.end(at, reason.clone(), End::Proven, Some(LinkState::Lost(reason)), out);
                    break;
                }
                Err(cause) => {
                    Err(Error::os("a connection failed", cause).with_kind(ErrorKind::PeerLost))
                }
            };
            if let Err(reason) = received {
                if self.connections.get(at).is_some_and(|connection| !connection.is_leaving()) {
                    self.cut_off(at, reason, out);
                }
                break;
            }
        }
        self.buffer = buffer;
    }

    /// Counts the memory that this end holds for a peer. A peer over its limit loses the
    /// connection; if all peers together exceed theirs, the one that holds most loses all its
    /// connections.
    fn count_held(&mut self, at: usize, out: &mut Outbox) {
        // Expected: a message ended the connection.
        let Some(connection) = self.connections.get_mut(at) else { return };
        let noted = connection.note_held(&mut self.held);
        if let Err(why) = noted
            && !connection.is_leaving()
        {
            self.cut_off(at, why, out);
        }
        while let Some(greediest) =
            self.held.greediest(|owner| self.counted_for(owner).next().is_some())
        {
            for at in self.counted_for(&greediest).collect::<Vec<_>>() {
                self.cut_off(at, self.held.too_much(), out);
            }
        }
    }

    /// Returns the connections that count for a peer.
    fn counted_for(&self, owner: &HeldBytesOwner) -> impl Iterator<Item = usize> {
        let its =
            self.connections.iter().filter(|(_, connection)| connection.is_counted_for(owner));
        its.map(|(at, _)| at)
    }

    /// Acts on a message. An error ends the connection.
    fn take(
        &mut self,
        at: usize,
        message: Message<'_>,
        file: Option<OwnedFd>,
        out: &mut Outbox,
    ) -> Result<()> {
        let connection = &self.connections[at];
        if connection.is_leaving() {
            // Only messages that help to end the remaining work matter.
            return match message {
                Message::Done { write, .. } => {
                    self.connections[at].writes.take_answer(write, Ok(()))?;
                    self.pump(at, out);
                    self.leave_if_done(at, out);
                    Ok(())
                }
                Message::Shared(Shared::Released { id }) => {
                    self.take_released(at, id, out)?;
                    self.leave_if_done(at, out);
                    Ok(())
                }
                _ => Ok(()),
            };
        }
        if !message.fits(connection.is_up(), connection.link.is_some()) {
            return Err(malformed("out of place"));
        }
        match message {
            Message::Shared(message) => self.take_shared(at, message, file, out)?,
            Message::Lend { id, access } => self.take_lend(at, id, access, file, out)?,
            Message::Write { write, into, from } => self.take_write(at, write, into, from)?,
            Message::Done { write, result } => {
                self.connections[at].writes.take_answer(write, result.map_err(refused))?;
                self.pump(at, out);
            }
            Message::Cancel { write } => {
                let cancelled = cancelled().with_backend(NAME);
                self.stop_pulls(|pull| pull.at == at && pull.write == write, &cancelled);
                let its = |flight: &Flight| {
                    flight.at == Some(at)
                        && matches!(&flight.purpose, FlightPurpose::Pull { write: its, .. } if *its == Some(write))
                };
                self.stop_flights(its, &cancelled, out);
            }
        }
        self.connections.get(at).map_or(Ok(()), Connection::check_queue)
    }

    fn take_shared(
        &mut self,
        at: usize,
        message: Shared<'_>,
        file: Option<OwnedFd>,
        out: &mut Outbox,
    ) -> Result<()> {
        match message {
            Shared::Hello { versions, body } => self.take_hello(at, versions, body)?,
            Shared::Welcome { version, body } => self.take_welcome(at, version, body)?,
            Shared::Confirm { proof } => self.take_confirm(at, &proof)?,
            Shared::Refuse { why, proof } => self.take_refuse(at, why, proof, out)?,
            Shared::Want { import, id, key } => self.take_want(at, import, id, &key),
            Shared::Grant { import, rest } => {
                self.take_grant(at, import, Ok(RegionAccess::of_grant(rest)?), file, out)?;
            }
            Shared::Deny { import, why } => {
                self.take_grant(at, import, Err(refused(why)), None, out)?
            }
            Shared::Recall { id } => self.take_recall(at, id, out),
            Shared::Released { id } => self.take_released(at, id, out)?,
            Shared::Notify { notice, bytes } => self.take_notice(at, notice, bytes)?,
            Shared::Ack { notice } => self.take_ack(at, notice, out)?,
            Shared::Ping => self.connections[at].send(&self.poller, Shared::Alive),
            Shared::Alive => {}
            Shared::Leave | Shared::Bye => {
                return Err(malformed("SHM ends a link by closing the socket"));
            }
        }
        Ok(())
    }

    fn leave_if_done(&mut self, at: usize, out: &mut Outbox) {
        let connection = &self.connections[at];
        if connection.writes.is_empty() && connection.granted.is_empty() {
            self.end(at, closed().with_backend(NAME), End::Ours, None, out);
        }
    }

    fn work(&mut self, out: &mut Outbox) -> usize {
        let (mut moved, mut works) = (0, 0);
        while moved < SLICE && works < WORKS {
            let Some(work) = self.turns.next_turn() else { break };
            works += 1;
            moved += match work {
                Work::Read(read) => self.read_turn(read, out),
                Work::Pull(pull) => self.pull_turn(pull),
                Work::Flight(number) => self.flight_turn(number, out),
            };
        }
        self.bursting |= moved > BURST;
        if works == 0 { self.populate_turn() } else { works }
    }
}

impl Progress for Machine {
    type Command = Command;
    type Work = ProbeWork;

    fn command(&mut self, command: Command, out: &mut Outbox) {
        match command {
            Command::Connect { link, socket } => self.connect(link, socket, out),
            Command::Import { link, import } => self.import(&link, import),
            Command::Post { link, plan, id, done, inline_on } => {
                self.post(&link, PendingTransfer { plan, id, done }, inline_on, true, out)
            }
            Command::Notify { link, bytes, done } => self.notify(&link, bytes, done, out),
            Command::Cancel { link, id } => self.cancel(&link, id, out),
            Command::Close { link } => self.close(link.id, out),
            Command::Revoke { region, done } => self.revoke(region, done, out),
            Command::BatchEnded { number } => self.take_batch_ends(number, out),
            Command::DeviceReported => self.take_device_reports(out),
            Command::Resume => self.resume(),
            Command::Shutdown { done } => self.shutdown.push(done),
        }
    }

    fn next_work(&mut self, out: &mut Outbox) -> Option<ProbeWork> {
        self.next_probe(out)
    }

    fn abandon(&mut self, out: &mut Outbox) {
        self.abandon_probe(out);
    }

    fn progress(&mut self, _: &Queued, out: &mut Outbox) -> Turn {
        let done = if std::mem::take(&mut self.lent_turn) {
            0
        } else {
            self.handle_events(out) + self.look(out) + self.work(out)
        };
        // A peer that has written much is likely to continue.
        let look_for = Duration::from_micros(if self.bursting { 250 } else { 20 });
        // A probe may hang: not on the thread of a caller.
        Turn { look_for, own_thread_only: !self.to_probe.is_empty(), ..Turn::did(done) }
    }

    fn arm(&mut self) -> Result<Armed> {
        self.bursting = false;
        if !self.turns.is_empty() || !self.populates.is_empty() || !self.to_probe.is_empty() {
            return Ok(Armed::Again);
        }
        if self.poller.take_crowded() {
            self.look_by(clock::now() + CROWDED);
        }
        Ok(Armed::Sleep(self.next_look.map(|next| next.saturating_duration_since(clock::now()))))
    }

    fn fds(&self) -> &[RawFd] {
        &self.fds
    }

    fn stop(&mut self, out: &mut Outbox) {
        self.listeners = [None, None];
        self.end_all(out);
        for done in self.shutdown.drain(..) {
            out.settle(done, Ok(()));
        }
    }

    fn late(command: Command) {
        match command {
            Command::Post { link, done, .. } | Command::Notify { link, done, .. } => {
                done.settle(Err(link.gone()))
            }
            // The table of regions knows which regions peers had not released when the machine
            // ended.
            Command::Revoke { done, .. } | Command::Shutdown { done } => done.settle(Ok(())),
            Command::Connect { .. }
            | Command::Import { .. }
            | Command::Cancel { .. }
            | Command::Close { .. }
            | Command::BatchEnded { .. }
            | Command::DeviceReported
            | Command::Resume => {}
        }
    }
}
