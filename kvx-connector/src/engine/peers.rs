//! Whom a worker is connected to: one handshake per engine whoever asks, and what becomes of engines that are
//! replaced, come back, or are not heard of again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::action::{Action, Connection};
use super::identity::{EngineId, WorkerRank};
use super::plan::PeerPlan;
use super::step::RemoteEngine;
use super::time::Time;

/// The first wait before an engine whose data turned out wrong is asked again; doubled each time.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// The longest.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Whether an engine can be reached now.
#[derive(Debug)]
pub(super) enum Reach {
    /// Yes, by this connection.
    Ready(Connection, Arc<PeerPlan>),
    /// A handshake is under way.
    Wait,
    /// No, and asking again is for later.
    Refused(String),
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Connecting(Connection),
    Ready(Connection),
    /// Its data was wrong; nobody asks before this moment.
    Resting(Time),
}

#[derive(Debug)]
struct Engine {
    peer: Arc<RemoteEngine>,
    state: State,
    used: Time,
    /// The next wait, if its data turned out wrong and no transfer has succeeded since.
    wait: Option<Duration>,
}

/// A handshake that succeeded.
#[derive(Debug)]
struct Link {
    engine: EngineId,
    plan: Arc<PeerPlan>,
    uses: u32,
    /// Goes with its last use.
    retired: bool,
}

/// All engines that a worker knows.
#[derive(Debug)]
pub(super) struct Peers {
    ttl: Option<Duration>,
    last: u64,
    engines: BTreeMap<EngineId, Engine>,
    links: BTreeMap<Connection, Link>,
}

impl Peers {
    pub(super) fn new(ttl: Option<Duration>) -> Self {
        Peers { ttl, last: 0, engines: BTreeMap::new(), links: BTreeMap::new() }
    }

    /// Finds the way to an engine; starts the one handshake if there is none. `ranks`: whom to ask.
    pub(super) fn reach(
        &mut self,
        now: Time,
        peer: &Arc<RemoteEngine>,
        ranks: impl FnOnce() -> Result<Vec<WorkerRank>, String>,
        actions: &mut VecDeque<Action>,
    ) -> Reach {
        let known = self.engines.get_mut(&peer.engine);
        let (wait, before) = match known {
            None => (None, None),
            Some(engine) => {
                engine.used = now;
                let registration = engine.peer.registration;
                match engine.state {
                    _ if peer.registration < registration => {
                        return Reach::Refused(format!(
                            "they speak of registration {}, and engine {} has registered its memory anew since, as \
                             number \
                             {registration}",
                            peer.registration, peer.engine
                        ));
                    }
                    State::Ready(connection) if peer.registration > registration => {
                        (engine.wait, Some(connection))
                    }
                    State::Connecting(_) if peer.registration > registration => (engine.wait, None),
                    State::Ready(connection) => {
                        if let Some(link) = self.links.get(&connection) {
                            return Reach::Ready(connection, Arc::clone(&link.plan));
                        }
                        (engine.wait, None)
                    }
                    State::Connecting(_) => return Reach::Wait,
                    State::Resting(until) if !now.has_reached(until) => {
                        return Reach::Refused(format!(
                            "engine {} answered with data that was wrong; it is asked again in {:.1} s",
                            peer.engine,
                            until.since(now).as_secs_f64()
                        ));
                    }
                    State::Resting(_) => (engine.wait, None),
                }
            }
        };
        let ranks = match ranks() {
            Ok(ranks) => ranks,
            Err(why) => return Reach::Refused(why),
        };
        if let Some(old) = before {
            self.retire(old, actions);
        }
        self.last += 1;
        let connection = Connection(self.last);
        let state = State::Connecting(connection);
        self.engines.insert(peer.engine.clone(), Engine { peer: Arc::clone(peer), state, used: now, wait });
        actions.push_back(Action::Handshake { connection, peer: Arc::clone(peer), ranks });
        Reach::Wait
    }

