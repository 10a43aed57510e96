//! Requests to bootstrap servers and workers, and their answers: in order, late, or lost.

use std::collections::BTreeMap;

use kvx_vllm::engine::mooncake::{AskId, PullId, QueryId, Unanswered};
use kvx_vllm::engine::{Time, WorkerRank};
use kvx_vllm::wire::mooncake::{
    Directory, ListedEngine, OlderAnswer, OlderPullRequest, PullRequest, PullResponse,
};

use super::{Event, Mooncake};
use crate::simulation::world::{At, MILLISECOND, SECOND, World};

/// The connections of all pulls.
#[derive(Default)]
pub(crate) struct Wires {
    wires: BTreeMap<u64, Wire>,
    by_pull: BTreeMap<(At, PullId), u64>,
    by_ask: BTreeMap<AskId, u64>,
}

/// The connection between a requesting decode worker and an answering prefill worker.
struct Wire {
    from: At,
    pull: PullId,
    to: At,
    ask: Option<AskId>,
    /// True for a plain REQ socket before vLLM 0.16, which gets one answer.
    plain: bool,
    answers: u32,
    /// True if a vLLM has reported a failure at once, without waiting for writes in flight.
    told_at_once: bool,
    /// The arrival of the last message in each direction: messages arrive in order.
    arrives: (u64, u64),
}

impl World<Mooncake> {
    pub(super) fn port(&self, at: At) -> u16 {
        let life = if self.scenario.own.same_ports { 0 } else { at.life };
        4000 + 10 * life as u16 + at.worker as u16
    }

    /// Answers for the current incarnation of a prefill engine, as its bootstrap server. Some
    /// workers register late.
    pub(super) fn query(&mut self, at: At, query: QueryId, host: &str) {
        let engine = self.engine_at(host).expect("a host");
        let lost =
            self.cut(at.engine, engine).is_some() || self.random.percent(self.scenario.trouble / 5);
        let result = if lost {
            Err("no answer".to_owned())
        } else {
            let there = &self.engines[engine];
            let mut listed =
                ListedEngine { engine_id: there.id.clone(), ..ListedEngine::default() };
            for worker in 0..there.workers.len() {
                let port = self.port(At { engine, life: there.life, worker });
                listed.workers.insert(
                    WorkerRank { pp: 0, tp: worker as u32 },
                    format!("tcp://host-{engine}:{port}"),
                );
            }
            if self.random.percent(self.scenario.trouble / 8) {
                listed.workers.pop_first();
            }
            Directory::decode(&Directory { engines: [(0, listed)].into() }.encode())
                .map_err(|error| error.to_string())
        };
        self.with(at, |worker, time| worker.queried(time, query, result));
    }

    pub(super) fn ask(
        &mut self,
        from: At,
        pull: PullId,
        address: &str,
        bytes: Vec<u8>,
        (plain, deadline): (bool, Time),
    ) {
        let (host, port) =
            address.strip_prefix("tcp://").and_then(|at| at.split_once(':')).expect("ours");
        let engine = self.engine_at(host).expect("an engine");
        let port: u16 = port.parse().expect("a port");
        let wire = match self.state.by_pull.get(&(from, pull)) {
            Some(wire) => *wire,
            None => {
                let life = self.engines[engine].life;
                let workers = (0..self.engines[engine].workers.len()).map(|worker| At {
                    engine,
                    life,
                    worker,
                });
                let to = workers.into_iter().find(|at| self.port(*at) == port);
                let wire = self.next_number();
                self.state.by_pull.insert((from, pull), wire);
                // No worker listens at this port.
                let to_nobody = At { engine, life: u32::MAX, worker: 0 };
                let arrives = (self.now, self.now);
                let there = to.unwrap_or(to_nobody);
                let known = Wire {
                    from,
                    pull,
                    to: there,
                    ask: None,
                    plain,
                    answers: 0,
                    told_at_once: false,
                    arrives,
                };
                self.state.wires.insert(wire, known);
                if to.is_none() {
                    self.happens_after(MILLISECOND, Event::Breaks(wire, false));
                    return;
                }
                let until = self.engines[from.engine].clocks[from.worker].when(deadline, self.now);
                self.happens_after(until - self.now, Event::Breaks(wire, true));
                wire
            }
        };
        let trouble = self.scenario.trouble;
        if self.random.percent(trouble / 4) {
            let delay = self.random.skewed(MILLISECOND..5 * SECOND);
            // The sender does not know whether the message arrived.
            if self.random.percent(50) {
                return self.happens_after(delay, Event::Breaks(wire, true));
            }
            self.happens_after(delay, Event::Breaks(wire, true));
        }
        let cut = self.cut(from.engine, engine).map_or(0, |until| until - self.now);
        let delay = cut + self.random.skewed(50..2 * SECOND);
        let Some(known) = self.state.wires.get_mut(&wire) else { return };
        let arrives = (self.now + delay).max(known.arrives.0);
        known.arrives.0 = arrives;
        self.happens_after(arrives - self.now, Event::Question(wire, bytes));
    }

