//! A state of the model: two engines, the requests, and what travels between the engines.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvx_vllm::engine::{
    BlockReference, Connection, Generations, Kept, MoveId, OutputAggregator, RequestId, Scheduler,
    Worker, WorkerOutput, WorkerRank,
};
use kvx_vllm::params::TransferParams;
use kvx_vllm::wire::EngineNotification;

use super::encoding::{Moment, digest, from_now};
use super::scene::{Faults, Role, Scene, time};

/// A broken promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Broken {
    /// A load has succeeded with other contents than the request's.
    Stale,
    /// A block was freed or given away while a transfer may access it.
    InUse,
    /// A lease or a load has ended twice, or something ended that had not begun.
    Twice,
    /// A request has not ended at its deadline.
    Late,
    /// No event follows, but an engine still has blocks, leases or loads.
    Leak,
}

/// The content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Content {
    /// Data of another request of this engine, or none.
    Other,
    /// The prompt of a request.
    Of(usize),
}

/// The blocks of an engine's incarnation.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    pub(super) owners: Vec<Option<usize>>,
    pub(super) contents: Vec<Content>,
    /// The blocks that were given new contents, in order.
    reused: Vec<u32>,
    identifier: u64,
}

impl Pool {
    fn new(scene: &Scene, role: Role, life: u32) -> Self {
        Pool {
            owners: vec![None; scene.blocks as usize],
            contents: vec![Content::Other; scene.blocks as usize],
            reused: Vec::new(),
            identifier: 1 + u64::from(life) * 2 + role as u64,
        }
    }

    fn blocks(&self) -> Range<u32> {
        0..self.owners.len() as u32
    }

    /// Returns a block that belongs to no request.
    pub(super) fn free(&self) -> Option<u32> {
        self.blocks().find(|block| self.owners[*block as usize].is_none())
    }

    /// Returns free blocks with a request's contents, which the engine may use for something else.
    pub(super) fn reusable(&self) -> Vec<u32> {
        let reusable = |block: &u32| {
            let at = *block as usize;
            self.owners[at].is_none() && self.contents[at] != Content::Other
        };
        self.blocks().filter(reusable).collect()
    }

    /// Gives a block new contents.
    pub(super) fn reuse(&mut self, block: u32) {
        self.reused.push(block);
        self.contents[block as usize] = Content::Other;
    }

    /// Returns the counters of the blocks. They hold atomics, so a state keeps their history.
    fn generations(&self) -> Generations<Vec<AtomicU64>> {
        let words = (0..=self.owners.len()).map(|_| AtomicU64::new(0)).collect();
        let mut generations = Generations::new(words, self.identifier);
        self.reused.iter().for_each(|block| generations.reuse([*block]));
        generations
    }

    pub(super) fn reference(&self) -> BlockReference {
        self.generations().reference()
    }

    fn stamp(&self) -> u64 {
        self.reused.len() as u64
    }

    /// Returns the pool's identifier and the counter of a block, as a peer reads them.
    pub(super) fn words(&self, block: u32) -> (u64, u64) {
        let generations = self.generations();
        let word = |at: usize| generations.words()[at].load(Ordering::Acquire);
        (word(0), word(block as usize + 1))
    }
}

impl Hash for Pool {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (&self.owners, &self.contents, self.identifier).hash(hasher);
        // Only the counters' distances from the stamp decide something.
        let age = |block| self.reused.iter().rev().position(|reused| *reused == block);
        self.blocks().for_each(|block| age(block).hash(hasher));
    }
}

/// A lease on blocks that the prefill has published, as its peer may rely on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    pub(super) until: u64,
    /// True if the worker has the order to keep the blocks, so that heartbeats count.
    pub(super) ordered: bool,
}

/// An incarnation of an engine with one worker.
#[derive(Clone, Debug)]
pub(super) struct Side {
    pub(super) life: u32,
    pub(super) scheduler: Scheduler,
    pub(super) worker: Worker,
    pub(super) aggregator: OutputAggregator,
    pub(super) pool: Pool,
    /// The requests that run here, with their blocks; none if the request is queued.
    pub(super) running: BTreeMap<usize, Vec<u32>>,
    /// Blocks that the connector has, of ended requests and of ended loads.
    pub(super) kept: BTreeMap<(usize, Kept), Vec<u32>>,
    pub(super) leases: BTreeMap<usize, Lease>,
    /// The peer's incarnations to which connections lead.
    pub(super) links: BTreeMap<Connection, u32>,
    /// The requests whose blocks no peer may write to any more.
    pub(super) fenced: BTreeSet<usize>,
    /// True if the scheduler has something for the workers.
    pub(super) asked: bool,
    /// True if a step would do something.
    pub(super) due: bool,
    digest: u64,
}

impl Side {
    pub(super) fn new(scene: &Scene, role: Role, life: u32) -> Self {
        let settings = scene.settings(role);
        Side {
            life,
            scheduler: Scheduler::new(settings.clone()),
            worker: Worker::new(settings.clone(), WorkerRank::default()),
            aggregator: OutputAggregator::new(1),
            pool: Pool::new(scene, role, life),
            running: BTreeMap::new(),
            kept: BTreeMap::new(),
            leases: BTreeMap::new(),
            links: BTreeMap::new(),
            fenced: BTreeSet::new(),
            asked: false,
            due: false,
            digest: 0,
        }
    }

