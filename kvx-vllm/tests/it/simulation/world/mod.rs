//! The network between the engines, the clients in front of them, and the faults of both.

mod clients;
mod flights;
mod network;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::Version;
use kvx_vllm::config::{BlockRelease, LeaseTime, LoadFailurePolicy};
use kvx_vllm::engine::{
    Action, Connection, ConsumerRule, MoveId, RemoteEngine, RequestId, Settings, Worker, WorkerRank,
};
use kvx_vllm::params::{TransferMode, TransferParams};
use kvx_vllm::wire::EngineNotification;

use self::clients::Client;
use self::flights::Flight;
use crate::simulation::engine::{Birth, Clock, Engine, address};
use crate::simulation::random::Random;

pub(crate) const MILLISECOND: u64 = 1_000;
pub(crate) const SECOND: u64 = 1_000 * MILLISECOND;
/// The time after which a run counts as hung.
pub(crate) const END: u64 = 3_000 * SECOND;
pub(crate) const MAX_EVENTS: u32 = 400_000;

/// The simulated scenario, determined by the seed.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    mode: TransferMode,
    /// The versions of prefill engines and of decode engines.
    versions: [Version; 2],
    /// True if loaded blocks must be reordered.
    finishes: bool,
    /// True if heartbeats name 5,000 additional requests, as from a vLLM with a long queue.
    crowded: bool,
    prefills: usize,
    decodes: usize,
    prefill_tp: u32,
    decode_tp: u32,
    latent: bool,
    generations: bool,
    bidirectional: bool,
    lease: Duration,
    /// True if blocks are kept for a fixed time in every version, because the old variable is set.
    fixed: bool,
    policy: LoadFailurePolicy,
    load_timeout: u64,
    blocks: u32,
    clients: usize,
    /// A percentage.
    trouble: u64,
}

impl Scenario {
    pub(crate) fn drawn(seed: u64, generations: bool, among: &[Version]) -> (Self, Random) {
        let mut random = Random::new(seed);
        let push = random.percent(25);
        let spoken: Vec<_> =
            among.iter().copied().filter(|version| !push || version.leases()).collect();
        let versions = [random.one_of(&spoken), random.one_of(&spoken)];
        let scenario = Scenario {
            mode: if push { TransferMode::Push } else { TransferMode::Pull },
            versions,
            finishes: !push && random.percent(20),
            crowded: random.percent(2),
            prefills: random.within(1..3) as usize,
            decodes: random.within(1..3) as usize,
            prefill_tp: random.one_of(&[1, 1, 2]),
            decode_tp: random.one_of(&[1, 1, 2]),
            latent: random.percent(30),
            generations,
            bidirectional: !push && random.percent(30),
            lease: Duration::from_secs(random.one_of(&[3, 6, 30])),
            fixed: random.percent(20),
            policy: if random.percent(50) {
                LoadFailurePolicy::Fail
            } else {
                LoadFailurePolicy::Recompute
            },
            load_timeout: random.one_of(&[1, 10, 60]) * SECOND,
            blocks: random.within(12..40) as u32,
            clients: random.within(3..12) as usize,
            trouble: random.one_of(&[0, 5, 15, 40]),
        };
        (scenario, random)
    }
}

#[derive(Debug)]
enum Event {
    Start(usize),
    ToDecode(usize, Option<Box<TransferParams>>),
    Abort(usize),
    GivesUp(usize),
    Step(usize),
    Handshake(At, Connection, Arc<RemoteEngine>, u64),
    MoveHalf(u64),
    MoveEnd(u64),
    MoveTimesOut(u64),
    Words(At, Link, MoveId, WorkerRank, Vec<u32>),
    WordsBack(At, MoveId, Result<(u64, Vec<u64>), String>),
    Notice { to: (usize, u32), rank: u32, from: Arc<str>, bytes: Arc<[u8]> },
    Unsent(At, Option<RequestId>, WorkerRank),
    Fence(At, RequestId),
    Finish(At, RequestId, Vec<u32>),
    Lost(At, Connection),
    Restart(usize),
}

