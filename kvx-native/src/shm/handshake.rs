//! The start of connections.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::control::errors::{closed, malformed};
use kvx_backend::control::proof::unauthenticated;
use kvx_backend::control::{ControlMessage, Greeting, Refusal, VERSIONS, verify_hello};
use kvx_backend::reactor::{DetachedWork, Outbox};
use kvx_core::backend::LinkState;
use kvx_core::backend::fork::Private;
use kvx_core::{Error, ErrorKind, Result};
use rustix::io::Errno;

use super::address::name_socket_name;
use super::connection::{AfterProbe, Connecting, Connection, End, Phase, Probing};
use super::copy;
use super::error::{NAME, error, foreign_off, no_connection, refused};
use super::host::{PeerProcess, our_uid};
use super::machine::Machine;
use super::messages::Probe;
use super::shared_link::{Reachability, SharedLink};
use super::socket::{self, Ready, token};
use crate::clock;

/// The time limit for a handshake; a shorter `peer_timeout` takes precedence.
const PATIENCE: Duration = Duration::from_secs(5);
/// The time after which a connection is tried again if the peer's backlog is full.
const AGAIN: Duration = Duration::from_millis(10);
/// The limit for connected clients. Small in tests, which reach it.
const MAX_ACCEPTED: usize = if cfg!(test) { 64 } else { 4096 };
/// The limit for additional clients whose handshake is not done.
const MAX_HALF_OPEN: usize = 256;
/// The limit for greeting again after the target closed the connection during the handshake.
pub(crate) const MAX_GREETING_RETRIES: u8 = 20;
/// The limit for clients accepted in one turn.
const ACCEPT_BATCH: usize = 16;

impl Machine {
    /// Initiates a link.
    pub(crate) fn connect(&mut self, link: Arc<SharedLink>, socket: Vec<u8>, out: &mut Outbox) {
        let until = clock::now() + self.patience();
        let retries = MAX_GREETING_RETRIES;
        self.try_connect(Connecting { link, socket, until, retries }, out);
    }

    pub(crate) fn connect_again(&mut self, now: Instant, out: &mut Outbox) {
        for connecting in std::mem::take(&mut self.connecting) {
            if connecting.until <= now {
                let reason = error(
                    ErrorKind::PeerLost,
                    "the peer does not accept connections: it is stopped or hangs",
                );
                report_lost(&connecting.link, reason, out);
            } else {
                self.try_connect(connecting, out);
            }
        }
    }

    fn try_connect(&mut self, connecting: Connecting, out: &mut Outbox) {
        let link = Arc::clone(&connecting.link);
        let mut found = socket::connect(&connecting.socket);
        if matches!(found, Err(Errno::CONNREFUSED)) {
            // That incarnation has ended. If the agent was restarted on this host, its next
            // incarnation answers under the agent's name.
            found = socket::connect(&name_socket_name(&link.peer.name));
        }
        let begun = match found {
            Ok(socket) => self.begin(socket, connecting),
            Err(Errno::AGAIN) => {
                self.connecting.push(connecting);
                return self.look_by(clock::now() + AGAIN);
            }
            Err(Errno::CONNREFUSED) => Err(nobody_listens()),
            Err(cause) => Err(no_connection(cause)),
        };
        if let Err(reason) = begun {
            report_lost(&link, reason, out);
        }
    }

    fn patience(&self) -> Duration {
        PATIENCE.min(self.peer_timeout)
    }

    fn begin(&mut self, socket: Private, attempt: Connecting) -> Result<()> {
        let link = Arc::clone(&attempt.link);
        let process = PeerProcess::behind(socket.as_fd())?;
        check_user(&process)?;
        if process.has_ended() {
            return Err(nobody_listens()); // a forked child of the peer keeps its socket open
        }
        let now = clock::now();
        let (greeting, body) =
            Greeting::new(&self.me, link.keys.clone(), &self.probe().hello_rest())?;
        let id = link.id;
        let mut connection = Connection::new(socket, process, Some(link), now, self.patience());
        connection.greeting = Some(greeting);
        connection.attempt = Some(attempt);
        let at = self.admit(connection)?;
        self.links.insert(id, at);
        self.connections[at]
            .send(&self.poller, ControlMessage::Hello { versions: VERSIONS, body: &body });
        Ok(())
    }

