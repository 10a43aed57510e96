//! The machine behind the reactor's thread: commands, events, turns.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use kvx_backend::control::errors::{cancelled, closed, malformed, peer_closed, peer_died};
use kvx_backend::control::proof::Keys;
use kvx_backend::control::{ControlMessage as Shared, HeldBytes, Recalls};
use kvx_backend::rate_limit::RateLimited;
use kvx_backend::reactor::{Armed, Outbox, Progress, Queued, SLICE, Turn, WorkQueue, no_poller};
use kvx_core::fork::Private;
use kvx_core::transport::{Context, Events, LinkState};
use kvx_core::{
    Bound, DeviceAccess, Error, ErrorKind, Identity, LinkId, Result, Ticket, TransferId,
};
use slab::Slab;

use super::address::{name_socket_name, random_socket_name};
use super::config::Config;
use super::connection::{Connection, HeldBytesOwner, Waiting};
use super::copy::Copier;
use super::copying::Copying;
use super::ending::End;
use super::error::{NAME, error, refused};
use super::flights::{Flight, FlightPurpose, Flights, ReactorHandle};
use super::granting::Populate;
use super::handshake::{self, Connecting};
use super::host;
use super::link::{Import, Wiring};
use super::memory::{Regions, Revoked};
use super::messages::{MAX_MESSAGE, Message, Reached};
use super::pulls::Pull;
use super::reads::Read;
use super::socket::{self, Poller, Ready, Received};

/// How many sockets a transport listens on.
pub(crate) const LISTENERS: usize = 2;
/// The most messages taken from one connection in a turn.
const MESSAGES: usize = 32;
/// Bytes of a turn that are more than a request or two.
const BURST: u64 = 64 << 10;
/// The most pieces of work done in a turn.
const WORKS: usize = 32;

/// How long files wait that the kernel does not take now.
const CROWDED: Duration = Duration::from_millis(20);

/// Which descriptor an event speaks of.
pub(crate) mod token {
    use super::LISTENERS;

    pub(crate) fn socket(at: usize) -> u64 {
        (LISTENERS + 2 * at) as u64
    }

    pub(crate) fn life(at: usize) -> u64 {
        socket(at) + 1
    }

    pub(super) enum Which {
        Listener(usize),
        Socket(usize),
        Life(usize),
    }

    pub(super) fn which(token: u64) -> Which {
        let token = token as usize;
        match token.checked_sub(LISTENERS) {
            None => Which::Listener(token),
            Some(rest) if rest % 2 == 0 => Which::Socket(rest / 2),
            Some(rest) => Which::Life(rest / 2),
        }
    }
}

/// What other threads ask of the machine.
pub(crate) enum Command {
    Connect {
        link: Arc<Wiring>,
        socket: Vec<u8>,
    },
    Import {
        link: Arc<Wiring>,
        import: Arc<Import>,
    },
    /// `inline_on`: on this thread a small read may be done at once.
    Post {
        link: Arc<Wiring>,
        plan: Arc<Bound>,
        id: TransferId,
        done: Ticket,
        inline_on: Option<ThreadId>,
    },
    Notify {
        link: Arc<Wiring>,
        bytes: Box<[u8]>,
        done: Ticket,
    },
    Cancel {
        link: Arc<Wiring>,
        id: TransferId,
    },
    Close {
        link: Arc<Wiring>,
    },
    Revoke {
        region: Revoked,
        done: Ticket,
    },
    /// A device or a thread has ended a batch of this flight.
    Landed {
        number: u64,
    },
    Resume,
    Shutdown {
        done: Ticket,
    },
}

/// Work that takes turns.
pub(crate) enum Work {
    Read(Box<Read>),
    Pull(Box<Pull>),
    /// The next batch of a flight.
    Flight(u64),
}

pub(crate) struct Machine {
    pub(crate) me: Identity,
    /// What peers prove to us by.
    pub(crate) keys: Keys,
    pub(crate) strangers: RateLimited,
    pub(crate) config: Config,
    pub(crate) events: Arc<dyn Events>,
    pub(crate) peer_timeout: Duration,
    pub(crate) regions: Arc<Regions>,
    pub(crate) devices: Vec<Arc<dyn DeviceAccess>>,
    pub(crate) flights: Flights,
    /// What peers read to find out whether they may.
    pub(crate) probe_bytes: Box<[u8; 32]>,
    socket_name: Vec<u8>,
    pub(crate) listeners: [Option<Private>; LISTENERS],
    pub(crate) accepting: bool,
    pub(crate) poller: Poller,
    fds: [RawFd; 1],
    pub(crate) connections: Slab<Connection>,
    /// What peers have us hold.
    pub(crate) held: HeldBytes<HeldBytesOwner>,
    pub(crate) links: HashMap<LinkId, usize>,
    pub(crate) connecting: Vec<Connecting>,
    /// By the connections whose peers hold the region.
    pub(crate) recalls: Recalls<usize, (Revoked, Ticket)>,
    pub(crate) turns: WorkQueue<Work>,
    /// Mappings to be made present while there is nothing else to do.
    pub(crate) populates: VecDeque<Populate>,
    pub(crate) copier: Copier,
    pub(crate) copying: Copying,
    /// Of copies that wait for a page.
    pub(crate) hung: RateLimited,
    buffer: Vec<u8>,
    /// When to look at the clock; `None`: nothing depends on it.
    pub(crate) next_look: Option<Instant>,
    /// This turn was lent by a thread that posted a small read, which is done: nothing more is done on it.
    pub(crate) lent_turn: bool,
    /// Much has been moved since the machine last slept.
    bursting: bool,
    shutdown: Vec<Ticket>,
}