/// A worker of one incarnation of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct At {
    engine: usize,
    life: u32,
    worker: usize,
}

/// Another engine, in the incarnation that the connection was made to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    engine: usize,
    life: u32,
}

/// The result of a run.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    pub(crate) loaded: u32,
    pub(crate) recomputed: u32,
    pub(crate) errors: u32,
    pub(crate) aborted: u32,
    pub(crate) stale: u32,
    pub(crate) lost: u32,
    /// The loads of the MooncakeConnector before vLLM 0.16.
    pub(crate) older: u32,
    pub(crate) runs: u32,
    pub(crate) unequal: u32,
    pub(crate) restarts: u32,
    pub(crate) events: u32,
}

impl Summary {
    pub(crate) fn add(&mut self, other: &Summary) {
        for (count, more) in [
            (&mut self.loaded, other.loaded),
            (&mut self.recomputed, other.recomputed),
            (&mut self.errors, other.errors),
            (&mut self.aborted, other.aborted),
            (&mut self.stale, other.stale),
            (&mut self.lost, other.lost),
            (&mut self.older, other.older),
            (&mut self.runs, other.runs),
            (&mut self.unequal, other.unequal),
            (&mut self.restarts, other.restarts),
            (&mut self.events, other.events),
        ] {
            *count = count.saturating_add(more);
        }
    }
}

fn worker(settings: &Settings, rank: WorkerRank) -> Worker {
    Worker::new(settings.clone(), rank)
}

pub(crate) struct World {
    scenario: Scenario,
    random: Random,
    now: u64,
    events: BTreeMap<(u64, u64), Event>,
    sequence: u64,
    engines: Vec<Engine>,
    steps: Vec<Option<u64>>,
    links: BTreeMap<(At, Connection), Link>,
    flights: BTreeMap<u64, Flight>,
    by_move: BTreeMap<(At, MoveId), u64>,
    fenced: BTreeSet<(usize, u32, usize, RequestId)>,
    clients: Vec<Client>,
    cuts: Vec<(usize, usize, u64, u64)>,
    summary: Summary,
    /// Whether every event is printed.
    traced: bool,
}

impl World {
    pub(crate) fn new(scenario: Scenario, random: Random) -> Self {
        let engines = scenario.prefills + scenario.decodes;
        let mut world = World {
            random,
            now: 0,
            events: BTreeMap::new(),
            sequence: 0,
            engines: Vec::new(),
            steps: vec![None; engines],
            links: BTreeMap::new(),
            flights: BTreeMap::new(),
            by_move: BTreeMap::new(),
            fenced: BTreeSet::new(),
            clients: Vec::new(),
            cuts: Vec::new(),
            summary: Summary::default(),
            traced: std::env::var_os("KVX_SIM_TRACE").is_some(),
            scenario,
        };
        for engine in 0..engines {
            let born = world.birth(engine, 0);
            world.engines.push(Engine::new(born, worker));
        }
        for _ in 0..world.scenario.clients {
            world.new_client(None);
        }
        let trouble = world.scenario.trouble;
        for _ in 0..3 {
            if world.random.percent(trouble) {
                let engine = world.random.within(0..engines as u64) as usize;
                let at = world.random.within(0..30 * SECOND);
                world.after(at, Event::Restart(engine));
            }
            if world.random.percent(trouble * 2) {
                let (p, d) = (world.scenario.prefills as u64, engines as u64);
                let (a, b) =
                    (world.random.within(0..p) as usize, world.random.within(p..d) as usize);
                let from = world.random.within(0..20 * SECOND);
                let until = from + world.random.skewed(SECOND..60 * SECOND);
                world.cuts.push((a, b, from, until));
            }
        }
        world
    }