    /// Greets again if the peer closed the connection during the handshake, as a target does to one
    /// of too many half-open connections. Returns false if the link is lost instead.
    pub(crate) fn greet_again(&mut self, at: usize, out: &mut Outbox) -> bool {
        let connection = &mut self.connections[at];
        let may_retry =
            |attempt: &mut Connecting| attempt.retries > 0 && attempt.until > clock::now();
        if !matches!(connection.phase, Phase::Hello(_)) {
            return false;
        }
        let Some(mut attempt) = connection.attempt.take_if(may_retry) else { return false };
        attempt.retries -= 1;
        // The link has not ended with this connection.
        self.links.remove(&attempt.link.id);
        self.end(at, closed().with_backend(NAME), End::Proven, None, out);
        self.connecting.push(attempt);
        self.look_by(clock::now());
        true
    }

    fn admit(&mut self, mut connection: Connection) -> Result<usize> {
        let entry = self.connections.vacant_entry();
        let at = entry.key();
        connection.watch(&self.poller, token::socket(at), token::life(at)).map_err(|cause| {
            Error::os("cannot watch a connection: raise ulimit -n", cause)
                .with_kind(ErrorKind::Exhausted)
        })?;
        entry.insert(connection);
        self.look_by(clock::now() + self.patience());
        Ok(at)
    }

    /// Accepts the clients that wait on a listener.
    pub(crate) fn accept(&mut self, listener: usize, out: &mut Outbox) {
        for _ in 0..ACCEPT_BATCH {
            // Expected: the machine is ending and has closed its listeners.
            let Some(socket) = &self.listeners[listener] else { return };
            match socket::accept(socket.as_fd()) {
                Ok(Some(socket)) => self.greet(socket, out),
                Ok(None) => return,
                Err(cause) => {
                    // No descriptor is left for a new client: existing clients continue, and
                    // accepting is tried again in a second.
                    tracing::warn!(
                        error = %cause,
                        "SHM: cannot accept clients; raise ulimit -n"
                    );
                    self.pause_accepting();
                    return;
                }
            }
        }
    }

    fn pause_accepting(&mut self) {
        for (token, listener) in self.listeners.iter().enumerate() {
            if let Some(listener) = listener {
                // Cannot fail: the listener was added.
                self.poller.change(listener.as_fd(), token as u64, Ready::empty()).ok();
            }
        }
        self.accepting = false;
        self.look_by(clock::now() + Duration::from_secs(1));
    }

    pub(crate) fn accept_again(&mut self) {
        if !std::mem::replace(&mut self.accepting, true) {
            for (token, listener) in self.listeners.iter().enumerate() {
                if let Some(listener) = listener {
                    // Cannot fail: the listener was added.
                    self.poller.change(listener.as_fd(), token as u64, Ready::IN).ok();
                }
            }
        }
    }

    fn greet(&mut self, socket: Private, out: &mut Outbox) {
        let process = match PeerProcess::behind(socket.as_fd()) {
            Ok(process) => process,
            Err(reason) => return tracing::warn!(%reason, "SHM: rejected a client"),
        };
        if let Err(reason) = check_user(&process) {
            let refuse = ControlMessage::Refuse { why: Refusal::from(&reason), proof: &[] };
            // The client is rejected even if it does not receive the reason.
            socket::send(socket.as_fd(), &refuse.encode(), None).ok();
            let (pid, uid) = (process.pid, process.uid);
            return self.unauthenticated.log(|| {
                tracing::warn!(pid, uid, "SHM: rejected a client of another user");
            });
        }
        self.make_room(out);
        let connection = Connection::new(socket, process, None, clock::now(), self.patience());
        if let Err(reason) = self.admit(connection) {
            tracing::warn!(%reason, "SHM: rejected a client");
        }
    }

    /// Ends a half-open connection if there are too many of them: one of the process that has most,
    /// preferably one without a valid hello, and among those the oldest.
    fn make_room(&mut self, out: &mut Outbox) {
        let half_open =
            self.connections.iter().filter_map(|(at, connection)| match connection.phase {
                Phase::Hello(until) if connection.link.is_none() => Some((until, at, connection)),
                _ => None,
            });
        let half_open: Vec<_> = half_open.collect();
        if half_open.len() < MAX_HALF_OPEN {
            return;
        }
        let mut crowds = HashMap::<i32, usize>::new();
        for (_, _, connection) in &half_open {
            *crowds.entry(connection.process.pid).or_default() += 1;
        }
        let first_to_go = half_open.into_iter().min_by_key(|(until, at, connection)| {
            let crowd = crowds.get(&connection.process.pid).copied();
            (Reverse(crowd), connection.has_said_hello, *until, *at)
        });
        if let Some(at) = first_to_go.map(|(_, at, _)| at) {
            self.end(
                at,
                error(ErrorKind::Exhausted, "too many clients did not finish the handshake"),
                End::Ours,
                None,
                out,
            );
        }
    }

