//! The frame of a simulation: the engines, the clients in front of them, the network between them,
//! and the faults of all three. A [`Protocol`] adds what only its connector does.

mod clients;
mod flights;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::Duration;

use kvx_vllm::config::LoadFailurePolicy;
use kvx_vllm::engine::{Action, Connection, Move, MoveId, RequestId, Settings, Time, WorkerRank};

use self::clients::Client;
use self::flights::Flight;
use crate::random::Random;
use crate::simulation::engine::{Asked, Birth, Clock, End, Engine, Half, address};
use crate::simulation::memory::Memory;

pub(crate) const MILLISECOND: u64 = 1_000;
pub(crate) const SECOND: u64 = 1_000 * MILLISECOND;
/// The time after which a run counts as hung.
const END: u64 = 3_000 * SECOND;
const MAX_EVENTS: u32 = 400_000;

/// The place of prefill engines, and of the legs that they answer, among the two of each kind.
pub(crate) const PREFILL: usize = 0;
/// The place of decode engines and their legs.
pub(crate) const DECODE: usize = 1;

/// The protocol of a connector, with the parts of the scenario that only it has.
pub(crate) trait Protocol: Debug + Sized {
    /// The worker half.
    type Worker: Half;
    /// The state of the network that only this protocol has.
    type State: Default;
    /// The events that only this protocol has.
    type Event: Debug;
    /// The part of a client that only this protocol has.
    type Client;

    /// Completes the settings of an engine, and creates it.
    fn engine(world: &mut World<Self>, engine: usize, birth: Birth) -> Engine<Self::Worker>;

    /// Draws the protocol's part of a client, and the names of its two legs.
    fn client(world: &mut World<Self>, number: usize) -> (Self::Client, [RequestId; 2]);

    /// Plans the legs of a client that sends its request after `delay`.
    fn start(world: &mut World<Self>, number: usize, delay: u64);

    /// Returns the parameters of a leg that is sent now.
    fn ask(world: &mut World<Self>, number: usize, leg: usize) -> Asked;

    /// Handles the end of a leg of a client that waits for an answer.
    fn ended(world: &mut World<Self>, number: usize, leg: usize, end: End) -> Result<(), String>;

    fn happen(world: &mut World<Self>, event: Self::Event) -> Result<(), String>;

    /// Performs a worker's action.
    fn act(world: &mut World<Self>, at: At, action: <Self::Worker as Half>::Action);

    /// Handles the restart of an engine, whose own connections are gone.
    fn restarted(world: &mut World<Self>, engine: usize);

    /// Handles a move from `at` whose data has arrived.
    fn moved(_: &mut World<Self>, _at: At, _to: At, _what: &Move) {}

    /// Handles the failure of a move that has not settled.
    fn unsettled(_: &mut World<Self>, _at: At, _to: At) {}

    /// Returns whether a worker fences off the writes for a request now.
    fn fences(_: &mut World<Self>, _at: At, _request: &RequestId) -> bool {
        true
    }

    /// Returns whether loaded blocks must be reordered.
    fn finishes(&self) -> bool {
        false
    }

    /// Adds the protocol's own counts.
    fn count(&self, summary: &mut Summary);
}

/// The simulated scenario, determined by the seed.
#[derive(Debug)]
pub(crate) struct Scenario<P> {
    pub(crate) own: P,
    pub(crate) prefills: usize,
    pub(crate) decodes: usize,
    /// The tensor-parallel sizes of prefill engines and of decode engines.
    pub(crate) tp: [u32; 2],
    /// True if every rank of an engine has the same bytes, so that only one of them moves.
    pub(crate) latent: bool,
    policy: LoadFailurePolicy,
    load_timeout: u64,
    pub(crate) blocks: u32,
    pub(crate) clients: usize,
    /// A percentage.
    pub(crate) trouble: u64,
}

impl<P> Scenario<P> {
    pub(crate) fn drawn(random: &mut Random, own: P) -> Self {
        Scenario {
            own,
            prefills: random.within(1..3) as usize,
            decodes: random.within(1..3) as usize,
            tp: [random.one_of(&[1, 1, 2]), random.one_of(&[1, 1, 2])],
            latent: random.percent(30),
            policy: if random.percent(50) {
                LoadFailurePolicy::Fail
            } else {
                LoadFailurePolicy::Recompute
            },
            load_timeout: random.one_of(&[1, 10, 60]) * SECOND,
            blocks: random.within(12..40) as u32,
            clients: random.within(3..12) as usize,
            trouble: random.one_of(&[0, 5, 15, 40]),
        }
    }

    /// Returns whether an engine is a prefill or a decode.
    pub(crate) fn side(&self, engine: usize) -> usize {
        if engine < self.prefills { PREFILL } else { DECODE }
    }

    pub(crate) fn longest_prompt(&self) -> u32 {
        self.blocks * 4 / 2
    }
}

#[derive(Debug)]
enum Event<E> {
    Leg(usize, usize),
    Abort(usize),
    GivesUp(usize),
    Step(usize),
    MoveHalf(u64),
    MoveEnd(u64),
    MoveTimesOut(u64),
    Fence(At, RequestId),
    Restart(usize),
    Own(E),
}

/// A worker of one incarnation of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct At {
    pub(crate) engine: usize,
    pub(crate) life: u32,
    pub(crate) worker: usize,
}

/// Another engine, in the incarnation that the connection was made to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) engine: usize,
    pub(crate) life: u32,
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