    fn birth(&mut self, engine: usize, life: u32) -> Birth {
        let scenario = &self.scenario;
        let prefill = engine < scenario.prefills;
        let tp = if prefill { scenario.prefill_tp } else { scenario.decode_tp };
        let keeps_its_name = self.random.percent(30);
        let id = if keeps_its_name {
            format!("engine-{engine}")
        } else {
            format!("engine-{engine}.{life}")
        };
        let mut settings = Settings::new(id, address(engine));
        settings.mode = scenario.mode;
        settings.tp_size = tp;
        settings.block_size = 4;
        let lease = LeaseTime { duration: scenario.lease };
        settings.version = scenario.versions[usize::from(!prefill)];
        settings.release = match settings.version.leases() && !scenario.fixed {
            true => BlockRelease::Lease(lease),
            false => BlockRelease::After(lease.duration * 2),
        };
        settings.heartbeat = settings.version.leases().then(|| lease.heartbeat());
        settings.consumers = ConsumerRule::of(settings.version);
        settings.bidirectional = scenario.bidirectional;
        settings.decoder_ttl = Duration::from_secs(20);
        settings.recompute_threshold = 5;
        settings.push_timeout = Duration::from_secs(15);
        settings.engine_ttl = self.random.percent(50).then_some(Duration::from_secs(5));
        settings.policy = scenario.policy;
        settings.load_timeout = Duration::from_micros(scenario.load_timeout);
        let mut clock = || Clock {
            origin: self.random.within(0..10_000) * SECOND,
            drift_ppm: self.random.within(0..401) as i64 - 200,
        };
        let (own, workers) = (clock(), (0..tp).map(|_| clock()).collect());
        Birth {
            settings,
            blocks: self.scenario.blocks,
            clock: own,
            clocks: workers,
            random: self.random.word(),
            generations: self.scenario.generations,
            life,
            registration: self.random.within(0..3),
        }
    }

    fn after(&mut self, delay: u64, event: Event) {
        self.sequence += 1;
        self.events.insert((self.now + delay, self.sequence), event);
    }

    fn wake(&mut self, engine: usize, at: u64) {
        if self.steps[engine].is_none_or(|planned| at < planned) {
            self.steps[engine] = Some(at);
            self.after(at.saturating_sub(self.now), Event::Step(engine));
        }
    }

    /// Runs until no event is left. Returns the first violation.
    pub(crate) fn run(mut self) -> Result<Summary, String> {
        while let Some(((at, _), event)) = self.events.pop_first() {
            self.now = at;
            self.summary.events += 1;
            if at > END || self.summary.events > MAX_EVENTS {
                return Err(self.said(format!("the simulation does not end: {event:?}")));
            }
            self.happen(event).map_err(|why| self.said(why))?;
        }
        for client in 0..self.clients.len() {
            if !self.clients[client].over {
                return Err(self.said(format!("client {client} never got an answer")));
            }
        }
        self.summary.runs = 1;
        self.summary.unequal += u32::from(self.scenario.versions[0] != self.scenario.versions[1]);
        for engine in 0..self.engines.len() {
            self.engines[engine].check_quiet(self.now).map_err(|why| self.said(why))?;
            self.count_engine(engine);
        }
        Ok(self.summary)
    }

    fn count_engine(&mut self, engine: usize) {
        let engine = &self.engines[engine];
        self.summary.loaded += engine.loaded;
        self.summary.recomputed += engine.recomputed;
        self.summary.stale += engine.stale;
        self.summary.lost += engine.lost;
    }