impl Machine {
    pub(crate) fn new(context: Context, config: Config, regions: Arc<Regions>) -> Result<Self> {
        let socket_name = random_socket_name()?;
        let listeners = handshake::listen(&socket_name, &name_socket_name(&context.agent.name))?;
        let poller = Poller::new().map_err(no_poller)?;
        for (token, listener) in listeners.iter().enumerate() {
            if let Some(listener) = listener {
                poller.add(listener.as_fd(), token as u64, Ready::IN).map_err(no_poller)?;
            }
        }
        let mut probe_bytes = Box::new([0; 32]);
        probe_bytes[..16].copy_from_slice(&host::random()?);
        probe_bytes[16..].copy_from_slice(&host::random()?);
        let copying = Copying::of(&context.agent.name);
        Ok(Machine {
            keys: Keys::new(&context.invitation, context.secret.as_ref()),
            strangers: RateLimited::default(),
            me: context.agent,
            config,
            events: context.events,
            peer_timeout: context.peer_timeout,
            regions,
            devices: context.devices,
            flights: Flights::default(),
            probe_bytes,
            socket_name,
            listeners,
            accepting: true,
            fds: [poller.fd().as_raw_fd()],
            poller,
            connections: Slab::new(),
            held: HeldBytes::default(),
            links: HashMap::new(),
            connecting: Vec::new(),
            recalls: Recalls::default(),
            turns: WorkQueue::default(),
            populates: VecDeque::new(),
            copier: Copier::new(),
            copying,
            hung: RateLimited::default(),
            buffer: vec![0; MAX_MESSAGE],
            next_look: None,
            lent_turn: false,
            bursting: false,
            shutdown: Vec::new(),
        })
    }

    /// How a device's thread reaches it.
    pub(crate) fn home(&self) -> Arc<ReactorHandle> {
        Arc::clone(&self.flights.home)
    }

    /// Where it listens.
    pub(crate) fn socket_name(&self) -> Vec<u8> {
        self.socket_name.clone()
    }

    /// Takes what the sockets have. Says how many events there were.
    pub(crate) fn handle_events(&mut self, out: &mut Outbox) -> usize {
        let ready = self.poller.take();
        for (token, flags) in &ready {
            match token::which(*token) {
                token::Which::Listener(listener) => self.accept(listener, out),
                token::Which::Socket(at) => {
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
                    self.receive(at, MESSAGES, out);
                    self.count_held(at, out);
                }
                // Another connection may have this place by now: only its own process's end counts.
                token::Which::Life(at) => {
                    if self.connections.get(at).is_some_and(|connection| connection.process.ended())
                    {
                        self.other_end_gone(at, out);
                    }
                }
            }
        }
        let count = ready.len();
        self.poller.recycle(ready);
        count
    }

