//! The decode's side: pulls of blocks from prefills, and their answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::super::action::Action;
use super::super::failure::{FailureKind, LoadFailure, TransferFailure};
use super::super::remote::RemoteEngine;
use super::super::step::Kept;
use super::super::step::{FailedLoad, ReceiveOrder};
use super::super::worker::ranks_to_ask;
use super::action::{MooncakeAction, PullId, QueryId, Unanswered};
use super::worker::MooncakeWorker;
use crate::ids::{BlockLists, EngineId, RequestId};
use crate::time::Time;
use crate::wire::mooncake::{Directory, PullRequest, PullResponse, PullStatus, PulledRequest};

/// A load.
#[derive(Debug)]
pub(super) struct MooncakeLoad {
    pub(super) order: ReceiveOrder,
    pub(super) stage: PullStage,
    /// The reason for the first failure.
    failure: Option<LoadFailure>,
    /// True if the contents are no longer wanted.
    cancelled: bool,
    /// True if the load used remembered addresses, without a query of the bootstrap server.
    pub(super) from_memory: bool,
    /// The answers of the workers that were asked.
    pub(super) answers: BTreeMap<PullId, WorkerAnswer>,
}

/// The answer of one worker.
#[derive(Debug)]
pub(super) struct WorkerAnswer {
    pub(super) said: Said,
    of: PrefillWorker,
}

/// A prefill worker, as the bootstrap server listed it when the pull was sent. The entry may since
/// be gone.
#[derive(Clone, Debug)]
struct PrefillWorker {
    engine: EngineId,
    address: Arc<str>,
    is_kvx: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PullStage {
    /// The load waits for the bootstrap server.
    Waiting,
    /// The decode has sent its pulls to the prefill's workers.
    Asked,
    /// The runtime ends the writes that peers may still make.
    Fencing,
}

/// A worker's answer for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Nothing,
    /// No answer, and the worker has not received the pull.
    Unheard,
    /// The worker has written all its blocks.
    Written,
    /// The worker has failed, and may still write.
    Failed,
    /// The worker has failed, and writes no more.
    Settled,
}

/// A pull sent to one prefill worker.
#[derive(Debug)]
pub(super) struct Pull {
    to: PrefillWorker,
    /// Requests that wait for an answer.
    pub(super) waiting: BTreeSet<RequestId>,
    /// True if the pull also releases blocks. It then continues even if no load waits for it.
    gives_back: bool,
    /// The requests to send again if the worker lacks the layout; `None` if the pull contained it.
    again: Option<Vec<PulledRequest>>,
    deadline: Time,
}

impl MooncakeLoad {
    pub(super) fn is_given_up(&self) -> bool {
        self.failure.is_some() || self.cancelled
    }

    /// Returns whether no peer writes into the blocks any more.
    fn is_settled(&self) -> bool {
        self.answers.values().all(|answer| !matches!(answer.said, Said::Nothing | Said::Failed))
    }

    fn is_written(&self) -> bool {
        self.answers.values().all(|answer| answer.said == Said::Written)
    }

    fn asks(&self) -> PulledRequest {
        PulledRequest {
            request_id: self.order.request.as_str().to_owned(),
            transfer_id: self.order.remote.request.as_str().to_owned(),
            block_ids: self.order.local.groups().iter().map(|group| group.to_vec()).collect(),
        }
    }
}

impl MooncakeWorker {
    /// Starts the loads of one step. Loads from one prefill share their pulls.
    pub(super) fn receive(&mut self, now: Time, orders: Vec<ReceiveOrder>) {
        let mut by_engine: BTreeMap<EngineId, Vec<RequestId>> = BTreeMap::new();
        for order in orders {
            let request = order.request.clone();
            if self.loads.contains_key(&request) {
                continue;
            }
            self.load_deadlines.set(request.clone(), order.deadline);
            by_engine.entry(order.remote.peer.engine.clone()).or_default().push(request.clone());
            let (stage, failure, answers) = (PullStage::Waiting, None, BTreeMap::new());
            let load = MooncakeLoad {
                order,
                stage,
                failure,
                cancelled: false,
                from_memory: false,
                answers,
            };
            self.loads.insert(request, load);
        }
        for (engine, requests) in by_engine {
            if self.mooncake.is_older() {
                self.ask_older(now, &engine, requests);
                continue;
            }
            if self.listings.get(now, &engine).is_some() {
                for request in &requests {
                    self.loads.entry(request.clone()).and_modify(|load| load.from_memory = true);
                }
                self.ask_all(now, &engine, requests);
                continue;
            }
            for request in requests {
                self.query(now, request);
            }
        }
    }