pub(crate) struct World<P: Protocol> {
    pub(crate) scenario: Scenario<P>,
    pub(crate) state: P::State,
    pub(crate) random: Random,
    pub(crate) now: u64,
    events: BTreeMap<(u64, u64), Event<P::Event>>,
    sequence: u64,
    pub(crate) engines: Vec<Engine<P::Worker>>,
    steps: Vec<Option<u64>>,
    pub(crate) links: BTreeMap<(At, Connection), Link>,
    flights: BTreeMap<u64, Flight>,
    by_move: BTreeMap<(At, MoveId), u64>,
    fenced: BTreeSet<(At, RequestId)>,
    pub(crate) clients: Vec<Client<P::Client>>,
    cuts: Vec<(usize, usize, u64, u64)>,
    pub(crate) summary: Summary,
    /// Whether every event is printed.
    traced: bool,
}

impl<P: Protocol> World<P> {
    pub(crate) fn new(scenario: Scenario<P>, random: Random) -> Self {
        let engines = scenario.prefills + scenario.decodes;
        let mut world = World {
            state: P::State::default(),
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

    fn born(&mut self, engine: usize, life: u32) -> Engine<P::Worker> {
        let scenario = &self.scenario;
        let keeps_its_name = self.random.percent(30);
        let id = if keeps_its_name {
            format!("engine-{engine}")
        } else {
            format!("engine-{engine}.{life}")
        };
        let mut settings = Settings::new(id, address(engine));
        settings.tp_size = scenario.tp[scenario.side(engine)];
        settings.block_size = 4;
        settings.engine_ttl = self.random.percent(50).then_some(Duration::from_secs(5));
        settings.policy = scenario.policy;
        settings.load_timeout = Duration::from_micros(scenario.load_timeout);
        let mut clock = || Clock {
            origin: self.random.within(0..10_000) * SECOND,
            drift_ppm: self.random.within(0..401) as i64 - 200,
        };
        let (own, workers) = (clock(), (0..settings.tp_size).map(|_| clock()).collect());
        let birth = Birth {
            settings,
            blocks: scenario.blocks,
            clock: own,
            clocks: workers,
            random: self.random.word(),
            generations: false,
            life,
            registration: 0,
        };
        P::engine(self, engine, birth)
    }

    /// Returns a number that no other call returns.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    fn after(&mut self, delay: u64, event: Event<P::Event>) {
        let number = self.next_number();
        self.events.insert((self.now + delay, number), event);
    }

    /// Plans an event of the protocol.
    pub(crate) fn happens_after(&mut self, delay: u64, event: P::Event) {
        self.after(delay, Event::Own(event));
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
        self.scenario.own.count(&mut self.summary);
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

    fn happen(&mut self, event: Event<P::Event>) -> Result<(), String> {
        if self.traced && !matches!(event, Event::Step(_)) {
            println!("{:>12} {event:?}", self.now);
        }
        match event {
            Event::Leg(client, leg) => self.start_leg(client, leg),
            Event::Abort(client) => return self.abort(client),
            Event::GivesUp(client) => self.gives_up(client),
            Event::Step(engine) => {
                if self.steps[engine] == Some(self.now) {
                    self.steps[engine] = None;
                    return self.step(engine);
                }
            }
            Event::MoveHalf(key) => self.copy(key, 0),
            Event::MoveEnd(key) => self.move_ends(key),
            Event::MoveTimesOut(key) => self.move_times_out(key),
            Event::Fence(at, request) => self.fence(at, request),
            Event::Restart(engine) => return self.restart(engine),
            Event::Own(event) => return P::happen(self, event),
        }
        Ok(())
    }

    /// Calls a worker if its incarnation still runs, and performs its actions.
    pub(crate) fn with(&mut self, at: At, call: impl FnOnce(&mut P::Worker, Time)) {
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

    pub(crate) fn engine_at(&self, host: &str) -> Option<usize> {
        host.strip_prefix("host-")?.parse().ok().filter(|engine| *engine < self.engines.len())
    }

    /// Returns the end of the current network cut between two engines.
    pub(crate) fn cut(&self, a: usize, b: usize) -> Option<u64> {
        let (a, b) = (a.min(b), a.max(b));
        let cuts = self.cuts.iter().filter(|(x, y, from, until)| {
            (*x, *y) == (a, b) && (*from..*until).contains(&self.now)
        });
        cuts.map(|(.., until)| *until).max()
    }

    pub(crate) fn lives(&self, at: At) -> bool {
        self.engines[at.engine].life == at.life
    }

    /// Returns the memory of a worker that lives.
    pub(crate) fn memory(&mut self, at: At) -> &mut Memory {
        &mut self.engines[at.engine].pool.workers[at.worker]
    }

    /// Returns a worker at the other end of a connection.
    pub(crate) fn peer(&self, at: At, connection: Connection, rank: WorkerRank) -> At {
        let Link { engine, life } = self.links[&(at, connection)];
        At { engine, life, worker: rank.tp as usize }
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
            P::act(self, at, action);
        }
    }

    /// Performs an action that the workers of all protocols ask for.
    pub(crate) fn perform(&mut self, at: At, action: Action) {
        match action {
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
            Action::Fence { request } => {
                let delay = self.random.skewed(MILLISECOND..SECOND);
                self.after(delay, Event::Fence(at, request));
            }
            Action::Disconnect { connection } => {
                self.links.remove(&(at, connection));
            }
            other => unreachable!("{other:?}"),
        }
    }

    /// Replaces an engine with a new incarnation.
    fn restart(&mut self, engine: usize) -> Result<(), String> {
        self.summary.restarts += 1;
        let life = self.engines[engine].life + 1;
        // Its transfers end, at the other ends too.
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
        P::restarted(self, engine);
        for number in 0..self.clients.len() {
            let client = &self.clients[number];
            if !client.over && client.legs.iter().any(|leg| leg.running && leg.engine == engine) {
                // The proxy ends the other leg too.
                self.summary.errors += 1;
                self.end_client(number)?;
            }
        }
        Ok(())
    }
}