    /// A handshake has ended. Gives the engine that was waited for; `None` if a newer handshake has taken its place.
    pub(super) fn connected(
        &mut self,
        now: Time,
        connection: Connection,
        result: Result<PeerPlan, ()>,
        actions: &mut VecDeque<Action>,
    ) -> Option<Arc<RemoteEngine>> {
        let state = State::Connecting(connection);
        let found = self.engines.values_mut().find(|engine| engine.state == state);
        let Some(engine) = found else {
            if result.is_ok() {
                actions.push_back(Action::Disconnect { connection });
            }
            return None;
        };
        let peer = Arc::clone(&engine.peer);
        engine.used = now;
        match result {
            Ok(plan) => {
                engine.state = State::Ready(connection);
                let link =
                    Link { engine: peer.engine.clone(), plan: Arc::new(plan), uses: 0, retired: false };
                self.links.insert(connection, link);
                self.forget_others(now, &peer, actions);
            }
            // Nobody is remembered as unreachable, but who was and gave wrong data.
            Err(()) if engine.wait.is_none() => {
                self.engines.remove(&peer.engine);
            }
            Err(()) => rest(now, engine),
        }
        Some(peer)
    }

    /// A confirmed engine takes the place of those that had its address; and engines that nobody has used for long go.
    fn forget_others(&mut self, now: Time, new: &RemoteEngine, actions: &mut VecDeque<Action>) {
        let ttl = self.ttl;
        let links = &self.links;
        let gone = self.engines.iter().filter_map(|(id, engine)| {
            let State::Ready(connection) = engine.state else { return None };
            let replaced = engine.peer.address == new.address;
            let idle = links.get(&connection).is_none_or(|link| link.uses == 0);
            let expired = idle && ttl.is_some_and(|ttl| now.has_reached(engine.used + ttl));
            (*id != new.engine && (replaced || expired)).then(|| (id.clone(), connection))
        });
        let gone: Vec<_> = gone.collect();
        for (engine, connection) in gone {
            self.engines.remove(&engine);
            self.retire(connection, actions);
        }
    }

    /// What this connection described is no longer so: its engine is asked again, but not at once.
    pub(super) fn invalidate(&mut self, now: Time, connection: Connection, actions: &mut VecDeque<Action>) {
        let Some(link) = self.links.get(&connection) else { return };
        if let Some(engine) = self.engines.get_mut(&link.engine)
            && engine.state == State::Ready(connection)
        {
            rest(now, engine);
        }
        self.retire(connection, actions);
    }

    /// A transfer has succeeded: the engine's data is right.
    pub(super) fn proven(&mut self, connection: Connection) {
        if let Some(link) = self.links.get(&connection)
            && let Some(engine) = self.engines.get_mut(&link.engine)
            && engine.state == State::Ready(connection)
        {
            engine.wait = None;
        }
    }

    /// One more user, who calls [`release`](Self::release) when done.
    pub(super) fn hold(&mut self, connection: Connection) {
        if let Some(link) = self.links.get_mut(&connection) {
            link.uses += 1;
        }
    }

    /// One user less; a retired connection goes with the last one.
    pub(super) fn release(&mut self, now: Time, connection: Connection, actions: &mut VecDeque<Action>) {
        let Some(link) = self.links.get_mut(&connection) else { return };
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
        let Some(link) = self.links.get_mut(&connection) else { return };
        link.retired = true;
        if link.uses == 0 {
            self.links.remove(&connection);
            actions.push_back(Action::Disconnect { connection });
        }
    }

    /// What a connection leads to.
    pub(super) fn plan(&self, connection: Connection) -> Option<&Arc<PeerPlan>> {
        self.links.get(&connection).map(|link| &link.plan)
    }

    /// Forgets all engines; connections in use go with their last use. Nothing is remembered, so this may be called
    /// again.
    pub(super) fn forget_all(&mut self, actions: &mut VecDeque<Action>) {
        self.engines.clear();
        let connections: Vec<_> = self.links.keys().copied().collect();
        for connection in connections {
            self.retire(connection, actions);
        }
    }

    /// Connections that are still there, retired ones too.
    pub(super) fn connections(&self) -> usize {
        self.links.len()
    }
}

fn rest(now: Time, engine: &mut Engine) {
    let wait = engine.wait.map_or(FIRST_WAIT, |wait| (wait * 2).min(LONGEST_WAIT));
    engine.wait = Some(wait);
    engine.state = State::Resting(now + wait);
}
