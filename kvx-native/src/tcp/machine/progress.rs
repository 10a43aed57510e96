//! The machine's turns: commands, then connections one after the other, then timers.
//!
//! A connection's turn is work that the reactor runs without the machine's lock, because memory
//! that it touches may have an unresolved page fault.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::reactor::{Armed, DetachedWork, Outbox, Progress, Queued, SLICE, Turn};
use kvx_core::backend::{INLINE_BYTES, LinkId};
use kvx_core::{ErrorKind, Result};

use crate::clock;
use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::connections::lane::Scope;
use crate::tcp::error;
use crate::tcp::frames::MAX_DATA;
use crate::tcp::machine::failures::TurnRecord;
use crate::tcp::machine::{Command, Machine};

/// The bytes that one connection moves before another has its turn.
pub(crate) const SHARE: usize = 256 << 10;
/// The bytes of bulk work in a turn, and in a frame, while small transfers arrive: these wait for
/// that much at either end.
const BESIDE_SMALL: usize = 64 << 10;
/// The time after a small transfer within which the next one is expected. Short, because bulk work
/// is half as fast meanwhile.
const LATELY: Duration = Duration::from_millis(1);
/// The minimum cost of a connection's turn, in bytes.
const TURN: usize = 4096;
/// The bytes above which a turn counts as part of a stream.
const BURST: usize = 64 << 10;
/// The number of turns of small connections before a bulk one has its turn.
const SMALL_TURNS: usize = 32;

impl Progress for Machine {
    type Command = Command;
    type Work = InFlightTurn;

    fn command(&mut self, command: Command, out: &mut Outbox) {
        match command {
            Command::Connect(peer) => {
                let link = peer.id;
                self.peers.insert(link, *peer);
                self.open_link(link, None, clock::now(), out);
            }
            Command::Post { link, plan, id, done } => match self.peers.get_mut(&link) {
                Some(peer) => {
                    self.brief = true;
                    self.scope.small_came |= peer.post(plan, id, done, out);
                    self.links_with_output.push(link);
                }
                None => out.settle(done, Err(error::gone())),
            },
            Command::Notify { link, bytes, done } => match self.peers.get_mut(&link) {
                Some(peer) => {
                    self.brief = true;
                    peer.notify(bytes, done, out);
                    self.links_with_output.push(link);
                }
                None => out.settle(done, Err(error::gone())),
            },
            Command::Cancel { link, id } => {
                let why = ErrorKind::Cancelled.because("the transfer was cancelled");
                self.give_up(link, id, why, out);
                self.links_with_output.push(link);
            }
            Command::Close { link } => {
                if let Some(mut peer) = self.disband(link) {
                    let why = error::of_peer(error::closed("the link"), &peer.who);
                    peer.fail(&why, &self.scope.context.deferred, out);
                }
            }
            Command::Revoke { region, done } => {
                self.revoke(region);
                out.settle(done, Ok(()));
            }
            Command::Staged { token } => self.woken.push(token),
            Command::Resume => self.resume(),
        }
    }

    fn next_work(&mut self, out: &mut Outbox) -> Option<InFlightTurn> {
        if self.turn.is_none() {
            self.turn = Some(self.begin(clock::now(), out));
        }
        let now = self.turn_began();
        while let Some(key) = self.next() {
            let turn = self.begin_turn(key, now, out);
            if turn.is_some() {
                return turn;
            }
        }
        None
    }

    fn abandon(&mut self, out: &mut Outbox) {
        self.turn = None;
        self.abandon_turn(out);
    }

    fn progress(&mut self, _: &Queued, out: &mut Outbox) -> Turn {
        match self.turn.take() {
            Some(turn) => self.end(&turn, out),
            None => Turn::did(0),
        }
    }

    fn arm(&mut self) -> Result<Armed> {
        self.bursting = false;
        let work =
            !self.small.is_empty() || !self.bulk.is_empty() || !self.links_with_output.is_empty();
        let is_idle = !work && !self.accepting && !self.ticked;
        Ok(if is_idle { Armed::Sleep(None) } else { Armed::Again })
    }

    fn fds(&self) -> &[RawFd] {
        self.poller.fds()
    }