    /// Returns the number of clients that have completed the handshake.
    fn count_served(&self) -> usize {
        let is_served = |connection: &Connection| {
            connection.link.is_none() && !matches!(connection.phase, Phase::Hello(_))
        };
        self.connections.iter().filter(|(_, connection)| is_served(connection)).count()
    }

    /// Verifies that a client was invited, before anything else of its hello is read. Returns the
    /// error with which the client is refused and disconnected.
    pub(crate) fn take_hello(
        &mut self,
        at: usize,
        versions: (u16, u16),
        body: &[u8],
    ) -> Result<()> {
        if self.connections[at].has_said_hello {
            return Err(malformed("a second hello"));
        }
        let heard = verify_hello(&self.keys, versions, body);
        let heard = heard.and_then(|greeted| greeted.admit(self.count_served(), MAX_ACCEPTED));
        let greeted = match heard {
            Ok(greeted) => greeted,
            Err(away) => {
                self.connections[at].send(&self.poller, away.message());
                return Err(away.why);
            }
        };
        let probe = Probe::of_hello(greeted.rest)?;
        self.connections[at].has_said_hello = true;
        let then = AfterProbe::Welcome { from: greeted.from, draft: greeted.welcome };
        self.probe_later(at, Probing { probe, then });
        Ok(())
    }

    /// Verifies the client's proof that its hello is not a replay.
    pub(crate) fn take_confirm(&mut self, at: usize, proof: &[u8]) -> Result<()> {
        let connection = &mut self.connections[at];
        if !connection.awaited.take().is_some_and(|claim| claim.holds(proof)) {
            return Err(unauthenticated());
        }
        connection.phase = Phase::Up;
        connection.held_bytes_owner().map_or(Ok(()), |owner| self.held.check(&owner))
    }

    /// Takes the target's welcome. Errors: `Malformed` if it is not from the expected peer.
    pub(crate) fn take_welcome(&mut self, at: usize, version: u16, body: &[u8]) -> Result<()> {
        let Some(greeting) = self.connections[at].greeting.take() else {
            return Err(malformed("a second welcome"));
        };
        let (rest, proof) = greeting.verify_welcome(version, body)?;
        let (probe, theirs) = Probe::of_welcome(rest)?;
        let then = AfterProbe::Confirm { proof, theirs: theirs.map_err(refused) };
        self.probe_later(at, Probing { probe, then });
        Ok(())
    }

    fn probe_later(&mut self, at: usize, probing: Probing) {
        self.connections[at].probing = Some(probing);
        self.to_probe.push_back(at);
    }

    /// Begins the next probe. A process whose earlier probe hangs is not probed: each could hang
    /// another thread.
    pub(crate) fn next_probe(&mut self, out: &mut Outbox) -> Option<ProbeWork> {
        while let Some(at) = self.to_probe.pop_front() {
            // Expected: the connection has ended, and another may have its place.
            let Some(connection) = self.connections.get_mut(at) else { continue };
            let Some(probing) = connection.probing.take() else { continue };
            let work = ProbeWork {
                pid: connection.process.pid,
                allowed: self.config.foreign_memory,
                probe: probing.probe,
                unreadable: match probing.then {
                    AfterProbe::Welcome { .. } => {
                        "the initiator's memory is not a kvx pool, and the target cannot read it"
                    }
                    AfterProbe::Confirm { .. } => {
                        "the peer's memory is not a kvx pool, and this process cannot read it"
                    }
                },
                reachability: Ok(()),
            };
            self.probed = Some((at, probing));
            if !self.hung_probes.contains(&work.pid) {
                return Some(work);
            }
            self.take_probe(Err(hung_probe()), out);
        }
        None
    }

    /// Abandons the probe that is under way: it hangs.
    pub(crate) fn abandon_probe(&mut self, out: &mut Outbox) {
        let connection = self.probed.as_ref().and_then(|(at, _)| self.connections.get(*at));
        self.hung_probes.extend(connection.map(|connection| connection.process.pid));
        self.take_probe(Err(hung_probe()), out);
    }

