//! Engines with the MooncakeConnector: requests and answers, a bootstrap server for each prefill
//! engine, writes into the decode engine's blocks, and the same faults. Some runs use the protocol
//! before vLLM 0.16, without a bootstrap server, with kvx and with plain agents.

mod clients;
mod flights;
mod wires;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::config::{LoadFailurePolicy, Role};
use kvx_vllm::engine::mooncake::{
    AskId, Bootstrap, Mooncake, MooncakeAction, MooncakeWorker, PullId, QueryId, Target,
};
use kvx_vllm::engine::{
    Action, Address, Connection, HandshakeFailure, MoveId, PeerLane, PeerPlan, RequestId, Settings,
    Time, WorkerRank,
};
use kvx_vllm::wire::mooncake::{OlderPullRequest, PullRequest};

use self::clients::Client;
use self::flights::Flight;
use self::wires::Wire;
use crate::simulation::engine::{Birth, Clock, Engine, address};
use crate::simulation::random::Random;
use crate::simulation::world::{END, MAX_EVENTS, MILLISECOND, SECOND, Summary};

/// One in this many seeds uses the protocol before vLLM 0.16.
const OLDER: u64 = 4;

/// The time that blocks are held while a plain agent may write to them. After it they are lost.
const MAY_WRITE_FOR: u64 = 60 * SECOND;

/// The simulated scenario, determined by the seed.
#[derive(Clone, Debug)]
struct Scenario {
    prefills: usize,
    decodes: usize,
    prefill_tp: u32,
    decode_tp: u32,
    /// True for the protocol before vLLM 0.16.
    older: bool,
    /// True if every rank of a prefill engine has the same bytes, so that only one of them writes.
    latent: bool,
    /// True if kvx extensions are dropped.
    foreign: bool,
    /// True if decode engines do not name their layouts.
    nameless: bool,
    /// True if a restarted prefill engine listens at the same ports.
    same_ports: bool,
    /// The time that blocks and requests are kept.
    wait: u64,
    policy: LoadFailurePolicy,
    load_timeout: u64,
    blocks: u32,
    clients: usize,
    /// A percentage.
    trouble: u64,
}

#[derive(Debug)]
enum Event {
    Prefill(usize),
    Decode(usize),
    Abort(usize),
    /// Ends only the prefill leg.
    PrefillDies(usize),
    GivesUp(usize),
    Step(usize),
    Query(At, QueryId, String),
    Question(u64, Vec<u8>),
    Answer(u64, Vec<u8>),
    Breaks(u64, bool),
    Connect(At, Connection, Arc<Target>),
    MoveHalf(u64),
    MoveEnd(u64),
    MoveTimesOut(u64),
    Fence(At, RequestId),
    FenceForgotten(At, RequestId),
    Restart(usize),
}

/// A worker of one incarnation of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct At {
    engine: usize,
    life: u32,
    worker: usize,
}

pub(crate) struct World {
    scenario: Scenario,
    random: Random,
    now: u64,
    events: BTreeMap<(u64, u64), Event>,
    sequence: u64,
    engines: Vec<Engine<MooncakeWorker>>,
    steps: Vec<Option<u64>>,
    wires: BTreeMap<u64, Wire>,
    by_pull: BTreeMap<(At, PullId), u64>,
    by_ask: BTreeMap<AskId, u64>,
    links: BTreeMap<(At, Connection), At>,
    flights: BTreeMap<u64, Flight>,
    by_move: BTreeMap<(At, MoveId), u64>,
    fenced: BTreeSet<(At, RequestId)>,
    clients: Vec<Client>,
    cuts: Vec<(usize, usize, u64, u64)>,
    summary: Summary,
    traced: bool,
}