    /// Queries the bootstrap server for a load's prefill, or adds the load to a query in progress.
    pub(super) fn query(&mut self, now: Time, request: RequestId) {
        let Some(load) = self.loads.get(&request) else {
            return debug_assert!(false, "only loads that exist are asked for");
        };
        let (peer, deadline) = (Arc::clone(&load.order.remote.peer), load.order.deadline);
        if let Some(query) = self.listings.wait(&peer, request) {
            let deadline = deadline.min(now + self.mooncake.connect_timeout);
            let address = peer.address.clone();
            self.actions.push_back(MooncakeAction::Query { query, address, deadline });
        }
    }

    /// Sends pulls in the protocol before vLLM 0.16, which needs no query. Each request has its own
    /// pull, because an answer covers the whole pull.
    fn ask_older(&mut self, now: Time, engine: &EngineId, requests: Vec<RequestId>) {
        let Some(load) = requests.first().and_then(|request| self.loads.get(request)) else {
            return debug_assert!(false, "a prefill is asked for at least one load");
        };
        let peer = Arc::clone(&load.order.remote.peer);
        self.listings.forget_idle(now, self.settings.engine_ttl);
        match self.older_listed(now, &peer) {
            Ok(listed) => self.listings.know(engine, listed),
            Err(why) => return self.unreachable(now, &peer, requests, why),
        }
        for request in requests {
            self.ask_all(now, engine, vec![request]);
        }
    }

    /// Handles a bootstrap server's answer, or its failure.
    pub fn queried(&mut self, now: Time, query: QueryId, result: Result<Directory, String>) {
        // Expected race: the worker was shut down.
        let Some(query) = self.listings.take(query) else { return };
        let peer = query.peer;
        let ttl = self.settings.engine_ttl;
        let result = result.and_then(|directory| self.listings.learn(now, &peer, &directory, ttl));
        match result {
            Ok(()) => self.ask_all(now, &peer.engine, query.waiting),
            Err(why) => self.unreachable(now, &peer, query.waiting, why),
        }
    }

    /// Fails loads whose prefill cannot be found.
    fn unreachable(
        &mut self,
        now: Time,
        peer: &RemoteEngine,
        waiting: Vec<RequestId>,
        why: String,
    ) {
        let mut said = TransferFailure::new(FailureKind::QueryFailed, why.clone());
        said.engine = Some(peer.engine.clone());
        said.address = Some(peer.address.clone());
        said.request = waiting.first().cloned();
        self.record(said);
        for request in waiting {
            self.fail_load(&request, LoadFailure::Handshake(why.clone()));
            self.advance(now, &request);
        }
    }

    /// Sends pulls to all workers of a prefill that hold a part of these requests' blocks.
    fn ask_all(&mut self, now: Time, engine: &EngineId, requests: Vec<RequestId>) {
        let waits = |load: &MooncakeLoad| {
            load.stage == PullStage::Waiting && load.order.remote.peer.engine == *engine
        };
        let mut requests = requests;
        requests.retain(|request| self.loads.get(request).is_some_and(waits));
        // Expected race: the loads ended while they waited for the bootstrap server.
        let Some(first) = requests.first().and_then(|request| self.loads.get(request)) else {
            return;
        };
        let peer = Arc::clone(&first.order.remote.peer);
        let workers = match self.workers_of(now, &peer) {
            Ok(workers) => workers,
            Err(why) => return self.unreachable(now, &peer, requests, why),
        };
        let is_kvx = self.listings.is_kvx(engine);
        for requests in requests.chunks(PullRequest::MAX_ITEMS) {
            let loads = || requests.iter().filter_map(|request| self.loads.get(request));
            let asked: Vec<_> = loads().map(MooncakeLoad::asks).collect();
            let latest = loads().map(|load| load.order.deadline).max().unwrap_or(now);
            for address in &workers {
                let worker =
                    PrefillWorker { engine: engine.clone(), address: Arc::clone(address), is_kvx };
                let pull = self.ask(worker.clone(), asked.clone(), latest);
                for request in requests {
                    let Some(load) = self.loads.get_mut(request) else {
                        debug_assert!(false, "a pull is for loads that exist");
                        continue;
                    };
                    load.stage = PullStage::Asked;
                    if !load.order.local.is_empty() {
                        load.answers
                            .insert(pull, WorkerAnswer { said: Said::Nothing, of: worker.clone() });
                        self.pulls.entry(pull).and_modify(|pull| {
                            pull.waiting.insert(request.clone());
                        });
                    }
                }
            }
            for request in requests {
                self.advance(now, request);
            }
        }
    }

