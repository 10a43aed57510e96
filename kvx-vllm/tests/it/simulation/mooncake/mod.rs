//! Engines with the MooncakeConnector: requests and answers, a bootstrap server for each prefill
//! engine, and writes into the decode engine's blocks. Some runs use the protocol before vLLM 0.16,
//! without a bootstrap server, with kvx and with plain agents.

mod clients;
mod wires;

use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::config::Role;
use kvx_vllm::engine::mooncake::{
    self, Bootstrap, MooncakeAction, MooncakeWorker, QueryId, Target,
};
use kvx_vllm::engine::{Connection, HandshakeFailure, PeerLane, PeerPlan, RequestId, WorkerRank};
use kvx_vllm::wire::mooncake::{OlderPullRequest, PullRequest};

use self::clients::Client;
use self::wires::Wires;
use crate::random::Random;
use crate::simulation::engine::{Asked, Birth, End, Engine};
use crate::simulation::world::{
    At, DECODE, Link, MILLISECOND, PREFILL, Protocol, SECOND, Scenario, Summary, World,
};

/// One in this many seeds uses the protocol before vLLM 0.16.
const OLDER: u64 = 4;

/// The time that blocks are held while a plain agent may write to them. After it they are lost.
const MAY_WRITE_FOR: u64 = 60 * SECOND;

/// The scenario's own parts.
#[derive(Debug)]
pub(crate) struct Mooncake {
    /// True for the protocol before vLLM 0.16.
    older: bool,
    /// True if kvx extensions are dropped.
    foreign: bool,
    /// True if decode engines do not name their layouts.
    nameless: bool,
    /// True if a restarted prefill engine listens at the same ports.
    same_ports: bool,
    /// The time that blocks and requests are kept.
    wait: u64,
}

pub(crate) fn drawn(seed: u64) -> World<Mooncake> {
    let mut random = Random(seed);
    let own = Mooncake {
        older: seed % OLDER == OLDER - 1,
        foreign: random.percent(30),
        nameless: random.percent(20),
        same_ports: random.percent(50),
        wait: random.one_of(&[5, 20, 60]) * SECOND,
    };
    let mut scenario = Scenario::drawn(&mut random, own);
    // The protocol requires equal sizes on both sides. Only kvx reports its size, and rejects
    // others.
    if scenario.own.older && (scenario.own.foreign || random.percent(90)) {
        scenario.tp[DECODE] = scenario.tp[PREFILL];
    }
    World::new(scenario, random)
}

#[derive(Debug)]
pub(crate) enum Event {
    /// Ends only the prefill leg.
    PrefillDies(usize),
    Query(At, QueryId, String),
    Question(u64, Vec<u8>),
    Answer(u64, Vec<u8>),
    Breaks(u64, bool),
    Connect(At, Connection, Arc<Target>),
    FenceForgotten(At, RequestId),
}

impl Protocol for Mooncake {
    type Worker = MooncakeWorker;
    type State = Wires;
    type Event = Event;
    type Client = Client;

    fn engine(world: &mut World<Self>, engine: usize, birth: Birth) -> Engine<MooncakeWorker> {
        let prefill = world.scenario.side(engine) == PREFILL;
        let Birth { mut settings, life, .. } = birth;
        let role = if prefill { Role::Producer } else { Role::Consumer };
        let mut mooncake = mooncake::Mooncake::new(role);
        mooncake.wait = Duration::from_micros(world.scenario.own.wait);
        mooncake.connect_timeout = Duration::from_secs(3);
        if world.scenario.own.older {
            // Its first worker listens here.
            mooncake.bootstrap = Bootstrap::Without;
            settings.address.port = world.port(At { engine, life, worker: 0 });
        }
        let settings = settings.with_mooncake(mooncake);
        let layout_id = if world.scenario.own.nameless { 0 } else { world.random.word() >> 1 | 1 };
        Engine::new(Birth { settings, ..birth }, |settings, rank| {
            let (host, port) = (format!("host-{engine}"), 7000 + rank.tp as u16);
            let mut told = PullRequest::new(host, port, settings.tp_size, rank.tp);
            // Each incarnation has different memory addresses.
            told.kv_caches_base_addr = vec![u64::from(life) << 32 | 4096];
            (told.block_lens, told.kv_block_lens, told.layout_id) = (vec![64], vec![64], layout_id);
            MooncakeWorker::new(settings.clone(), rank, told)
                .expect("a MooncakeConnector's settings")
        })
    }

    fn client(world: &mut World<Self>, number: usize) -> (Client, [RequestId; 2]) {
        Client::drawn(&world.scenario, &mut world.random, number)
    }

    fn start(world: &mut World<Self>, number: usize, delay: u64) {
        let client = &world.clients[number];
        let lifetime = client.deadline - world.now - delay;
        let waits = client.own.waits_for_the_prefill();
        if world.random.percent(5 + world.scenario.trouble) {
            let life = world.random.skewed(0..lifetime);
            world.happens_after(delay + life, Event::PrefillDies(number));
        }
        for leg in [Some(PREFILL), (!waits).then_some(DECODE)].into_iter().flatten() {
            let late = world.random.skewed(0..2 * SECOND);
            world.start_leg_after(delay + late, number, leg);
        }
    }