    /// Returns the next time at which the engine acts without another event, in seconds.
    pub(super) fn next_deadline(&self, now: u64) -> Option<u64> {
        let scheduler = self.scheduler.next_deadline(time(now));
        let both = scheduler.into_iter().chain(self.worker.next_deadline());
        both.min().map(|time| time.seconds() as u64)
    }

    /// Returns whether a step would do more than to pass on log lines and statistics.
    fn wants_step(&self, now: u64) -> bool {
        let reports = |output: &WorkerOutput| {
            !(output.finished_sending.is_empty()
                && output.finished_recving.is_empty()
                && output.failing.is_empty()
                && output.lost.is_empty())
        };
        self.asked
            || self.next_deadline(now).is_some_and(|at| at <= now)
            || reports(&self.worker.clone().get_finished(time(now)))
    }

    /// Computes what depends on the rest of the state.
    fn seal(&mut self, moment: Moment) {
        let now = moment.now;
        self.due = self.wants_step(now);
        let mut hasher = DefaultHasher::new();
        let engine: [&dyn fmt::Debug; 3] = [&self.scheduler, &self.worker, &self.aggregator];
        digest(&engine, moment).hash(&mut hasher);
        (self.life, &self.pool, &self.running, &self.kept, &self.links, &self.fenced, self.asked)
            .hash(&mut hasher);
        for (request, lease) in &self.leases {
            (request, from_now(lease.until, now).max(0), lease.ordered).hash(&mut hasher);
        }
        self.digest = hasher.finish();
    }

    /// Returns the state of an idle engine that still has blocks, leases, loads or connections.
    fn leaks(&self) -> Option<String> {
        let mut worker = self.worker.clone();
        worker.shutdown();
        while worker.next_action().is_some() {}
        let owned = self.pool.owners.iter().any(Option::is_some);
        let left = owned
            || !self.kept.is_empty()
            || !self.leases.is_empty()
            || !self.running.is_empty()
            || !self.scheduler.is_empty()
            || self.aggregator.incomplete() > 0
            || !worker.is_empty();
        left.then(|| format!("{self:?}"))
    }
}

/// A leg of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Leg {
    Idle,
    Started,
}

/// A request of a client.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) legs: [Leg; 2],
    pub(super) deadline: u64,
    pub(super) has_ended: bool,
    /// The prefill's answer, while the router has it.
    pub(super) params: Option<Arc<TransferParams>>,
    /// The prefill's incarnation, and its pool's stamp, when it gave that answer.
    pub(super) published: (u32, u64),
}

/// A notification under way.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Message {
    pub(super) to: Role,
    /// The incarnations of receiver and sender.
    pub(super) lives: (u32, u32),
    /// The sender's request.
    pub(super) request: Option<RequestId>,
    pub(super) bytes: Arc<[u8]>,
}

impl Message {
    pub(super) fn decoded(&self) -> EngineNotification {
        EngineNotification::decode(&self.bytes).expect("an engine's notification")
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.decoded() {
            EngineNotification::Done { request_id, .. } => write!(f, "Done({request_id}")?,
            EngineNotification::Heartbeat { request_ids, .. } => {
                write!(f, "Heartbeat({}", request_ids.join(","))?
            }
            EngineNotification::Registration(of) => write!(f, "Registration({}", of.request_id)?,
            EngineNotification::Release { request_id, .. } => write!(f, "Release({request_id}")?,
        }
        write!(f, " to {:?})", self.to)
    }
}

/// The identifier of a move, which decides nothing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Id(pub(super) MoveId);

impl Hash for Id {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// A question of an engine to its runtime.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Question {
    Handshake(Connection),
    /// The generation counter of a block of the peer's incarnation, for a read of a request.
    Generation {
        request: usize,
        id: Id,
        life: u32,
        block: u32,
    },
    /// An end of all writes to a request's blocks.
    Fence(usize),
}

/// The progress of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Progress {
    Moving,
    /// It may arrive, or end without having arrived.
    Cancelled,
    /// It has an outcome, but may access its memory.
    Unsettled,
}

/// A read or write of a request's block.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Flight {
    /// The engine that reads or writes.
    pub(super) by: Role,
    pub(super) request: usize,
    pub(super) id: Id,
    pub(super) write: bool,
    /// The peer's incarnation.
    pub(super) life: u32,
    pub(super) local: u32,
    pub(super) remote: u32,
    pub(super) deadline: u64,
    pub(super) progress: Progress,
    /// True if the peer does not let it access its memory: it was replaced, or has ended its grant.
    pub(super) is_rejected: bool,
    /// The message that is sent once it has arrived.
    pub(super) notification: Option<Arc<[u8]>>,
}