    fn workers_of(&mut self, now: Time, peer: &RemoteEngine) -> Result<Vec<Arc<str>>, String> {
        let listed =
            self.listings.get(now, &peer.engine).ok_or("the prefill is no longer listed")?;
        let sized =
            RemoteEngine { tp_size: listed.tp_size, pp_size: listed.pp_size, ..peer.clone() };
        let ranks = ranks_to_ask(&self.settings, self.rank, &sized)?;
        Ok(ranks.iter().filter_map(|rank| listed.workers.get(rank).cloned()).collect())
    }

    /// Sends a pull to one worker. Accepts answers for a while after the last load's deadline,
    /// because they may report that the worker writes no more.
    fn ask(&mut self, worker: PrefillWorker, asked: Vec<PulledRequest>, latest: Time) -> PullId {
        let deadline = latest + self.settings.load_timeout;
        self.last_pull += 1;
        let id = PullId(self.last_pull);
        let brings = self.own.layout_id == 0 || !self.listings.knowing.contains(&worker.address);
        let again = (!brings).then(|| asked.clone());
        let gives_back = asked.iter().any(|asked| asked.block_ids.iter().all(Vec::is_empty));
        self.send(id, &worker, asked, brings, deadline);
        self.pulls
            .insert(id, Pull { to: worker, waiting: BTreeSet::new(), gives_back, again, deadline });
        self.pull_deadlines.set(id, deadline);
        id
    }

    fn send(
        &mut self,
        pull: PullId,
        worker: &PrefillWorker,
        asked: Vec<PulledRequest>,
        brings: bool,
        deadline: Time,
    ) {
        self.actions.push_back(MooncakeAction::Ask {
            pull,
            address: Arc::clone(&worker.address),
            question: self.question(&worker.engine, asked, brings),
            is_kvx: worker.is_kvx,
            deadline,
        });
    }

    fn question(
        &self,
        engine: &EngineId,
        req_blocks: Vec<PulledRequest>,
        brings: bool,
    ) -> Box<PullRequest> {
        let mut question = self.own.clone();
        if !brings {
            question.forget_layout();
        }
        question.req_blocks = req_blocks;
        question.kvx_engine_id = Some(engine.as_str().to_owned());
        Box::new(question)
    }

    /// Handles the answer of a prefill worker. Answers may be long, so the runtime decodes them
    /// before it takes a lock.
    pub fn answered(&mut self, now: Time, pull: PullId, answer: kvx_core::Result<PullResponse>) {
        // Expected race: the pull timed out, or all its loads have ended.
        let Some(asked) = self.pulls.get(&pull) else { return };
        let response = match answer {
            Ok(response) => response,
            Err(error) => {
                return self.unanswered(
                    now,
                    pull,
                    Unanswered { delivered: true, error: error.to_string() },
                );
            }
        };
        if response.layout_id != 0 && response.layout_id == self.own.layout_id {
            self.listings.knowing.insert(Arc::clone(&asked.to.address));
        }
        let why = response.err_msg.unwrap_or_else(|| "the prefill gave no reason".into());
        let settled = response.kvx_settled;
        match response.status {
            PullStatus::LayoutMiss => return self.ask_again(now, pull),
            PullStatus::Error => {
                // Another engine may now have this address, so the next request queries the
                // bootstrap server.
                let engine = asked.to.engine.clone();
                self.listings.forget(&engine);
                return self.all_failed(now, pull, &why, settled);
            }
            PullStatus::Continue | PullStatus::Finish => {}
        }
        let ok = response.ok_reqs.unwrap_or_default().into_iter().map(|request| (request, true));
        let failed =
            response.err_reqs.unwrap_or_default().into_iter().map(|request| (request, false));
        for (request, written) in ok.chain(failed) {
            let request = RequestId::from(request);
            let said = match (written, settled) {
                (true, _) => Said::Written,
                (false, true) => Said::Settled,
                (false, false) => Said::Failed,
            };
            self.said(now, pull, &request, said, &why);
        }
        if response.status == PullStatus::Finish {
            self.all_failed(now, pull, "the prefill did not answer for this request", false);
        }
    }

    fn ask_again(&mut self, now: Time, pull: PullId) {
        let Some(asked) = self.pulls.get_mut(&pull) else {
            return debug_assert!(false, "answered_with looks the pull up");
        };
        let Some(again) = asked.again.take() else {
            return self.all_failed(
                now,
                pull,
                "the prefill asked again for a layout that it had received",
                false,
            );
        };
        let (worker, deadline) = (asked.to.clone(), asked.deadline);
        self.listings.knowing.remove(&worker.address);
        self.send(pull, &worker, again, true, deadline);
    }

