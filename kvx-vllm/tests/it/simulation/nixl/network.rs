//! The messages between the engines: handshakes, notifications, generation counters.

use std::sync::Arc;

use kvx_vllm::engine::{
    ClockOffset, Connection, HandshakeFailure, Move, MoveId, PeerLane, PeerPlan, RemoteEngine,
    RequestId, WorkerRank,
};
use kvx_vllm::params::TransferMode;

use super::{Event, Nixl};
use crate::simulation::world::{At, DECODE, Link, MILLISECOND, PREFILL, SECOND, World};

impl World<Nixl> {
    pub(super) fn handshake(
        &mut self,
        at: At,
        connection: Connection,
        peer: &RemoteEngine,
        sent: u64,
    ) {
        let found = self.engine_at(&peer.address.host);
        let failed = |error: &str| Err(HandshakeFailure { setup: false, error: error.to_owned() });
        let result = match found {
            _ if !self.lives(at) => return,
            Some(engine) if self.cut(at.engine, engine).is_some() => failed("no answer"),
            Some(_) if self.random.percent(self.scenario.trouble / 5) => failed("no answer"),
            Some(engine) if self.engines[engine].id == peer.engine.as_str() => {
                self.links
                    .insert((at, connection), Link { engine, life: self.engines[engine].life });
                Ok(self.plan(at, engine, sent))
            }
            _ => failed("Remote NIXL agent engine ID mismatch"),
        };
        if result.is_ok() && self.random.percent(self.scenario.trouble / 4) {
            let delay = self.random.skewed(0..20 * SECOND);
            self.happens_after(delay, Event::Lost(at, connection));
        }
        self.with(at, |worker, time| worker.connected(time, connection, result));
    }

    /// Returns the plan between a worker and an engine.
    fn plan(&self, at: At, engine: usize, sent: u64) -> PeerPlan {
        let (own, theirs) =
            (self.engines[at.engine].settings.tp_size, self.engines[engine].settings.tp_size);
        let mine = at.worker as u32;
        let ranks: Vec<u32> = match theirs / own {
            0 => vec![mine * theirs / own],
            each => (mine * each..(mine + 1) * each).collect(),
        };
        let readers = (own / theirs).max(1);
        let nixl = &self.scenario.own;
        let writes = nixl.mode == TransferMode::Push;
        let read = if self.scenario.latent && !writes { &ranks[..1] } else { &ranks[..] };
        let mut plan = PeerPlan::one_to_one(4, self.scenario.blocks).expect("a valid plan");
        let rank = |tp: &u32| WorkerRank { pp: 0, tp: *tp };
        plan.lanes = read.iter().map(|tp| PeerLane::whole(rank(tp), readers)).collect();
        plan.told = ranks[read.len()..].iter().map(|tp| (rank(tp), readers)).collect();
        plan.generations = nixl.generations && !writes;
        plan.finishes = nixl.finishes;
        let clock = self.engines[at.engine].clocks[at.worker];
        let theirs_now = self.engines[engine].clock.at((sent + self.now) / 2).seconds();
        let told = self.engines[at.engine].settings.version.asks_for_pipeline_rank();
        plan.clock =
            ClockOffset::sampled(clock.at(sent), clock.at(self.now), theirs_now).filter(|_| told);
        plan.completions = (theirs / own).max(1);
        plan
    }

    /// Reorders a worker's blocks, or fails to.
    pub(super) fn finish(&mut self, at: At, request: &RequestId, blocks: &[u32]) {
        if !self.lives(at) {
            return;
        }
        let memory = self.memory(at);
        for block in blocks {
            for half in &mut memory.blocks[*block as usize] {
                half.unfinished = false;
            }
        }
        let fails = self.random.percent(self.scenario.trouble / 5);
        let result = if fails { Err("no kernel for that".to_owned()) } else { Ok(()) };
        self.with(at, |worker, time| worker.finished(time, request, result));
    }

    pub(super) fn words(&mut self, at: At, to: At, id: MoveId, blocks: &[u32]) {
        let result = if !self.lives(to) || self.cut(at.engine, to.engine).is_some() {
            Err("the peer is gone".to_owned())
        } else {
            let words = self.memory(to).generations.words();
            let word = |at: usize| words[at].load(std::sync::atomic::Ordering::Acquire);
            Ok((word(0), blocks.iter().map(|block| word(*block as usize + 1)).collect()))
        };
        let delay = self.random.skewed(50..50 * MILLISECOND);
        self.happens_after(delay, Event::WordsBack(at, id, result));
    }

    pub(super) fn notify(&mut self, at: At, to: At, request: Option<RequestId>, bytes: &Arc<[u8]>) {
        if !self.lives(at) {
            return;
        }
        let trouble = self.scenario.trouble;
        let lost = self.random.percent(trouble / 3) || !self.lives(to);
        let cut = self.cut(at.engine, to.engine);
        if lost || (cut.is_some() && self.random.percent(50)) {
            if self.random.percent(50) {
                let rank = WorkerRank { pp: 0, tp: to.worker as u32 };
                self.happens_after(MILLISECOND, Event::Unsent(at, request, rank));
            }
            return;
        }
        let from: Arc<str> = format!("{}/{}.{}", at.engine, at.life, at.worker).into();
        let bytes = if self.scenario.own.crowded && bytes.starts_with(b"HB:") {
            &crowded(bytes)
        } else {
            bytes
        };
        let times = if self.random.percent(trouble / 2) { 2 } else { 1 };
        for _ in 0..times {
            let delay =
                cut.map_or(0, |until| until - self.now) + self.random.skewed(50..2 * SECOND);
            let (from, bytes) = (Arc::clone(&from), Arc::clone(bytes));
            self.happens_after(delay, Event::Notice { to, from, bytes });
        }
    }

    /// Returns the request of a prefill engine whose blocks stay until a read of them has ended.
    pub(super) fn owner_of(&self, at: At, what: &Move) -> Option<RequestId> {
        let to = self.peer(at, what.connection, what.part.rank);
        let first = what.groups.first()?;
        let owner = self.engines[to.engine].pool.owner(first.remote.at(0));
        let owner = owner.filter(|_| self.lives(to))?;
        // A late reader reads blocks that belong to another request by now, so the owner does not
        // wait for it.
        let reader = self.engines[at.engine].pool.owner(first.local.at(0))?;
        let of_reader = self.clients.iter().find(|client| client.legs[DECODE].id == *reader)?;
        (of_reader.legs[PREFILL].id == *owner).then(|| owner.clone())
    }
}

/// Returns a heartbeat that names 5,000 additional requests: vLLM names all waiting requests in
/// one.
fn crowded(bytes: &[u8]) -> Arc<[u8]> {
    let names =
        (0..5_000).map(|other| format!(",cmpl-7f9c2ba4-5d1e-4a3b-9c8d-{other:012}-0-0000abcd"));
    [String::from_utf8_lossy(bytes).into_owned()]
        .into_iter()
        .chain(names)
        .collect::<String>()
        .into_bytes()
        .into()
}