    fn stop(&mut self, out: &mut Outbox) {
        let why = error::closed("the agent");
        for key in self.conns.iter().map(|(key, _)| key).collect::<Vec<_>>() {
            self.remove(key);
        }
        let deferred = &self.scope.context.deferred;
        for (_, mut peer) in self.peers.drain() {
            peer.fail(&why, deferred, out);
        }
        deferred.close().into_iter().for_each(|(ticket, result)| out.settle(ticket, result));
    }

    fn late(command: Command) {
        match command {
            Command::Post { done, .. } | Command::Notify { done, .. } => {
                done.settle(Err(error::closed("the agent")));
            }
            // No peer reaches the region: all connections are closed, and none is accepted. The
            // ticket itself waits for copies that a device has begun.
            Command::Revoke { done, .. } => done.settle(Ok(())),
            Command::Connect(_)
            | Command::Cancel { .. }
            | Command::Close { .. }
            | Command::Staged { .. }
            | Command::Resume => {}
        }
    }
}

/// A connection that has its turn, with everything that it works on.
pub(crate) struct InFlightTurn {
    key: usize,
    /// The connection's link, if this end opened it.
    link: Option<LinkId>,
    conn: Box<Conn>,
    scope: Box<Scope>,
    share: usize,
    /// The bytes that the connection received and sent.
    moved: Result<(usize, usize)>,
}

impl DetachedWork<Machine> for InFlightTurn {
    fn run(&mut self) {
        self.moved = self.conn.serve(self.share, self.key, &mut self.scope);
    }

    fn rejoin(self, machine: &mut Machine, out: &mut Outbox) {
        machine.take_back(self, out);
    }

    fn rejoin_late(&mut self, machine: &mut Machine) {
        self.conn.release_held(&mut machine.held);
    }

    fn release(self) {
        let InFlightTurn { mut conn, scope, .. } = self;
        if let Some(lane) = conn.role.up_mut() {
            lane.release(&scope.context.deferred);
        }
        drop(conn);
        scope.context.deferred.end_turn(&scope.turn);
    }
}

/// The budget of a turn of the machine, and its work so far.
pub(crate) struct Budget {
    /// The time at which the turn began.
    now: Instant,
    brief: bool,
    beside_small: bool,
    /// The number of small connections that may still have their turn.
    small: usize,
    /// The bytes that are left for small connections.
    left: usize,
    /// The bytes that are left for bulk connections, once it is their turn.
    bulk: Option<usize>,
    done: usize,
}

impl Machine {
    /// Sends requests of links, as far as their lanes have capacity.
    fn issue(&mut self, now: Instant) {
        let mut touched = Vec::new();
        let mut links_with_output = std::mem::take(&mut self.links_with_output);
        for link in links_with_output.drain(..) {
            let Some(peer) = self.peers.get_mut(&link) else { continue }; // it was lost meanwhile
            peer.issue(&mut self.conns, &mut self.scope, |key| touched.push(key));
            if let Some(at) = peer.note_busy(now, self.scope.context.peer_timeout, &self.conns) {
                self.by(at, now);
            }
        }
        self.links_with_output = links_with_output;
        touched.into_iter().for_each(|key| self.queue_if_ready(key));
    }

    /// Runs the first part of a turn, before connections have theirs.
    fn begin(&mut self, now: Instant, out: &mut Outbox) -> Budget {
        let brief = std::mem::take(&mut self.brief);
        let mut done = if self.woken.is_empty() { 0 } else { self.wake_streams(now, out) };
        self.issue(now);
        if !self.scope.effects.is_empty() {
            self.apply_effects(now, out); // before a turn takes the scope that contains them
        }
        done += self.poll();
        if self.accepting {
            done += self.accept(now);
        }
        if std::mem::take(&mut self.scope.small_came) {
            self.small_at = Some(now);
        }
        let beside_small =
            self.small_at.is_some_and(|at| now.saturating_duration_since(at) < LATELY);
        self.scope.piece = if beside_small { BESIDE_SMALL } else { MAX_DATA };
        let left = if brief { INLINE_BYTES as usize } else { self.scope.piece.min(SLICE as usize) };
        Budget {
            now,
            brief,
            beside_small,
            small: self.small.len().min(SMALL_TURNS),
            left,
            bulk: None,
            done,
        }
    }