    /// Handles the end of a pull that gets no further answer.
    pub fn unanswered(&mut self, now: Time, pull: PullId, how: Unanswered) {
        // Expected race: the pull timed out, or all its loads have ended.
        let Some(asked) = self.pulls.get(&pull) else { return };
        // The next request queries the bootstrap server for the current addresses.
        let engine = asked.to.engine.clone();
        self.listings.forget(&engine);
        match how.delivered {
            true => self.all_failed(now, pull, &how.error, false),
            false => self.unheard(now, pull, &how.error),
        }
    }

    /// Ends a pull, and fails the loads that still wait for it.
    fn all_failed(&mut self, now: Time, pull: PullId, why: &str, settled: bool) {
        // Expected race: all its loads ended with the last answer.
        let Some(asked) = self.pulls.get(&pull) else { return };
        let said = if settled { Said::Settled } else { Said::Failed };
        for request in asked.waiting.clone() {
            self.said(now, pull, &request, said, why);
        }
        self.hang_up(pull);
    }

    pub(super) fn pull_timed_out(&mut self, now: Time, pull: PullId) {
        self.all_failed(now, pull, "the prefill did not answer in time", false);
    }

    pub(super) fn hang_up(&mut self, pull: PullId) {
        if self.pulls.remove(&pull).is_some() {
            self.pull_deadlines.clear(&pull);
            self.actions.push_back(MooncakeAction::Hangup { pull });
        }
    }

    pub(super) fn said(
        &mut self,
        now: Time,
        pull: PullId,
        request: &RequestId,
        said: Said,
        why: &str,
    ) {
        let Some(load) = self.loads.get_mut(request) else {
            // The load has ended, or the prefill names a request that does not exist.
            self.output.unknown_requests += 1;
            return;
        };
        let Some(WorkerAnswer { said: before, .. }) = load.answers.get_mut(&pull) else {
            // The prefill names a request that the pull does not contain.
            self.output.unknown_requests += 1;
            return;
        };
        if matches!(before, Said::Written | Said::Settled) || *before == said {
            return;
        }
        let first = *before == Said::Nothing;
        *before = said;
        let lacks_one = load.answers.values().any(|answer| answer.said == Said::Unheard);
        let why = match said {
            Said::Written => "another worker of the prefill is unreachable",
            _ => why,
        };
        if first && (said != Said::Written || lacks_one) && !load.is_given_up() {
            let mut failure = TransferFailure::new(FailureKind::PullFailed, why);
            let remote = &load.order.remote;
            failure.request = Some(request.clone());
            failure.remote_request = Some(remote.request.clone());
            failure.engine = Some(remote.peer.engine.clone());
            failure.address = Some(remote.peer.address.clone());
            failure.blocks = load.order.local.groups().iter().map(|group| group.len()).collect();
            self.record(failure);
            self.fail_load(request, LoadFailure::Transfer(why.to_owned()));
        }
        self.advance(now, request);
    }

    fn fail_load(&mut self, request: &RequestId, failure: LoadFailure) {
        if let Some(load) = self.loads.get_mut(request) {
            load.failure.get_or_insert(failure);
        }
    }

    /// Finishes a load if no peer writes into its blocks any more.
    fn advance(&mut self, now: Time, request: &RequestId) {
        // Expected race: the load ended while it waited for the bootstrap server.
        let Some(load) = self.loads.get(request) else { return };
        let given_up = load.is_given_up();
        match load.stage {
            PullStage::Waiting if !given_up => {}
            PullStage::Asked if !given_up && !load.is_written() => {}
            PullStage::Fencing if !load.is_settled() => {}
            PullStage::Asked if !load.is_settled() => self.fence(now, request),
            PullStage::Waiting | PullStage::Asked | PullStage::Fencing => self.finish(now, request),
        }
    }

    /// Fences the blocks of a load from all peers that may write into them.
    fn fence(&mut self, now: Time, request: &RequestId) {
        let Some(load) = self.loads.get_mut(request) else {
            return debug_assert!(false, "advance fences loads that exist");
        };
        load.stage = PullStage::Fencing;
        self.actions.push_back(MooncakeAction::Engine(Action::Fence { request: request.clone() }));
        self.let_go(now, request);
    }

    /// Notifies the asked workers that have not written that they may free their blocks.
    fn let_go(&mut self, now: Time, request: &RequestId) {
        let Some(load) = self.loads.get(request) else {
            return debug_assert!(false, "only loads that exist are given up");
        };
        let asked = PulledRequest { block_ids: Vec::new(), ..load.asks() };
        let unwritten = load.answers.values().filter(|answer| answer.said != Said::Written);
        let workers: Vec<_> = unwritten.map(|answer| answer.of.clone()).collect();
        for worker in workers {
            self.ask(worker, vec![asked.clone()], now);
        }
    }