    fn said(&self, why: String) -> String {
        format!("at {:.3} s: {why}\n{:?}", self.now as f64 / 1e6, self.scenario)
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        if self.traced && !matches!(event, Event::Step(_)) {
            println!("{:>12} {event:?}", self.now);
        }
        match event {
            Event::Start(client) => self.start(client),
            Event::ToDecode(client, params) => self.decode_leg(client, params),
            Event::Abort(client) => return self.abort(client),
            Event::GivesUp(number) => {
                // A proxy without an engine to wait for.
                let client = &mut self.clients[number];
                if client.running == (false, false) && !client.over {
                    client.over = true;
                    self.summary.errors += 1;
                }
            }
            Event::Step(engine) => {
                if self.steps[engine] == Some(self.now) {
                    self.steps[engine] = None;
                    return self.step(engine);
                }
            }
            Event::Handshake(at, connection, peer, sent) => {
                self.handshake(at, connection, &peer, sent)
            }
            Event::MoveHalf(key) => self.copy(key, 0),
            Event::MoveEnd(key) => self.move_ends(key),
            Event::MoveTimesOut(key) => self.move_times_out(key),
            Event::Words(at, link, id, rank, blocks) => self.words(at, link, id, rank, &blocks),
            Event::WordsBack(at, id, result) => {
                let result =
                    result.as_ref().map(|(pool, words)| (*pool, &words[..])).map_err(Clone::clone);
                self.with(at, |worker, time| worker.generations_read(time, id, result));
            }
            Event::Notice { to: (engine, life), rank, from, bytes } => {
                let at = At { engine, life, worker: rank as usize };
                let mut result = Ok(());
                self.with(at, |worker, time| result = worker.notified(time, &from, &bytes));
                result.map_err(|error| error.to_string())?;
            }
            Event::Unsent(at, request, rank) => {
                self.with(at, |worker, time| {
                    worker.notification_failed(time, request.as_ref(), rank, "no route")
                });
            }
            Event::Fence(at, request) => self.fence(at, request),
            Event::Finish(at, request, blocks) => self.finish(at, &request, &blocks),
            Event::Lost(at, connection) => {
                self.with(at, |worker, time| worker.connection_lost(time, connection))
            }
            Event::Restart(engine) => return self.restart(engine),
        }
        Ok(())
    }

    /// Calls a worker if its incarnation still runs, and performs its actions.
    fn with(&mut self, at: At, call: impl FnOnce(&mut Worker, kvx_vllm::engine::Time)) {
        let now = self.now;
        let Some(engine) = self.engines.get_mut(at.engine).filter(|engine| engine.life == at.life)
        else {
            return;
        };
        let time = engine.clocks[at.worker].at(now);
        call(&mut engine.workers[at.worker], time);
        self.act(at);
        self.wake(at.engine, now + MILLISECOND);
    }

    fn step(&mut self, engine: usize) -> Result<(), String> {
        let ended = self.engines[engine].step(self.now)?;
        for worker in 0..self.engines[engine].workers.len() {
            self.act(At { engine, life: self.engines[engine].life, worker });
        }
        for (number, id, end) in ended {
            self.ended(engine, number, &id, end)?;
        }
        if let Some(at) = self.engines[engine].next_step(self.now) {
            self.wake(engine, at.max(self.now + MILLISECOND));
        }
        Ok(())
    }

    fn engine_at(&self, host: &str) -> Option<usize> {
        host.strip_prefix("host-")?.parse().ok().filter(|engine| *engine < self.engines.len())
    }

    /// Returns the end of the current network cut between two engines.
    fn cut(&self, a: usize, b: usize) -> Option<u64> {
        let (a, b) = (a.min(b), a.max(b));
        let cuts = self.cuts.iter().filter(|(x, y, from, until)| {
            (*x, *y) == (a, b) && (*from..*until).contains(&self.now)
        });
        cuts.map(|(.., until)| *until).max()
    }

