//! Questions to bootstrap servers and to workers, and what comes back: in order, late, or not at all.

use kvx_connector::engine::mooncake::{AskId, PullId, QueryId, Unanswered};
use kvx_connector::engine::{Time, WorkerRank};
use kvx_connector::wire::mooncake::{Directory, ListedEngine, PullRequest, PullResponse};

use super::{At, Event, MILLISECOND, SECOND, World};

/// The way between a decode's worker that asks and a prefill's that answers.
pub(super) struct Wire {
    from: At,
    pull: PullId,
    to: At,
    ask: Option<AskId>,
    /// Nothing arrives before what was sent before it.
    arrives: (u64, u64),
}

impl World {
    fn port(&self, at: At) -> u32 {
        let life = if self.scenario.same_ports { 0 } else { at.life };
        4000 + 10 * life + at.worker as u32
    }

    /// The bootstrap server of a prefill answers for who lives there now; some workers register late.
    pub(super) fn query(&mut self, at: At, query: QueryId, host: &str) {
        let engine: usize =
            host.strip_prefix("host-").and_then(|engine| engine.parse().ok()).expect("a host");
        let lost = self.cut(at.engine, engine).is_some() || self.random.percent(self.scenario.trouble / 5);
        let result = if lost {
            Err("no answer".to_owned())
        } else {
            let there = &self.engines[engine];
            let mut listed = ListedEngine { engine_id: there.id.clone(), ..ListedEngine::default() };
            for worker in 0..there.workers.len() {
                let port = self.port(At { engine, life: there.life, worker });
                listed
                    .workers
                    .insert(WorkerRank { pp: 0, tp: worker as u32 }, format!("tcp://host-{engine}:{port}"));
            }
            if self.random.percent(self.scenario.trouble / 8) {
                listed.workers.pop_first();
            }
            Directory::decode(&Directory { engines: [(0, listed)].into() }.encode())
                .map_err(|error| error.to_string())
        };
        self.with(at, |worker, time| worker.queried(time, query, result));
    }

    pub(super) fn ask(&mut self, from: At, pull: PullId, address: &str, bytes: Vec<u8>, deadline: Time) {
        let (host, port) =
            address.strip_prefix("tcp://host-").and_then(|at| at.split_once(':')).expect("ours");
        let (engine, port): (usize, u32) = (host.parse().expect("an engine"), port.parse().expect("a port"));
        let wire = match self.by_pull.get(&(from, pull)) {
            Some(wire) => *wire,
            None => {
                let life = self.engines[engine].life;
                let workers =
                    (0..self.engines[engine].workers.len()).map(|worker| At { engine, life, worker });
                let to = workers.into_iter().find(|at| self.port(*at) == port);
                self.sequence += 1;
                let wire = self.sequence;
                self.by_pull.insert((from, pull), wire);
                // Nobody is there: that is known to have been nobody.
                let to_nobody = At { engine, life: u32::MAX, worker: 0 };
                let arrives = (self.now, self.now);
                self.wires.insert(wire, Wire { from, pull, to: to.unwrap_or(to_nobody), ask: None, arrives });
                if to.is_none() {
                    self.after(MILLISECOND, Event::Breaks(wire, false));
                    return;
                }
                let until = self.engines[from.engine].clocks[from.worker].when(deadline, self.now);
                self.after(until - self.now, Event::Breaks(wire, true));
                wire
            }
        };
        let trouble = self.scenario.trouble;
        if self.random.percent(trouble / 4) {
            let delay = self.random.skewed(MILLISECOND..5 * SECOND);
            // Whether it had arrived is not known.
            if self.random.percent(50) {
                return self.after(delay, Event::Breaks(wire, true));
            }
            self.after(delay, Event::Breaks(wire, true));
        }
        let cut = self.cut(from.engine, engine).map_or(0, |until| until - self.now);
        let delay = cut + self.random.skewed(50..2 * SECOND);
        let Some(known) = self.wires.get_mut(&wire) else { return };
        let arrives = (self.now + delay).max(known.arrives.0);
        known.arrives.0 = arrives;
        self.after(arrives - self.now, Event::Question(wire, bytes));
    }

    pub(super) fn question(&mut self, wire: u64, bytes: &[u8]) {
        // A message on its way arrives though its sender has hung up: sometimes.
        let Some(known) = self.wires.get_mut(&wire) else { return };
        let to = known.to;
        self.sequence += 1;
        let ask = AskId(self.sequence);
        known.ask = Some(ask);
        self.by_ask.insert(ask, wire);
        let bytes = match self.scenario.foreign {
            false => bytes.to_vec(),
            true => {
                let mut request = PullRequest::decode(bytes).expect("a question");
                request.kvx_engine_id = None;
                request.encode()
            }
        };
        self.with(to, |worker, time| {
            // Another engine may listen there by now: it says so.
            let _ = worker.asked(time, ask, &bytes);
        });
    }

    pub(super) fn send_answer(&mut self, ask: AskId, bytes: Vec<u8>) {
        let Some(wire) = self.by_ask.get(&ask).copied() else { return };
        let Some((from, to)) = self.wires.get(&wire).map(|wire| (wire.from, wire.to)) else { return };
        let cut = self.cut(from.engine, to.engine).map_or(0, |until| until - self.now);
        let delay = cut + self.random.skewed(50..2 * SECOND);
        let Some(known) = self.wires.get_mut(&wire) else { return };
        let arrives = (self.now + delay).max(known.arrives.1);
        known.arrives.1 = arrives;
        self.after(arrives - self.now, Event::Answer(wire, bytes));
    }

    pub(super) fn answer(&mut self, wire: u64, bytes: &[u8]) {
        let Some((from, pull)) = self.wires.get(&wire).map(|wire| (wire.from, wire.pull)) else { return };
        let bytes = match self.scenario.foreign {
            false => bytes.to_vec(),
            true => {
                let mut response = PullResponse::decode(bytes).expect("an answer");
                response.kvx_settled = false;
                response.encode()
            }
        };
        self.with(from, |worker, time| worker.answered(time, pull, &bytes));
    }

    pub(super) fn breaks(&mut self, wire: u64, delivered: bool) {
        let Some(Wire { from, pull, .. }) = self.wires.remove(&wire) else { return };
        self.by_pull.remove(&(from, pull));
        let how = Unanswered { delivered, error: "the connection broke".into() };
        self.with(from, |worker, time| worker.unanswered(time, pull, how));
    }

    /// The wires of an engine that has died: the other ends notice, by and by.
    pub(super) fn cut_wires(&mut self, engine: usize) {
        self.wires.retain(|_, wire| wire.from.engine != engine);
        self.by_pull.retain(|(at, _), _| at.engine != engine);
        let dead: Vec<_> =
            self.wires.iter().filter(|(_, wire)| wire.to.engine == engine).map(|(wire, _)| *wire).collect();
        for wire in dead {
            let delay = self.random.skewed(MILLISECOND..10 * SECOND);
            self.after(delay, Event::Breaks(wire, true));
        }
    }
}