    pub(super) fn question(&mut self, wire: u64, bytes: &[u8]) {
        let ask = AskId(self.next_number());
        // A message may arrive after its sender has closed the connection.
        let Some(known) = self.state.wires.get_mut(&wire) else { return };
        let to = known.to;
        known.ask = Some(ask);
        self.state.by_ask.insert(ask, wire);
        if self.scenario.own.older {
            let question = OlderPullRequest::decode(bytes);
            return self.with(to, |worker, time| {
                // It may have another size, or belong to another engine.
                let _ = worker.older_asked(time, ask, question);
            });
        }
        let mut question = PullRequest::decode(bytes).expect("a question");
        if self.scenario.own.foreign {
            question.kvx_engine_id = None;
        }
        self.with(to, |worker, time| {
            // Another engine may listen there by now, and reports it.
            let _ = worker.asked(time, ask, Ok(question));
        });
    }

    pub(super) fn send_answer(&mut self, ask: AskId, bytes: Vec<u8>) {
        let Some(wire) = self.state.by_ask.get(&ask).copied() else { return };
        let Some(&Wire { from, to, told_at_once, .. }) = self.state.wires.get(&wire) else {
            return;
        };
        if told_at_once {
            return;
        }
        let cut = self.cut(from.engine, to.engine).map_or(0, |until| until - self.now);
        let delay = cut + self.random.skewed(50..2 * SECOND);
        let Some(known) = self.state.wires.get_mut(&wire) else { return };
        known.answers += 1;
        assert!(!known.plain || known.answers == 1, "a REQ socket gets a second answer");
        let arrives = (self.now + delay).max(known.arrives.1);
        known.arrives.1 = arrives;
        self.happens_after(arrives - self.now, Event::Answer(wire, bytes));
    }

    /// Reports the failure of a write to a plain agent, which may continue: vLLM reports it and
    /// stops waiting.
    pub(super) fn says_at_once(&mut self, from: At, to: At) {
        let asked = |wire: &&mut Wire| {
            wire.plain && (wire.from, wire.to) == (from, to) && wire.answers == 0
        };
        // Any of them may fail.
        let Some(known) = self.state.wires.values_mut().find(asked) else { return };
        let Some(ask) = known.ask else { return };
        self.send_answer(ask, OlderAnswer::Failed.encode().to_vec());
        if let Some(known) =
            self.state.by_ask.get(&ask).and_then(|wire| self.state.wires.get_mut(wire))
        {
            known.told_at_once = true;
        }
    }

    pub(super) fn answer(&mut self, wire: u64, bytes: &[u8]) {
        let Some(&Wire { from, pull, plain, .. }) = self.state.wires.get(&wire) else { return };
        if plain {
            let answer = OlderAnswer::decode(bytes);
            return self.with(from, |worker, time| worker.older_answered(time, pull, answer));
        }
        let mut response = PullResponse::decode(bytes).expect("an answer");
        if self.scenario.own.foreign && !self.scenario.own.older {
            response.kvx_settled = false;
        }
        self.with(from, |worker, time| worker.answered(time, pull, Ok(response)));
    }

    pub(super) fn breaks(&mut self, wire: u64, delivered: bool) {
        let Some(Wire { from, pull, .. }) = self.state.wires.remove(&wire) else { return };
        self.state.by_pull.remove(&(from, pull));
        let how = Unanswered { delivered, error: "the connection broke".into() };
        self.with(from, |worker, time| worker.unanswered(time, pull, how));
    }

    /// Closes the connection of a pull that waits for no more answers.
    pub(super) fn hang_up(&mut self, at: At, pull: PullId) {
        if let Some(wire) = self.state.by_pull.remove(&(at, pull)) {
            self.state.wires.remove(&wire);
        }
    }

    /// Cuts the connections of a dead engine. The other ends notice some time later.
    pub(super) fn cut_wires(&mut self, engine: usize) {
        self.state.wires.retain(|_, wire| wire.from.engine != engine);
        self.state.by_pull.retain(|(at, _), _| at.engine != engine);
        let dead: Vec<_> = self
            .state
            .wires
            .iter()
            .filter(|(_, wire)| wire.to.engine == engine)
            .map(|(wire, _)| *wire)
            .collect();
        for wire in dead {
            let delay = self.random.skewed(MILLISECOND..10 * SECOND);
            self.happens_after(delay, Event::Breaks(wire, true));
        }
    }
}
