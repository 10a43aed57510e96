//! A worker's connections to peers: one handshake per engine for all its requests, and the handling
//! of engines that are replaced, restart or become idle.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::action::{Action, Connection};
use super::failure::HandshakeFailure;
use super::plan::PeerPlan;
use super::remote::RemoteEngine;
use crate::ids::{EngineId, WorkerRank};
use crate::time::Time;

/// The least time between two renewed handshakes with an engine. It doubles each time until a
/// transfer succeeds.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The upper limit of the time between two renewed handshakes.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The answer to whether an engine is reachable now.
#[derive(Debug)]
pub(super) enum Reach {
    /// The engine is reachable by this connection.
    Ready(Connection, Arc<PeerPlan>),
    /// A handshake is in progress.
    Wait,
    /// The engine is not reachable, for this reason. Contains the time of the next try, if it is
    /// known.
    Refused(String, Option<Time>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ConnectionState {
    Connecting(Connection),
    Ready(Connection),
    /// The metadata is no longer valid. The next request repeats the handshake.
    Resting,
}

#[derive(Clone, Debug)]
struct Engine {
    peer: Arc<RemoteEngine>,
    state: ConnectionState,
    used: Time,
    renewals: Renewals,
    /// The renewals before the handshake in progress. A failed handshake does not count as one.
    before: Renewals,
}

/// The times at which an engine's handshake may be repeated after it registered its memory again or
/// its metadata became invalid. The first repetition may happen at once.
#[derive(Clone, Copy, Debug, Default)]
struct Renewals {
    last: Option<Time>,
    /// The delay between the last renewal and the next one; `None`: `FIRST_WAIT`.
    wait: Option<Duration>,
}

impl Renewals {
    /// Returns the time before which no renewal may happen.
    fn next(self) -> Option<Time> {
        self.last.map(|last| last + self.wait.unwrap_or(FIRST_WAIT))
    }

    /// Records a renewal.
    fn renewed(self, now: Time) -> Self {
        let doubled = |wait: Duration| (wait * 2).min(LONGEST_WAIT);
        let wait = self.last.map_or(FIRST_WAIT, |_| self.wait.map_or(FIRST_WAIT, doubled));
        Renewals { last: Some(now), wait: Some(wait) }
    }
}

/// An open connection, the result of a successful handshake.
#[derive(Clone, Debug)]
struct OpenConnection {
    engine: EngineId,
    plan: Arc<PeerPlan>,
    uses: u32,
    /// True if the connection closes with its last use.
    retired: bool,
}

/// The engines that a worker knows.
#[derive(Clone, Debug)]
pub(super) struct Peers {
    ttl: Option<Duration>,
    last: u64,
    engines: BTreeMap<EngineId, Engine>,
    links: BTreeMap<Connection, OpenConnection>,
}

impl Peers {
    pub(super) fn new(ttl: Option<Duration>) -> Self {
        Peers { ttl, last: 0, engines: BTreeMap::new(), links: BTreeMap::new() }
    }

    /// Finds the connection to an engine, or starts the engine's one handshake. `ranks` returns the
    /// workers to ask.
    pub(super) fn reach(
        &mut self,
        now: Time,
        peer: &Arc<RemoteEngine>,
        ranks: impl FnOnce() -> Result<Vec<WorkerRank>, String>,
        actions: &mut VecDeque<Action>,
    ) -> Reach {
        let (mut renewals, mut renewals_before) = (Renewals::default(), Renewals::default());
        let mut before = None;
        if let Some(engine) = self.engines.get_mut(&peer.engine) {
            engine.used = now;
            let registration = engine.peer.registration;
            // A lower number belongs to an engine that restarted under its old name.
            let same = peer.registration == registration;
            let why = match engine.state {
                ConnectionState::Connecting(_) if same => return Reach::Wait,
                ConnectionState::Ready(connection) => {
                    if let Some(link) = self.links.get(&connection).filter(|_| same) {
                        return Reach::Ready(connection, Arc::clone(&link.plan));
                    }
                    before = Some(connection);
                    "has another registration"
                }
                ConnectionState::Connecting(_) => "has another registration",
                ConnectionState::Resting => "no longer matches its metadata",
            };
            if let Some(next) = engine.renewals.next().filter(|next| !now.has_reached(*next)) {
                let why = format!(
                    "engine {} {why} (registration {}, before {registration}); kvx asks it again \
                     in {:.1} s",
                    peer.engine,
                    peer.registration,
                    next.since(now).as_secs_f64()
                );
                return Reach::Refused(why, Some(next));
            }
            renewals_before = match engine.state {
                ConnectionState::Connecting(_) => engine.before,
                ConnectionState::Ready(_) | ConnectionState::Resting => engine.renewals,
            };
            renewals = engine.renewals.renewed(now);
        }
        let ranks = match ranks() {
            Ok(ranks) => ranks,
            Err(why) => return Reach::Refused(why, None),
        };
        if let Some(old) = before {
            self.retire(old, actions);
        }
        self.last += 1;
        let connection = Connection(self.last);
        let state = ConnectionState::Connecting(connection);
        let engine =
            Engine { peer: Arc::clone(peer), state, used: now, renewals, before: renewals_before };
        self.engines.insert(peer.engine.clone(), engine);
        actions.push_back(Action::Handshake { connection, peer: Arc::clone(peer), ranks });
        Reach::Wait
    }

    /// Records the end of a handshake. Returns the engine and the failure, or `None` if a newer
    /// handshake has replaced this one.
    pub(super) fn connected(
        &mut self,
        now: Time,
        connection: Connection,
        result: Result<PeerPlan, HandshakeFailure>,
        actions: &mut VecDeque<Action>,
    ) -> Option<(Arc<RemoteEngine>, Option<HandshakeFailure>)> {
        let state = ConnectionState::Connecting(connection);
        let found = self.engines.values_mut().find(|engine| engine.state == state);
        let Some(engine) = found else {
            if result.is_ok() {
                actions.push_back(Action::Disconnect { connection });
            }
            return None;
        };
        let peer = Arc::clone(&engine.peer);
        engine.used = now;
        let failure = match result {
            Ok(plan) => {
                engine.state = ConnectionState::Ready(connection);
                let link = OpenConnection {
                    engine: peer.engine.clone(),
                    plan: Arc::new(plan),
                    uses: 0,
                    retired: false,
                };
                self.links.insert(connection, link);
                self.forget_others(now, &peer, actions);
                None
            }
            Err(failure) => {
                (engine.state, engine.renewals) = (ConnectionState::Resting, engine.before);
                // No engine is remembered as unreachable: a restarted engine is reachable as soon
                // as it listens.
                if engine.before.last.is_none() {
                    self.engines.remove(&peer.engine);
                }
                Some(failure)
            }
        };
        Some((peer, failure))
    }

    /// Removes engines that had the address of the newly confirmed one, and engines that have been
    /// idle for too long.
    fn forget_others(&mut self, now: Time, new: &RemoteEngine, actions: &mut VecDeque<Action>) {
        let ttl = self.ttl;
        let links = &self.links;
        let gone = self.engines.iter().filter_map(|(id, engine)| {
            let (connection, ttl) = match engine.state {
                ConnectionState::Connecting(_) => return None,
                ConnectionState::Ready(connection) => (Some(connection), ttl),
                ConnectionState::Resting => (None, Some(LONGEST_WAIT)),
            };
            let replaced = engine.peer.address == new.address;
            let link = connection.and_then(|connection| links.get(&connection));
            let idle = link.is_none_or(|link| link.uses == 0);
            let expired = idle && ttl.is_some_and(|ttl| now.has_reached(engine.used + ttl));
            (*id != new.engine && (replaced || expired)).then(|| (id.clone(), connection))
        });
        let gone: Vec<_> = gone.collect();
        for (engine, connection) in gone {
            self.engines.remove(&engine);
            if let Some(connection) = connection {
                self.retire(connection, actions);
            }
        }
    }

    /// Marks a connection's metadata as invalid, so that the next request repeats the handshake.
    pub(super) fn invalidate(&mut self, connection: Connection, actions: &mut VecDeque<Action>) {
        // Expected race: the connection has ended.
        let Some(link) = self.links.get(&connection) else { return };
        if let Some(engine) = self.engines.get_mut(&link.engine)
            && engine.state == ConnectionState::Ready(connection)
        {
            engine.state = ConnectionState::Resting;
        }
        self.retire(connection, actions);
    }

    /// Records that a transfer has succeeded, which proves that the engine's metadata is valid.
    pub(super) fn proven(&mut self, connection: Connection) {
        if let Some(link) = self.links.get(&connection)
            && let Some(engine) = self.engines.get_mut(&link.engine)
            && engine.state == ConnectionState::Ready(connection)
        {
            engine.renewals.wait = None;
        }
    }

    /// Adds a user of the connection, who must call [`release`](Self::release) when done.
    pub(super) fn hold(&mut self, connection: Connection) {
        if let Some(link) = self.links.get_mut(&connection) {
            link.uses += 1;
        }
    }

    /// Removes a user of the connection. A retired connection closes with its last user.
    pub(super) fn release(
        &mut self,
        now: Time,
        connection: Connection,
        actions: &mut VecDeque<Action>,
    ) {
        let Some(link) = self.links.get_mut(&connection) else {
            return debug_assert!(false, "a connection outlives its users");
        };
        link.uses = link.uses.saturating_sub(1);
        if let Some(engine) = self.engines.get_mut(&link.engine) {
            engine.used = engine.used.max(now);
        }
        if link.retired && link.uses == 0 {
            self.links.remove(&connection);
            actions.push_back(Action::Disconnect { connection });
        }
    }

    fn retire(&mut self, connection: Connection, actions: &mut VecDeque<Action>) {
        let Some(link) = self.links.get_mut(&connection) else {
            return debug_assert!(false, "only open connections are retired");
        };
        link.retired = true;
        if link.uses == 0 {
            self.links.remove(&connection);
            actions.push_back(Action::Disconnect { connection });
        }
    }

    /// Returns the plan of a connection.
    pub(super) fn plan(&self, connection: Connection) -> Option<&Arc<PeerPlan>> {
        self.links.get(&connection).map(|link| &link.plan)
    }

    /// Forgets all engines. Connections in use close with their last user. May be called
    /// repeatedly.
    pub(super) fn forget_all(&mut self, actions: &mut VecDeque<Action>) {
        self.engines.clear();
        let connections: Vec<_> = self.links.keys().copied().collect();
        for connection in connections {
            self.retire(connection, actions);
        }
    }

    /// Returns the number of open connections, including retired ones.
    pub(super) fn connections(&self) -> usize {
        self.links.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Address;

    fn peer(engine: &str) -> Arc<RemoteEngine> {
        Arc::new(RemoteEngine::new(engine, Address { host: engine.into(), port: 1 }))
    }

    fn at(seconds: u64) -> Time {
        Time::from_origin(Duration::from_secs(seconds))
    }

    fn connect(peers: &mut Peers, now: Time, engine: &str) -> Connection {
        let mut actions = VecDeque::new();
        let ranks = || Ok(vec![WorkerRank::default()]);
        assert!(matches!(peers.reach(now, &peer(engine), ranks, &mut actions), Reach::Wait));
        let Some(Action::Handshake { connection, .. }) = actions.pop_front() else {
            panic!("no handshake")
        };
        let plan = PeerPlan::one_to_one(16, 10).expect("a valid plan");
        peers
            .connected(now, connection, Ok(plan), &mut actions)
            .expect("the handshake is in progress");
        connection
    }

    // vLLM 41: engines that answered with invalid metadata are forgotten
    #[test]
    fn unused_engines_with_invalid_metadata_are_forgotten() {
        let mut peers = Peers::new(None);
        for number in 0..100 {
            let connection = connect(&mut peers, at(number), &format!("gone-{number}"));
            peers.invalidate(connection, &mut VecDeque::new());
        }
        assert!(peers.engines.len() <= 61, "{} engines of a minute", peers.engines.len());
        connect(&mut peers, at(1000), "new");
        assert_eq!((peers.engines.len(), peers.connections()), (1, 1));
    }
}