    fn ask(world: &mut World<Self>, number: usize, leg: usize) -> Asked {
        world.params(number, leg)
    }

    fn ended(world: &mut World<Self>, number: usize, leg: usize, end: End) -> Result<(), String> {
        if leg == PREFILL {
            world.prefill_ended(number, end)
        } else {
            world.decode_ended(number, &end)
        }
    }

    fn happen(world: &mut World<Self>, event: Event) -> Result<(), String> {
        match event {
            Event::PrefillDies(client) => return world.prefill_dies(client),
            Event::Query(at, query, host) => world.query(at, query, &host),
            Event::Question(wire, bytes) => world.question(wire, &bytes),
            Event::Answer(wire, bytes) => world.answer(wire, &bytes),
            Event::Breaks(wire, delivered) => world.breaks(wire, delivered),
            Event::Connect(at, connection, target) => world.connect(at, connection, &target),
            Event::FenceForgotten(at, request) => world.fence_forgotten(at, &request),
        }
        Ok(())
    }

    fn act(world: &mut World<Self>, at: At, action: MooncakeAction) {
        match action {
            MooncakeAction::Query { query, address, .. } => {
                let delay = world.random.skewed(MILLISECOND..2 * SECOND);
                world.happens_after(delay, Event::Query(at, query, address.host.to_string()));
            }
            MooncakeAction::Ask { pull, address, question, is_kvx, deadline } => {
                let plain = world.scenario.own.older && !is_kvx;
                let bytes = match world.scenario.own.older {
                    false => question.encode(),
                    true if is_kvx => OlderPullRequest::to_kvx(&question).encode(),
                    true => OlderPullRequest::plain(&question).expect("one group").encode(),
                };
                world.ask(at, pull, &address, bytes, (plain, deadline));
            }
            MooncakeAction::Hangup { pull } => world.hang_up(at, pull),
            MooncakeAction::Answer { ask, bytes } => world.send_answer(ask, bytes),
            MooncakeAction::Connect { connection, target } => {
                let delay = world.random.skewed(MILLISECOND..SECOND);
                world.happens_after(delay, Event::Connect(at, connection, target));
            }
            MooncakeAction::Write { what, theirs } => world.take_off(at, what, true, Some(theirs)),
            MooncakeAction::Engine(action) => world.perform(at, action),
        }
    }

    fn restarted(world: &mut World<Self>, engine: usize) {
        world.cut_wires(engine);
    }

    fn unsettled(world: &mut World<Self>, at: At, to: At) {
        world.says_at_once(to, at);
    }

    /// Returns false for a plain agent, which has no fence, and sometimes because a fence cannot be
    /// proven.
    fn fences(world: &mut World<Self>, at: At, request: &RequestId) -> bool {
        if world.asks_plainly(request) {
            world.with(at, |worker, _| worker.fence_is_slow(request));
            world.happens_after(MAY_WRITE_FOR, Event::FenceForgotten(at, request.clone()));
            return false;
        }
        let proven = !world.random.percent(world.scenario.trouble / 5);
        if !proven {
            world.fence_forgotten(at, request);
        }
        proven
    }

    fn count(&self, summary: &mut Summary) {
        summary.older = if self.older { summary.loaded } else { 0 };
    }
}

impl World<Mooncake> {
    /// Connects a prefill worker to the memory that a decode worker has described.
    fn connect(&mut self, at: At, connection: Connection, target: &Target) {
        let told = &target.told;
        let engine = self.engine_at(&told.remote_hostname).expect("only decodes ask");
        let life = (told.kv_caches_base_addr[0] >> 32) as u32;
        let to = At { engine, life, worker: told.remote_tp_rank as usize };
        let unreachable = !self.lives(to) || self.random.percent(self.scenario.trouble / 5);
        let result = match unreachable || self.cut(at.engine, engine).is_some() {
            true => Err(HandshakeFailure { setup: false, error: "no way to its memory".into() }),
            false => {
                self.links.insert((at, connection), Link { engine, life });
                let mut plan = PeerPlan::one_to_one(4, self.scenario.blocks).expect("a valid plan");
                let rank = WorkerRank { pp: 0, tp: told.remote_tp_rank };
                // Of the replicas of a latent, only one sends.
                let [own, theirs] = self.scenario.tp;
                let sends = !self.scenario.latent || own <= theirs || at.worker.is_multiple_of(2);
                plan.lanes = if sends { vec![PeerLane::whole(rank, 1)] } else { Vec::new() };
                Ok(plan)
            }
        };
        self.with(at, |worker, time| worker.connected(time, connection, result));
    }

    fn fence_forgotten(&mut self, at: At, request: &RequestId) {
        self.with(at, |worker, time| {
            worker.fence_forgotten(time, request);
        });
    }
}
