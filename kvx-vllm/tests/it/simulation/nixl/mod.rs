//! Engines with the NixlConnector: handshakes, reads or writes, notifications and generation
//! counters.

mod clients;
mod network;

use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::Version;
use kvx_vllm::config::{BlockRelease, LeaseTime};
use kvx_vllm::engine::{
    Action, Connection, ConsumerRule, Move, MoveId, RemoteEngine, RequestId, Worker, WorkerRank,
};
use kvx_vllm::params::{TransferMode, TransferParams};
use kvx_vllm::wire::EngineNotification;

use crate::random::Random;
use crate::simulation::engine::{Asked, Birth, End, Engine};
use crate::simulation::world::{
    At, MILLISECOND, PREFILL, Protocol, SECOND, Scenario, Summary, World,
};

/// The scenario's own parts.
#[derive(Debug)]
pub(crate) struct Nixl {
    mode: TransferMode,
    /// The versions of prefill engines and of decode engines.
    versions: [Version; 2],
    /// True if loaded blocks must be reordered.
    finishes: bool,
    /// True if heartbeats name 5,000 additional requests, as from a vLLM with a long queue.
    crowded: bool,
    generations: bool,
    bidirectional: bool,
    lease: Duration,
    /// True if blocks are kept for a fixed time in every version, because the old variable is set.
    fixed: bool,
}

pub(crate) fn drawn(seed: u64, generations: bool, among: &[Version]) -> World<Nixl> {
    let mut random = Random(seed);
    let push = random.percent(25);
    let spoken: Vec<_> =
        among.iter().copied().filter(|version| !push || version.leases()).collect();
    let own = Nixl {
        mode: if push { TransferMode::Push } else { TransferMode::Pull },
        versions: [random.one_of(&spoken), random.one_of(&spoken)],
        finishes: !push && random.percent(20),
        crowded: random.percent(2),
        generations,
        bidirectional: !push && random.percent(30),
        lease: Duration::from_secs(random.one_of(&[3, 6, 30])),
        fixed: random.percent(20),
    };
    World::new(Scenario::drawn(&mut random, own), random)
}

#[derive(Debug)]
pub(crate) enum Event {
    Handshake(At, Connection, Arc<RemoteEngine>, u64),
    Words { at: At, to: At, id: MoveId, blocks: Vec<u32> },
    WordsBack(At, MoveId, Result<(u64, Vec<u64>), String>),
    Notice { to: At, from: Arc<str>, bytes: Arc<[u8]> },
    Unsent(At, Option<RequestId>, WorkerRank),
    Finish(At, RequestId, Vec<u32>),
    Lost(At, Connection),
}

impl Protocol for Nixl {
    type Worker = Worker;
    type State = ();
    type Event = Event;
    /// The parameters of its next leg.
    type Client = Option<Box<TransferParams>>;

    fn engine(world: &mut World<Self>, engine: usize, mut birth: Birth) -> Engine<Worker> {
        let own = &world.scenario.own;
        let settings = &mut birth.settings;
        let lease = LeaseTime { duration: own.lease };
        settings.mode = own.mode;
        settings.version = own.versions[world.scenario.side(engine)];
        settings.release = match settings.version.leases() && !own.fixed {
            true => BlockRelease::Lease(lease),
            false => BlockRelease::After(lease.duration * 2),
        };
        settings.heartbeat = settings.version.leases().then(|| lease.heartbeat());
        settings.consumers = ConsumerRule::of(settings.version);
        settings.bidirectional = own.bidirectional;
        settings.decoder_ttl = Duration::from_secs(20);
        settings.recompute_threshold = 5;
        settings.push_timeout = Duration::from_secs(15);
        birth.generations = own.generations;
        birth.registration = world.random.within(0..3);
        Engine::new(birth, |settings, rank| Worker::new(settings.clone(), rank))
    }

    fn client(world: &mut World<Self>, number: usize) -> (Self::Client, [RequestId; 2]) {
        let mut name = || format!("cmpl-{number}-0-{:08x}", world.random.word() as u32);
        (None, [name().into(), name().into()])
    }

    fn start(world: &mut World<Self>, number: usize, delay: u64) {
        world.start_leg_after(delay, number, PREFILL);
    }