impl World {
    pub(crate) fn drawn(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut scenario = Scenario {
            older: seed % OLDER == OLDER - 1,
            prefills: random.within(1..3) as usize,
            decodes: random.within(1..3) as usize,
            prefill_tp: random.one_of(&[1, 1, 2]),
            decode_tp: random.one_of(&[1, 1, 2]),
            latent: random.percent(30),
            foreign: random.percent(30),
            nameless: random.percent(20),
            same_ports: random.percent(50),
            wait: random.one_of(&[5, 20, 60]) * SECOND,
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
        // The protocol requires equal sizes on both sides. Only kvx reports its size, and rejects
        // others.
        if scenario.older && (scenario.foreign || random.percent(90)) {
            scenario.decode_tp = scenario.prefill_tp;
        }
        let engines = scenario.prefills + scenario.decodes;
        let mut world = World {
            random,
            now: 0,
            events: BTreeMap::new(),
            sequence: 0,
            engines: Vec::new(),
            steps: vec![None; engines],
            wires: BTreeMap::new(),
            by_pull: BTreeMap::new(),
            by_ask: BTreeMap::new(),
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
            let born = world.born(engine, 0);
            world.engines.push(born);
        }
        for _ in 0..world.scenario.clients {
            world.new_client();
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

    fn born(&mut self, engine: usize, life: u32) -> Engine<MooncakeWorker> {
        let first_port = self.port(At { engine, life, worker: 0 });
        let scenario = &self.scenario;
        let prefill = engine < scenario.prefills;
        let tp = if prefill { scenario.prefill_tp } else { scenario.decode_tp };
        let keeps_its_name = self.random.percent(30);
        let id = if keeps_its_name {
            format!("engine-{engine}")
        } else {
            format!("engine-{engine}.{life}")
        };
        let mut mooncake = Mooncake::new(if prefill { Role::Producer } else { Role::Consumer });
        mooncake.wait = Duration::from_micros(scenario.wait);
        mooncake.connect_timeout = Duration::from_secs(3);
        let mut address = address(engine);
        if scenario.older {
            // Its first worker listens here.
            mooncake.bootstrap = Bootstrap::Without;
            address = Address { port: first_port, ..address };
        }
        let mut settings = Settings::new(id, address).with_mooncake(mooncake);
        settings.tp_size = tp;
        settings.block_size = 4;
        settings.engine_ttl = self.random.percent(50).then_some(Duration::from_secs(5));
        settings.policy = scenario.policy;
        settings.load_timeout = Duration::from_micros(scenario.load_timeout);
        let mut clock = || Clock {
            origin: self.random.within(0..10_000) * SECOND,
            drift_ppm: self.random.within(0..401) as i64 - 200,
        };
        let (own, workers) = (clock(), (0..tp).map(|_| clock()).collect());
        let birth = Birth {
            settings,
            blocks: self.scenario.blocks,
            clock: own,
            clocks: workers,
            random: self.random.word(),
            generations: false,
            life,
            registration: 0,
        };
        let layout_id = if self.scenario.nameless { 0 } else { self.random.word() >> 1 | 1 };
        Engine::new(birth, |settings, rank| {
            let mut told =
                PullRequest::new(format!("host-{engine}"), 7000 + rank.tp as u16, tp, rank.tp);
            // Each incarnation has different memory addresses.
            told.kv_caches_base_addr = vec![u64::from(life) << 32 | 4096];
            (told.block_lens, told.kv_block_lens, told.layout_id) = (vec![64], vec![64], layout_id);
            MooncakeWorker::new(settings.clone(), rank, told)
                .expect("a MooncakeConnector's settings")
        })
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
        if let Some(client) = self.clients.iter().position(|client| !client.over) {
            return Err(self.said(format!("client {client} never got an answer")));
        }
        self.summary.runs = 1;
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
        self.summary.lost += engine.lost;
        self.summary.older += if self.scenario.older { engine.loaded } else { 0 };
    }

    fn said(&self, why: String) -> String {
        format!("at {:.3} s: {why}\n{:?}", self.now as f64 / 1e6, self.scenario)
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        if self.traced && !matches!(event, Event::Step(_)) {
            println!("{:>12} {event:?}", self.now);
        }
        match event {
            Event::Prefill(client) => self.prefill_leg(client),
            Event::Decode(client) => self.decode_leg(client),
            Event::Abort(client) => return self.abort(client),
            Event::PrefillDies(client) => return self.prefill_dies(client),
            Event::GivesUp(number) => {
                let client = &mut self.clients[number];
                if !client.over && !client.decoding {
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
            Event::Query(at, query, host) => self.query(at, query, &host),
            Event::Question(wire, bytes) => self.question(wire, &bytes),
            Event::Answer(wire, bytes) => self.answer(wire, &bytes),
            Event::Breaks(wire, delivered) => self.breaks(wire, delivered),
            Event::Connect(at, connection, target) => self.connect(at, connection, &target),
            Event::MoveHalf(key) => self.copy(key, 0),
            Event::MoveEnd(key) => self.move_ends(key),
            Event::MoveTimesOut(key) => self.move_times_out(key),
            Event::Fence(at, request) => self.fence(at, request),
            Event::FenceForgotten(at, request) => self.fence_forgotten(at, &request),
            Event::Restart(engine) => return self.restart(engine),
        }
        Ok(())
    }

    /// Calls a worker if its incarnation still runs, and performs its actions.
    fn with(&mut self, at: At, call: impl FnOnce(&mut MooncakeWorker, Time)) {
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

    /// Returns the end of the current network cut between two engines.
    fn cut(&self, a: usize, b: usize) -> Option<u64> {
        let (a, b) = (a.min(b), a.max(b));
        let cuts = self.cuts.iter();
        let cuts = cuts.filter(|(x, y, from, until)| {
            (*x, *y) == (a, b) && (*from..*until).contains(&self.now)
        });
        cuts.map(|(.., until)| *until).max()
    }

    fn lives(&self, at: At) -> bool {
        self.engines[at.engine].life == at.life
    }

    /// Performs a worker's actions.
    fn act(&mut self, at: At) {
        if !self.lives(at) {
            return;
        }
        let worker = &mut self.engines[at.engine].workers[at.worker];
        let actions: Vec<_> = std::iter::from_fn(|| worker.next_action()).collect();
        for action in actions {
            if self.traced {
                println!("{:>12} {at:?} asks for {action:?}", self.now);
            }
            match action {
                MooncakeAction::Query { query, address, .. } => {
                    let delay = self.random.skewed(MILLISECOND..2 * SECOND);
                    self.after(delay, Event::Query(at, query, address.host.to_string()));
                }
                MooncakeAction::Ask { pull, address, question, is_kvx, deadline } => {
                    let plain = self.scenario.older && !is_kvx;
                    let bytes = match self.scenario.older {
                        false => question.encode(),
                        true if is_kvx => OlderPullRequest::to_kvx(&question).encode(),
                        true => OlderPullRequest::plain(&question).expect("one group").encode(),
                    };
                    self.ask(at, pull, &address, bytes, (plain, deadline));
                }
                MooncakeAction::Hangup { pull } => {
                    if let Some(wire) = self.by_pull.remove(&(at, pull)) {
                        self.wires.remove(&wire);
                    }
                }
                MooncakeAction::Answer { ask, bytes } => self.send_answer(ask, bytes),
                MooncakeAction::Connect { connection, target } => {
                    let delay = self.random.skewed(MILLISECOND..SECOND);
                    self.after(delay, Event::Connect(at, connection, target));
                }
                MooncakeAction::Write { what, theirs } => self.take_off(at, what, theirs),
                MooncakeAction::Engine(Action::Cancel { id }) => {
                    if let Some(key) = self.by_move.get(&(at, id)).copied()
                        && self.random.percent(50)
                    {
                        if let Some(flight) = self.flights.get_mut(&key) {
                            flight.fails = true;
                        }
                        self.after(MILLISECOND, Event::MoveEnd(key));
                    }
                }
                MooncakeAction::Engine(Action::Fence { request }) => {
                    let delay = self.random.skewed(MILLISECOND..SECOND);
                    self.after(delay, Event::Fence(at, request));
                }
                MooncakeAction::Engine(Action::Disconnect { connection }) => {
                    self.links.remove(&(at, connection));
                }
                other => unreachable!("{other:?}"),
            }
        }
    }

    /// Connects a prefill worker to the memory that a decode worker has described.
    fn connect(&mut self, at: At, connection: Connection, target: &Target) {
        let told = &target.told;
        let engine =
            told.remote_hostname.strip_prefix("host-").and_then(|engine| engine.parse().ok());
        let engine: usize = engine.expect("only decodes ask");
        let life = (told.kv_caches_base_addr[0] >> 32) as u32;
        let to = At { engine, life, worker: told.remote_tp_rank as usize };
        let unreachable = !self.lives(to) || self.random.percent(self.scenario.trouble / 5);
        let result = match unreachable || self.cut(at.engine, engine).is_some() {
            true => Err(HandshakeFailure { setup: false, error: "no way to its memory".into() }),
            false => {
                self.links.insert((at, connection), to);
                let mut plan = PeerPlan::one_to_one(4, self.scenario.blocks).expect("a valid plan");
                let rank = WorkerRank { pp: 0, tp: told.remote_tp_rank };
                // Of the replicas of a latent, only one sends.
                let (own, theirs) = (self.scenario.prefill_tp, self.scenario.decode_tp);
                let sends = !self.scenario.latent || own <= theirs || at.worker.is_multiple_of(2);
                plan.lanes = if sends { vec![PeerLane::whole(rank, 1)] } else { Vec::new() };
                Ok(plan)
            }
        };
        self.with(at, |worker, time| worker.connected(time, connection, result));
    }

    /// Replaces an engine with a new incarnation.
    fn restart(&mut self, engine: usize) -> Result<(), String> {
        self.summary.restarts += 1;
        let life = self.engines[engine].life + 1;
        let own = self.flights.iter().filter(|(_, flight)| flight.at.engine == engine);
        for key in own.map(|(key, _)| *key).collect::<Vec<_>>() {
            if let Some(mut flight) = self.flights.remove(&key) {
                self.count(&mut flight, false);
                self.by_move.remove(&(flight.at, flight.what.id));
            }
        }
        self.count_engine(engine);
        self.engines[engine] = self.born(engine, life);
        self.steps[engine] = None;
        self.links.retain(|(at, _), _| at.engine != engine);
        self.cut_wires(engine);
        for number in 0..self.clients.len() {
            let client = &self.clients[number];
            let there = (
                client.prefilling && client.prefill == engine,
                client.decoding && client.decode == engine,
            );
            if !client.over && there != (false, false) {
                self.summary.errors += 1;
                self.end_client(number)?;
            }
        }
        Ok(())
    }
}