    /// Handles the end of a fence: no peer writes into the blocks of the request any more.
    pub fn fenced(&mut self, now: Time, request: &RequestId) {
        if self.loads.get(request).is_some_and(|load| load.stage == PullStage::Fencing) {
            self.finish(now, request);
        }
    }

    /// Handles a slow fence. A failed load reports its failure now, and the release of its blocks
    /// later.
    pub fn fence_is_slow(&mut self, request: &RequestId) {
        // Expected race: the load has ended or is no longer wanted.
        let Some(load) =
            self.loads.get(request).filter(|load| load.order.awaited && !load.cancelled)
        else {
            return;
        };
        if let (PullStage::Fencing, Some(failure)) = (load.stage, &load.failure) {
            self.output.failing.push((request.clone(), failure.clone()));
        }
    }

    /// Handles a fence that will never be proven to be complete. Returns whether a load waited for
    /// it.
    pub fn fence_forgotten(&mut self, now: Time, request: &RequestId) -> bool {
        let is_fencing =
            self.loads.get(request).is_some_and(|load| load.stage == PullStage::Fencing);
        if is_fencing {
            self.output.lost.push((request.clone(), Kept::Load));
            self.finish(now, request);
        }
        is_fencing
    }

    /// Reports a load, and forgets it.
    fn finish(&mut self, now: Time, request: &RequestId) {
        let told = self.loads.get(request).is_some_and(|load| load.stage == PullStage::Fencing);
        let failed = self.loads.get(request).is_some_and(MooncakeLoad::is_given_up);
        if failed && !told {
            self.let_go(now, request);
        }
        let Some(load) = self.loads.remove(request) else {
            return debug_assert!(false, "each load ends once");
        };
        self.load_deadlines.clear(request);
        for pull in load.answers.keys() {
            // Expected race: the pull ended before its load.
            let Some(asked) = self.pulls.get_mut(pull) else { continue };
            asked.waiting.remove(request);
            if asked.waiting.is_empty() && !asked.gives_back {
                self.hang_up(*pull);
            }
        }
        self.report(load);
    }

    fn report(&mut self, load: MooncakeLoad) {
        if !load.order.awaited {
            return;
        }
        let request = load.order.request;
        self.output.finished_recving.push(request.clone());
        if let Some(failure) = load.failure.filter(|_| !load.cancelled) {
            let invalid = load.order.local.ascending();
            self.output.failed_recving.push(FailedLoad { request, failure, invalid });
        }
    }

    /// Cancels a load, whose blocks the engine wants back.
    pub(super) fn cancel(&mut self, now: Time, request: &RequestId) {
        // Expected race: the load ended before the engine cancelled it.
        let Some(load) = self.loads.get_mut(request).filter(|load| !load.cancelled) else { return };
        load.cancelled = true;
        match load.stage {
            PullStage::Waiting => self.give_back(now, request),
            PullStage::Asked | PullStage::Fencing => self.advance(now, request),
        }
    }

    /// Reports a load that has accessed no block. The worker still notifies the prefill once it
    /// knows its workers.
    fn give_back(&mut self, now: Time, request: &RequestId) {
        let Some(load) = self.loads.get_mut(request) else {
            return debug_assert!(false, "only loads that exist are returned");
        };
        let order =
            ReceiveOrder { local: BlockLists::default(), awaited: false, ..load.order.clone() };
        let rest = MooncakeLoad {
            order,
            stage: PullStage::Waiting,
            failure: None,
            cancelled: true,
            from_memory: false,
            answers: BTreeMap::new(),
        };
        let load = std::mem::replace(load, rest);
        self.load_deadlines.set(request.clone(), now + self.settings.load_timeout);
        self.report(load);
    }

    pub(super) fn load_timed_out(&mut self, now: Time, request: &RequestId) {
        let Some(load) = self.loads.get_mut(request) else {
            return debug_assert!(false, "the deadline of a load ends with it");
        };
        match load.stage {
            PullStage::Waiting if load.order.awaited => {
                load.failure.get_or_insert(LoadFailure::Deadline);
                self.give_back(now, request);
            }
            PullStage::Waiting => {
                self.loads.remove(request);
            }
            PullStage::Asked | PullStage::Fencing => {
                self.fail_load(request, LoadFailure::NotPushed);
                self.advance(now, request);
            }
        }
    }
}