    /// Continues the handshake whose probe was under way.
    fn take_probe(&mut self, reachability: Result<()>, out: &mut Outbox) {
        let Some((at, probing)) = self.probed.take() else {
            return debug_assert!(false, "a probe is under way");
        };
        if let Err(reason) = self.continue_handshake(at, probing.then, reachability, out) {
            self.cut_off(at, reason, out);
        }
    }

    fn continue_handshake(
        &mut self,
        at: usize,
        then: AfterProbe,
        ours: Result<()>,
        out: &mut Outbox,
    ) -> Result<()> {
        let own_probe = self.probe();
        let connection = &mut self.connections[at];
        match then {
            AfterProbe::Welcome { from, draft } => {
                let rest = own_probe.welcome_rest(&ours.map_err(|error| Refusal::from(&error)));
                let (version, body, claim) = draft.complete(&self.keys, &rest)?;
                connection.peer = Some(from);
                connection.awaited = Some(claim);
                connection.send(&self.poller, ControlMessage::Welcome { version, body: &body });
            }
            AfterProbe::Confirm { proof, theirs } => {
                let Some(link) = connection.link.clone() else {
                    return Err(malformed("a welcome from the initiator"));
                };
                link.reachability.set(Reachability { ours, theirs }).ok(); // a handshake ends once
                connection.peer = Some(link.peer.clone());
                connection.phase = Phase::Up;
                connection.send(&self.poller, ControlMessage::Confirm { proof });
                out.link(link.id, LinkState::Up);
            }
        }
        Ok(())
    }

    /// Takes the target's refusal.
    pub(crate) fn take_refuse(
        &mut self,
        at: usize,
        why: Refusal,
        proof: &[u8],
        out: &mut Outbox,
    ) -> Result<()> {
        let Some(greeting) = self.connections[at].greeting.take() else {
            return Err(malformed("a second answer to a hello"));
        };
        let reason = greeting.refusal_error(why, proof).with_backend(NAME);
        let restarted = reason.kind() == ErrorKind::PeerRestarted;
        let state = if restarted { LinkState::Restarted } else { LinkState::Lost(reason.clone()) };
        self.end(at, reason, End::Proven, Some(state), out);
        Ok(())
    }

    fn probe(&self) -> Probe {
        let address = if self.config.foreign_memory { self.probe_bytes.as_ptr() as u64 } else { 0 };
        Probe { address, bytes: *self.probe_bytes }
    }
}

/// A check whether this end can read the memory of the process at the other end.
///
/// The other end names the address. The page there may never arrive, so the check is detached work.
pub(crate) struct ProbeWork {
    pid: i32,
    /// Whether the options allow memory that is no pool.
    allowed: bool,
    probe: Probe,
    /// The beginning of the error if it cannot be read.
    unreadable: &'static str,
    reachability: Result<()>,
}

impl DetachedWork<Machine> for ProbeWork {
    fn run(&mut self) {
        self.reachability = match (self.allowed, self.probe.address) {
            (false, _) => Err(foreign_off("in this process")),
            (true, 0) => Err(foreign_off("in the peer's process")),
            _ => copy::probe(self.pid, &self.probe, self.unreadable),
        };
    }

    fn rejoin(self, machine: &mut Machine, out: &mut Outbox) {
        machine.take_probe(self.reachability, out);
    }

    fn rejoin_late(&mut self, machine: &mut Machine) {
        machine.hung_probes.remove(&self.pid);
    }

    fn release(self) {}
}

fn hung_probe() -> Error {
    error(
        ErrorKind::Unsupported,
        "unresolved page fault in the memory by which the other end shows that it can be read",
    )
}

fn nobody_listens() -> Error {
    error(
        ErrorKind::PeerLost,
        "the peer's socket is closed: its agent has ended; connect with new metadata",
    )
}

fn check_user(process: &PeerProcess) -> Result<()> {
    if process.uid == our_uid() {
        return Ok(());
    }
    Err(error(
        ErrorKind::Authentication,
        format!(
            "SHM connects processes of the same user, but the peer's user is {} and this one's is \
             {}: use TCP",
            process.uid,
            our_uid()
        ),
    ))
}

fn report_lost(link: &Arc<SharedLink>, reason: Error, out: &mut Outbox) {
    link.gone.set(reason.clone()).ok(); // the first reason counts
    out.link(link.id, LinkState::Lost(reason));
}