    fn ask(world: &mut World<Self>, number: usize, leg: usize) -> Asked {
        let params = world.clients[number].own.take();
        if leg != PREFILL {
            return Asked::Nixl(params.map(|params| world.through_the_proxy(number, &params)));
        }
        if world.scenario.own.mode == TransferMode::Push {
            world.push(number);
        }
        Asked::Nixl(Some(params.unwrap_or_else(|| Box::new(TransferParams::ask_prefill()))))
    }

    fn ended(world: &mut World<Self>, number: usize, leg: usize, end: End) -> Result<(), String> {
        world.leg_ended(number, leg, end)
    }

    fn happen(world: &mut World<Self>, event: Event) -> Result<(), String> {
        match event {
            Event::Handshake(at, connection, peer, sent) => {
                world.handshake(at, connection, &peer, sent)
            }
            Event::Words { at, to, id, blocks } => world.words(at, to, id, &blocks),
            Event::WordsBack(at, id, result) => {
                let result =
                    result.as_ref().map(|(pool, words)| (*pool, &words[..])).map_err(Clone::clone);
                world.with(at, |worker, time| worker.generations_read(time, id, result));
            }
            Event::Notice { to, from, bytes } => {
                let note = EngineNotification::decode(&bytes).map_err(|error| error.to_string())?;
                let mut result = Ok(());
                world.with(to, |worker, time| result = worker.notified(time, &from, note));
                return result.map_err(|error| error.to_string());
            }
            Event::Unsent(at, request, rank) => {
                world.with(at, |worker, time| {
                    worker.notification_failed(time, request.as_ref(), rank, "no route")
                });
            }
            Event::Finish(at, request, blocks) => world.finish(at, &request, &blocks),
            Event::Lost(at, connection) => {
                world.with(at, |worker, time| worker.connection_lost(time, connection))
            }
        }
        Ok(())
    }

    fn act(world: &mut World<Self>, at: At, action: Action) {
        match action {
            Action::Handshake { connection, peer, .. } => {
                let delay = world.random.skewed(MILLISECOND..3 * SECOND);
                world.happens_after(delay, Event::Handshake(at, connection, peer, world.now));
            }
            Action::Read(what) => {
                let owner = world.owner_of(at, &what);
                world.take_off(at, what, false, owner);
            }
            Action::Write(what) => {
                let target = what.notification.as_ref().and_then(|bytes| {
                    let text = std::str::from_utf8(bytes).ok()?;
                    Some(RequestId::from(text.rsplit_once(':')?.0))
                });
                world.take_off(at, what, true, target);
            }
            Action::ReadGenerations { id, connection, rank, blocks, .. } => {
                let delay = world.random.skewed(50..200 * MILLISECOND);
                let blocks = blocks
                    .iter()
                    .flat_map(|list| (0..list.len()).map(|place| list.at(place)))
                    .collect();
                let to = world.peer(at, connection, rank);
                world.happens_after(delay, Event::Words { at, to, id, blocks });
            }
            Action::Notify { connection, rank, request, bytes } => {
                world.notify(at, world.peer(at, connection, rank), request, &bytes);
            }
            Action::Register { request, connection, ranks, registration } => {
                let bytes = EngineNotification::Registration(registration).encode().into();
                for rank in ranks {
                    let to = world.peer(at, connection, rank);
                    world.notify(at, to, Some(request.clone()), &bytes);
                }
            }
            Action::Finish { request, lists, .. } => {
                let delay = world.random.skewed(50..SECOND);
                let blocks = lists.local.iter().collect();
                world.happens_after(delay, Event::Finish(at, request, blocks));
            }
            action => world.perform(at, action),
        }
    }

    fn restarted(world: &mut World<Self>, engine: usize) {
        let lost: Vec<_> = world
            .links
            .iter()
            .filter(|(_, link)| link.engine == engine)
            .map(|(key, _)| *key)
            .collect();
        for (at, connection) in lost {
            // Some transports notice.
            if world.random.percent(50) {
                let delay = world.random.skewed(MILLISECOND..10 * SECOND);
                world.happens_after(delay, Event::Lost(at, connection));
            }
        }
    }

    fn moved(world: &mut World<Self>, at: At, to: At, what: &Move) {
        if let Some(bytes) = &what.notification {
            world.notify(at, to, None, bytes);
        }
    }

    fn finishes(&self) -> bool {
        self.finishes
    }

    fn count(&self, summary: &mut Summary) {
        summary.unequal += u32::from(self.versions[0] != self.versions[1]);
    }
}