    /// Returns the connection with the next turn.
    fn next(&mut self) -> Option<usize> {
        let budget = self.turn.as_mut()?;
        if budget.bulk.is_none() {
            if budget.small > 0
                && budget.left > 0
                && let Some(key) = self.small.pop_front()
            {
                budget.small -= 1;
                return Some(key);
            }
            // Bulk work always has its turn, regardless of small work, but not on the thread of a
            // poster.
            budget.bulk = Some(if budget.brief { 0 } else { budget.left.max(1) });
        }
        if budget.bulk > Some(0) { self.bulk.pop_front() } else { None }
    }

    /// Returns the time at which the current turn began.
    pub(crate) fn turn_began(&self) -> Instant {
        self.turn.as_ref().map_or_else(clock::now, |turn| turn.now)
    }

    /// Counts bytes that a connection has moved.
    pub(crate) fn spend(&mut self, moved: usize) {
        let Some(turn) = &mut self.turn else { return debug_assert!(false, "a turn is under way") };
        match &mut turn.bulk {
            None => turn.left = turn.left.saturating_sub(moved),
            Some(bulk) => *bulk = bulk.saturating_sub(moved.max(TURN)),
        }
        turn.done += moved;
    }

    /// Runs the last part of a turn.
    fn end(&mut self, turn: &Budget, out: &mut Outbox) -> Turn {
        let now = turn.now;
        if self.ticked {
            // after reading received bytes, because this end may have been stopped for long
            self.tick(now, out);
        }
        self.issue(now);
        if !self.scope.effects.is_empty() {
            self.apply_effects(now, out); // effects of requests that could not begin
        }
        self.bursting |= turn.done > BURST;
        // Sleeping in the short gaps between the bursts of a stream would halve its throughput.
        let look_for = Duration::from_micros(if self.bursting { 250 } else { 20 });
        Turn { look_for, yields: turn.beside_small, ..Turn::did(turn.done) }
    }

    /// Takes a connection out for its turn, if it has work to do.
    pub(crate) fn begin_turn(
        &mut self,
        key: usize,
        now: Instant,
        out: &mut Outbox,
    ) -> Option<InFlightTurn> {
        let conn = self.conns.get_mut(key)?;
        conn.queued = false;
        if !conn.is_ready(self.scope.described) {
            return None;
        }
        let link = conn.role.lane().map(|(link, _)| link);
        if let (Role::Connecting { lane, .. }, Some(peer)) =
            (&conn.role, link.and_then(|link| self.peers.get(&link)))
        {
            let lane = *lane;
            if let Err(error) = peer.greet(conn, lane, &self.scope.context) {
                self.failed(key, error, now, out);
                return None;
            }
        }
        let conn = self.conns.take(key)?;
        let spare = self.spare.take().unwrap_or_else(|| self.new_scope());
        let scope = std::mem::replace(&mut self.scope, spare);
        self.away = Some(TurnRecord::new(key, &conn, &scope));
        let share = SHARE.min(scope.piece);
        Some(InFlightTurn { key, link, conn, scope, share, moved: Ok((0, 0)) })
    }

    fn new_scope(&self) -> Box<Scope> {
        Box::new(Scope::new(Arc::clone(&self.scope.context), self.scope.bin.clone()))
    }

    /// Puts a connection back after its turn, and applies its effects.
    fn take_back(&mut self, turn: InFlightTurn, out: &mut Outbox) {
        let InFlightTurn { key, link, mut conn, scope, moved, .. } = turn;
        let now = self.turn_began();
        self.away = None;
        self.spare = Some(std::mem::replace(&mut self.scope, scope));
        let moved = moved.and_then(|moved| conn.note_held(&mut self.held).map(|()| moved));
        let finished = conn.closing && !conn.has_output();
        let full = conn.note_if_full(now);
        self.conns.put_back(key, conn);
        if let (Ok((received, _)), Some(peer)) =
            (&moved, link.and_then(|link| self.peers.get_mut(&link)))
            && *received > 0
        {
            peer.note_activity(now);
        }
        if let Some(at) = full {
            self.by(at, now);
        }
        self.apply_effects(now, out);
        self.drop_greediest(now, out);
        match moved {
            Ok((received, sent)) => {
                if finished {
                    self.remove(key);
                } else {
                    self.queue_if_ready(key);
                }
                self.spend(received + sent);
            }
            Err(error) => {
                self.failed(key, error, now, out);
                self.spend(1);
            }
        }
    }
}