/// A state of the model.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) now: u64,
    sides: [Arc<Side>; 2],
    changed: [bool; 2],
    pub(super) requests: Vec<Request>,
    pub(super) messages: Vec<Message>,
    pub(super) questions: Vec<(Role, Question)>,
    pub(super) flights: Vec<Flight>,
    pub(super) faults: Faults,
    pub(super) broken: Option<Broken>,
    /// The reason why it is broken, for a person.
    pub(super) why: Option<Arc<str>>,
    digest: u64,
}

impl State {
    pub(super) fn new(scene: &Scene) -> Self {
        let request = Request {
            legs: [Leg::Idle; 2],
            deadline: 0,
            has_ended: false,
            params: None,
            published: (0, 0),
        };
        State {
            // Engines subtract durations from times, which must not end at the clock's origin.
            now: 1000,
            sides: Role::BOTH.map(|role| Arc::new(Side::new(scene, role, 0))),
            changed: [true; 2],
            requests: vec![request; scene.requests],
            messages: Vec::new(),
            questions: Vec::new(),
            flights: Vec::new(),
            faults: scene.faults,
            broken: None,
            why: None,
            digest: 0,
        }
    }

    pub(super) fn side(&self, role: Role) -> &Side {
        &self.sides[role as usize]
    }

    /// Returns an engine to change. States share engines that no event has changed.
    pub(super) fn side_mut(&mut self, role: Role) -> &mut Side {
        self.changed[role as usize] = true;
        Arc::make_mut(&mut self.sides[role as usize])
    }

    /// Gives a block new contents. Each engine's state is seen from the prefill's stamp.
    pub(super) fn reuse(&mut self, role: Role, block: u32) {
        self.side_mut(role).pool.reuse(block);
        self.changed = [true; 2];
    }

    /// Ends a request for its client. Its contents do not matter any more.
    pub(super) fn end(&mut self, request: usize) {
        let entry = &mut self.requests[request];
        entry.has_ended = true;
        entry.params = None;
        entry.legs = [Leg::Started; 2];
        for role in Role::BOTH {
            if self.side(role).pool.contents.contains(&Content::Of(request)) {
                let contents = self.side_mut(role).pool.contents.iter_mut();
                contents
                    .filter(|content| **content == Content::Of(request))
                    .for_each(|content| *content = Content::Other);
            }
        }
    }

    pub(super) fn pass_to(&mut self, now: u64) {
        self.now = now;
        self.changed = [true; 2];
    }

    pub(super) fn restart(&mut self, scene: &Scene, role: Role) {
        let life = self.side(role).life + 1;
        self.sides[role as usize] = Arc::new(Side::new(scene, role, life));
        self.changed[role as usize] = true;
    }

    /// Records the first broken promise.
    pub(super) fn breaks(&mut self, broken: Broken, why: String) {
        if self.broken.is_none() {
            (self.broken, self.why) = (Some(broken), Some(why.into()));
        }
    }

    /// Returns whether a transfer may access an engine's block. Of the peer's reads, only that for
    /// the request with a live lease counts: the others find out that the block was reused.
    pub(super) fn uses(&self, role: Role, block: u32, leased: Option<usize>) -> bool {
        let life = self.side(role).life;
        self.flights.iter().any(|flight| match flight.by == role {
            true => flight.local == block,
            false => {
                let counts = flight.write || leased == Some(flight.request);
                flight.life == life && flight.remote == block && !flight.is_rejected && counts
            }
        })
    }

    /// Sorts messages, questions and flights, which have no order, and computes the digest.
    pub(super) fn seal(mut self, scene: &Scene) -> Self {
        self.messages.sort();
        self.questions.sort();
        self.flights.sort();
        let prefill = self.side(Role::Prefill);
        let (life, stamp) = (prefill.life, prefill.pool.stamp());
        let moment = Moment { now: self.now, stamp };
        for role in Role::BOTH {
            if std::mem::take(&mut self.changed[role as usize]) {
                Arc::make_mut(&mut self.sides[role as usize]).seal(moment);
            }
        }
        if self.broken.is_none()
            && self.is_quiet(scene)
            && let Some(left) = self.left()
        {
            self.breaks(Broken::Leak, left);
        }
        let mut hasher = DefaultHasher::new();
        let sides = Role::BOTH.map(|role| self.side(role).digest);
        (sides, &self.messages, &self.questions, self.faults, self.broken).hash(&mut hasher);
        for flight in &self.flights {
            let deadline = from_now(flight.deadline, self.now).max(0);
            Flight { deadline: deadline as u64, ..flight.clone() }.hash(&mut hasher);
        }
        for request in &self.requests {
            let Request { legs, deadline, has_ended, params, published } = request;
            let left = (!has_ended).then(|| from_now(*deadline, self.now).max(0));
            let reuses = (published.0 == life).then(|| stamp - published.1);
            (legs, left, params.as_ref().map(|_| reuses)).hash(&mut hasher);
        }
        self.digest = hasher.finish();
        self
    }

    /// Returns the leak of a state that no event follows.
    fn left(&self) -> Option<String> {
        let unended = self.requests.iter().position(|request| !request.has_ended);
        let unended = unended.map(|request| format!("request {request} has not ended"));
        unended.or_else(|| Role::BOTH.into_iter().find_map(|role| self.side(role).leaks()))
    }
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        hasher.write_u64(self.digest);
    }
}