    /// Takes up to `most` messages of a connection.
    pub(crate) fn receive(&mut self, at: usize, most: usize, out: &mut Outbox) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(MAX_MESSAGE, 0);
        for _ in 0..most {
            let Some(connection) = self.connections.get_mut(at) else { break };
            let received = match socket::receive(connection.socket.as_fd(), &mut buffer) {
                Ok(Received::Message(len, file)) => {
                    connection.silence.heard(Instant::now());
                    Message::decode(&buffer[..len])
                        .and_then(|message| self.take(at, message, file, out))
                }
                Ok(Received::Nothing) => break,
                Ok(Received::TooLong) => Err(error(
                    ErrorKind::Malformed,
                    format!("malformed SHM message: longer than {MAX_MESSAGE} bytes"),
                )),
                Ok(Received::End) => {
                    let died = connection.process.ended_with(connection.socket.as_fd());
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

    /// Counts what a peer has us hold. One with too much loses the connection; when all of them have, the one with most
    /// loses all of its.
    fn count_held(&mut self, at: usize, out: &mut Outbox) {
        let Some(connection) = self.connections.get_mut(at) else { return };
        let noted = connection.note_held(&mut self.held);
        if let Err(why) = noted
            && !connection.is_leaving()
        {
            self.cut_off(at, why, out);
        }
        while let Some(greediest) =
            self.held.greediest(|whose| self.counted_for(whose).next().is_some())
        {
            for at in self.counted_for(&greediest).collect::<Vec<_>>() {
                self.cut_off(at, self.held.too_much(), out);
            }
        }
    }

    /// What a peer can lose.
    fn counted_for(&self, whose: &HeldBytesOwner) -> impl Iterator<Item = usize> {
        let its =
            self.connections.iter().filter(|(_, connection)| connection.is_counted_for(whose));
        its.map(|(at, _)| at)
    }

    /// Acts on a message. Errors end the connection.
    fn take(
        &mut self,
        at: usize,
        message: Message<'_>,
        file: Option<OwnedFd>,
        out: &mut Outbox,
    ) -> Result<()> {
        let connection = &self.connections[at];
        if connection.is_leaving() {
            // Only what brings the end of what is left matters.
            return match message {
                Message::Done { write, .. } => {
                    self.connections[at].writes.answered(write, Ok(()))?;
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
            Message::Lend { id, reached } => self.take_lend(at, id, reached, file.as_ref())?,
            Message::Write { write, into, from } => self.take_write(at, write, into, from)?,
            Message::Done { write, result } => {
                self.connections[at].writes.answered(write, result.map_err(refused))?;
                self.pump(at, out);
            }
            Message::Cancel { write } => {
                let cancelled = cancelled().with_backend(NAME);
                self.stop_pulls(|pull| pull.at == at && pull.write == write, &cancelled);
                let its = |flight: &Flight| {
                    flight.at == Some(at)
                        && matches!(&flight.errand, FlightPurpose::Pull { write: its, .. } if *its == Some(write))
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
            Shared::Welcome { version, body } => self.take_welcome(at, version, body, out)?,
            Shared::Confirm { proof } => self.take_confirm(at, &proof)?,
            Shared::Refuse { why, proof } => self.take_refuse(at, why, proof, out),
            Shared::Want { import, id, key } => self.take_want(at, import, id, &key),
            Shared::Grant { import, rest } => {
                self.take_grant(at, import, Ok(Reached::of_grant(rest)?), file, out)?;
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
            Shared::Leave | Shared::Bye => return Err(malformed("the end of a socket says it")),
        }
        Ok(())
    }

    fn leave_if_done(&mut self, at: usize, out: &mut Outbox) {
        let connection = &self.connections[at];
        if connection.writes.is_empty() && connection.granted.is_empty() {
            self.end(at, closed().with_backend(NAME), End::Ours, None, out);
        }
    }

    /// Sends the parts of writes that there is room for, and settles the writes that are done.
    pub(crate) fn pump(&mut self, at: usize, out: &mut Outbox) {
        let mut settled = Vec::new();
        self.connections[at].pump(&self.poller, &mut settled);
        for (done, result) in settled {
            out.settle(done, result);
        }
        self.note_awaiting(at);
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

    fn command(&mut self, command: Command, out: &mut Outbox) {
        match command {
            Command::Connect { link, socket } => self.connect(link, socket, out),
            Command::Import { link, import } => self.import(&link, import),
            Command::Post { link, plan, id, done, inline_on } => {
                self.post(&link, Waiting { plan, id, done }, inline_on, out)
            }
            Command::Notify { link, bytes, done } => self.notify(&link, bytes, done, out),
            Command::Cancel { link, id } => self.cancel(&link, id, out),
            Command::Close { link } => self.close(link.id, out),
            Command::Revoke { region, done } => self.revoke(region, done, out),
            Command::Landed { number } => self.landed(number, out),
            Command::Resume => self.resume(),
            Command::Shutdown { done } => self.shutdown.push(done),
        }
    }

    fn progress(&mut self, _: &Queued, out: &mut Outbox) -> Turn {
        let done = if std::mem::take(&mut self.lent_turn) {
            0
        } else {
            self.handle_events(out) + self.look(out) + self.work(out)
        };
        // A peer that has written much is likely to go on.
        let look_for = Duration::from_micros(if self.bursting { 250 } else { 20 });
        Turn { look_for, ..Turn::did(done) }
    }

    fn arm(&mut self) -> Result<Armed> {
        self.bursting = false;
        if !self.turns.is_empty() || !self.populates.is_empty() {
            return Ok(Armed::Again);
        }
        if self.poller.was_crowded() {
            self.look_by(Instant::now() + CROWDED);
        }
        Ok(Armed::Sleep(self.next_look.map(|next| next.saturating_duration_since(Instant::now()))))
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
            // Peers that had not let go of their regions when the machine ended are known to the table of regions.
            Command::Revoke { done, .. } | Command::Shutdown { done } => done.settle(Ok(())),
            Command::Connect { .. }
            | Command::Import { .. }
            | Command::Cancel { .. }
            | Command::Close { .. }
            | Command::Landed { .. }
            | Command::Resume => {}
        }
    }
}