    /// Performs a worker's actions.
    fn act(&mut self, at: At) {
        let engine = &mut self.engines[at.engine];
        if engine.life != at.life {
            return;
        }
        let mut actions = Vec::new();
        while let Some(action) = engine.workers[at.worker].next_action() {
            actions.push(action);
        }
        for action in actions {
            if self.traced {
                println!("{:>12} {at:?} asks for {action:?}", self.now);
            }
            match action {
                Action::Handshake { connection, peer, .. } => {
                    let delay = self.random.skewed(MILLISECOND..3 * SECOND);
                    self.after(delay, Event::Handshake(at, connection, peer, self.now));
                }
                Action::Read(what) => self.take_off(at, what, false),
                Action::Write(what) => self.take_off(at, what, true),
                Action::ReadGenerations { id, connection, rank, blocks, .. } => {
                    let delay = self.random.skewed(50..200 * MILLISECOND);
                    let blocks = blocks
                        .iter()
                        .flat_map(|list| (0..list.len()).map(|place| list.at(place)))
                        .collect();
                    let link = self.links[&(at, connection)];
                    self.after(delay, Event::Words(at, link, id, rank, blocks));
                }
                Action::Notify { connection, rank, request, bytes } => {
                    self.notify(at, self.links[&(at, connection)], rank, request, &bytes);
                }
                Action::Register { request, connection, ranks, registration } => {
                    let bytes = EngineNotification::Registration(registration).encode().into();
                    for rank in ranks {
                        let request = Some(request.clone());
                        self.notify(at, self.links[&(at, connection)], rank, request, &bytes);
                    }
                }
                Action::Cancel { id } => {
                    if let Some(key) = self.by_move.get(&(at, id)).copied()
                        && self.random.percent(50)
                    {
                        if let Some(flight) = self.flights.get_mut(&key) {
                            flight.fails = true;
                        }
                        self.after(MILLISECOND, Event::MoveEnd(key));
                    }
                }
                Action::Fence { request, .. } => {
                    let delay = self.random.skewed(MILLISECOND..SECOND);
                    self.after(delay, Event::Fence(at, request));
                }
                Action::Finish { request, lists, .. } => {
                    let delay = self.random.skewed(50..SECOND);
                    self.after(delay, Event::Finish(at, request, lists.local.iter().collect()));
                }
                Action::Disconnect { connection } => {
                    self.links.remove(&(at, connection));
                }
                other => unreachable!("{other:?}"),
            }
        }
    }

    /// Replaces an engine with a new incarnation.
    fn restart(&mut self, engine: usize) -> Result<(), String> {
        self.summary.restarts += 1;
        let life = self.engines[engine].life + 1;
        // Its transfers end, at the other ends too.
        let own: Vec<_> = self
            .flights
            .iter()
            .filter(|(_, flight)| flight.at.engine == engine)
            .map(|(key, _)| *key)
            .collect();
        for key in own {
            if let Some(mut flight) = self.flights.remove(&key) {
                self.count(&mut flight, false);
                self.by_move.remove(&(flight.at, flight.what.id));
            }
        }
        let born = self.birth(engine, life);
        self.count_engine(engine);
        self.engines[engine] = Engine::new(born, worker);
        self.steps[engine] = None;
        self.links.retain(|(at, _), _| at.engine != engine);
        let lost: Vec<_> = self
            .links
            .iter()
            .filter(|(_, link)| link.engine == engine)
            .map(|(key, _)| *key)
            .collect();
        for (at, connection) in lost {
            // Some transports notice.
            if self.random.percent(50) {
                let delay = self.random.skewed(MILLISECOND..10 * SECOND);
                self.after(delay, Event::Lost(at, connection));
            }
        }
        for number in 0..self.clients.len() {
            let client = &self.clients[number];
            let there = (
                client.running.0 && client.prefill == engine,
                client.running.1 && client.decode == engine,
            );
            if client.over || there == (false, false) {
                continue;
            }
            // The proxy ends the other leg too.
            let legs = [
                (client.prefill, client.lives.0, client.prefill_id.clone()),
                (client.decode, client.lives.1, client.decode_id.clone()),
            ];
            self.clients[number].over = true;
            self.summary.errors += 1;
            for (engine, life, id) in legs {
                if self.engines[engine].life == life {
                    self.engines[engine].abort(self.now, &id)?;
                    self.wake(engine, self.now);
                }
            }
        }
        Ok(())
    }
}
