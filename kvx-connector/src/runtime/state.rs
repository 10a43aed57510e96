//! The state of one connector, under one lock: the scheduler, the workers and their work in
//! progress. The lock is held for decisions only, and never while anything is waited for.

use std::collections::BTreeSet;
use std::task::Waker;

use kvx_core::backend::Ticket;
use kvx_core::{Agent, Deadline, Error, ErrorKind, Result};
use tracing::Span;

use super::grants::Grants;
use super::group::{Gathering, HeadHandle, RemoteRank};
use super::metrics::Report;
use super::outcomes::{Outcomes, Released};
use super::publication::Publication;
use super::ranks::Ranks;
use super::ranks::WorkerAction;
use super::saves::SaveNumbers;
use super::setup::Setup;
use super::trace::Traces;
use kvx_vllm::engine::{
    BlockLists, ConnectorMeta, FailureKind, Kept, Outcome, OutputAggregator, RequestId, Scheduler,
    Time, WorkerRank,
};
use kvx_vllm::group::ToHead;
use kvx_vllm::params::TransferParams;

/// The progress of a connector's shutdown.
#[derive(Default)]
pub(super) struct Shutdown {
    deadline: Option<Deadline>,
    begun: bool,
    tickets: Vec<Ticket>,
    /// The result, once the thread ends. `Ok`: nothing touches any block any more.
    result: Option<Result<()>>,
}

impl Shutdown {
    /// Requests the shutdown. The first deadline counts.
    pub(super) fn request(&mut self, deadline: Deadline) {
        self.deadline.get_or_insert(deadline);
    }

    /// Returns whether the shutdown was requested.
    pub(super) fn is_requested(&self) -> bool {
        self.deadline.is_some()
    }

    /// Starts the shutdown, once. Returns `None` if it was not requested or has started.
    pub(super) fn begin(&mut self) -> Option<Deadline> {
        let deadline = self.deadline.filter(|_| !self.begun)?;
        self.begun = true;
        Some(deadline)
    }

    /// Settles a ticket with the end of the shutdown. Errors: the ticket and its result, if there
    /// is nothing to wait for.
    pub(super) fn settle_with(&mut self, ticket: Ticket) -> Result<(), (Ticket, Result<()>)> {
        match &self.result {
            None if self.is_requested() => {
                self.tickets.push(ticket);
                Ok(())
            }
            result => Err((ticket, result.clone().unwrap_or(Ok(())))),
        }
    }

    /// Returns the result of the shutdown, if it has ended.
    pub(super) fn result(&self) -> Option<&Result<()>> {
        self.result.as_ref()
    }

    fn end(&mut self, result: Result<()>) -> Vec<Ticket> {
        self.result = Some(result);
        std::mem::take(&mut self.tickets)
    }
}

pub(super) struct State {
    pub(super) scheduler: Scheduler,
    pub(super) aggregator: OutputAggregator,
    pub(super) ranks: Ranks,
    pub(super) publication: Publication,
    pub(super) outcomes: Outcomes,
    pub(super) grants: Grants,
    pub(super) saves: SaveNumbers,
    /// The gathering at which ranks in processes of their own join.
    pub(super) gathering: Option<Gathering>,
    /// The engine of this rank, if it is in another process.
    pub(super) head: Option<HeadHandle>,
    pub(super) shutdown: Shutdown,
    /// Registrations of loads that some worker has not started yet.
    deferred: Vec<(WorkerRank, WorkerAction, Span)>,
    /// Agents whose notifications no task receives yet.
    pub(super) new_agents: Vec<(WorkerRank, Agent)>,
    pub(super) traces: Traces,
    /// Hosts of engines that do not sign and that the log has named: at most those in
    /// `allow_unsigned_params`.
    unsigned: BTreeSet<String>,
}

/// The part of a connector's end that runs without the lock.
pub(super) struct ConnectorEnd {
    pub(super) wakers: Vec<Waker>,
    pub(super) tickets: Vec<Ticket>,
    pub(super) gathering: Option<Gathering>,
}

/// The workers' reports, for the part of a turn that runs without the lock.
#[derive(Default)]
pub(super) struct CollectedReports {
    /// True if the engine has new outcomes.
    pub(super) has_news: bool,
    pub(super) wakers: Vec<Waker>,
    pub(super) report: Report,
}

impl State {
    pub(super) fn new(setup: &Setup, ranks: Ranks) -> Self {
        let settings = &setup.settings;
        State {
            scheduler: Scheduler::new(settings.clone()),
            aggregator: OutputAggregator::new(ranks.len()),
            ranks,
            publication: Publication::default(),
            outcomes: Outcomes::default(),
            grants: Grants::default(),
            saves: SaveNumbers::default(),
            gathering: None,
            head: None,
            shutdown: Shutdown::default(),
            deferred: Vec::new(),
            new_agents: Vec::new(),
            traces: Traces::default(),
            unsigned: BTreeSet::new(),
        }
    }

    /// Returns whether a shutdown was requested.
    pub(super) fn is_closing(&self) -> bool {
        self.shutdown.is_requested()
    }

    /// Returns whether a load is in progress and still wanted. In the process of a rank, on that
    /// rank.
    pub(super) fn is_loading(&self, request: &RequestId) -> bool {
        match self.head {
            None => self.scheduler.is_loading(request),
            Some(_) => self.ranks.is_loading(request),
        }
    }

    /// Returns whether the engine has outcomes to take, or the connector has ended.
    pub(super) fn has_news(&self) -> bool {
        self.outcomes.queued() > 0 || self.shutdown.result().is_some()
    }

    /// Returns whether no request is known and no blocks are kept.
    pub(super) fn is_idle(&self) -> bool {
        self.scheduler.is_empty()
            && self.aggregator.incomplete() == 0
            && !self.publication.has_delayed()
    }

    /// Returns whether another rank has caches or is about to register some. All ranks share the
    /// same generations.
    pub(super) fn others_have_caches(&self, rank: WorkerRank) -> bool {
        self.publication.published.is_some() && self.ranks.others_have_caches(rank)
    }

    /// Checks that blocks are in the registered caches.
    pub(super) fn check_blocks(&self, blocks: &BlockLists, groups: usize) -> Result<()> {
        let mut remote = self.ranks.remote().map(|(_, remote)| remote);
        if let Some(why) =
            remote.clone().filter(|remote| !remote.has_given_back()).find_map(RemoteRank::missing)
        {
            return Err(
                ErrorKind::PeerLost.because(format!("a rank of this engine is missing: {why}"))
            );
        }
        if let Some(why) = remote.find_map(RemoteRank::missing) {
            return Err(
                ErrorKind::Invalid.because(format!("{why}: call JoinedRank::register there"))
            );
        }
        let Some(pool) = &self.publication.pool else {
            return Err(
                ErrorKind::Invalid.because("no caches are registered: call Rank::register first")
            );
        };
        if blocks.groups().len() != groups {
            return Err(ErrorKind::Invalid.because(format!(
                "{} lists of blocks, and the connector was built for {groups} KV cache groups: \
                 give a list for each, or call ConnectorBuilder::groups",
                blocks.groups().len()
            )));
        }
        for (group, list) in blocks.groups().iter().enumerate() {
            let count = pool.of_group(group);
            if let Some(beyond) = list.iter().find(|block| **block >= count) {
                return Err(ErrorKind::OutOfBounds.because(format!(
                    "block {beyond} of KV cache group {group}: the registered caches have \
                     {count} blocks"
                )));
            }
        }
        Ok(())
    }

    /// Records that parameters of a host are used although they are not signed. Returns the host
    /// the first time.
    pub(super) fn note_unsigned(
        &mut self,
        params: &TransferParams,
        setup: &Setup,
    ) -> Option<String> {
        let trust = &setup.settings.trust;
        let names_blocks = params.remote_block_ids.is_some();
        let unsigned = trust.has_secret() && names_blocks && params.kvx_signature.is_none();
        let host = params.remote_host.clone();
        let host = host.filter(|host| unsigned && trust.allows_unsigned(host))?;
        self.unsigned.insert(host.clone()).then_some(host)
    }

    /// Gives all workers what the scheduler has ready for them, for one request or for all. Returns
    /// whether there was anything.
    pub(super) fn pass_on_ready(&mut self, now: Time, request: Option<&RequestId>) -> bool {
        let meta = self.scheduler.take_ready(now, request);
        if meta.is_empty() {
            return false;
        }
        self.trace_orders(now, &meta);
        self.ranks.pass_on(now, &meta);
        true
    }

    /// Records in the spans of loads that the workers have their orders.
    pub(super) fn trace_orders(&mut self, now: Time, meta: &ConnectorMeta) {
        meta.receive.iter().for_each(|order| self.traces.ordered(now, &order.request));
    }

    /// Takes the workers' reports through the scheduler to their receivers.
    pub(super) fn collect(&mut self, now: Time) -> CollectedReports {
        let mut outputs = self.ranks.take_outputs(now);
        let mut collected = CollectedReports::default();
        if let Some(head) = &self.head {
            for (_, mut output) in outputs {
                collected.report.unknown_requests += std::mem::take(&mut output.unknown_requests);
                if output.is_empty() {
                    continue;
                }
                output.finished_recving.iter().for_each(|request| self.grants.end(request));
                head.send(ToHead::Output(Box::new(output)));
            }
            return collected;
        }
        for (_, output) in &mut outputs {
            // Expected race: a worker reports blocks that were taken back in the meantime.
            output.finished_sending.retain(|request| self.scheduler.is_sending(request));
        }
        let mut output = self.aggregator.add(outputs);
        let mut failures = std::mem::take(&mut output.failures);
        failures.retain(|failure| {
            // Each worker reports it. Expected race: the lease was taken back in the meantime.
            let is_new =
                |request| self.scheduler.is_sending(request) && self.outcomes.expire(request);
            failure.kind != FailureKind::LeaseExpired
                || failure.request.as_ref().is_some_and(is_new)
        });
        let stats = std::mem::take(&mut output.stats);
        let unknown_requests = output.unknown_requests;
        let mut outcomes = self.scheduler.update_connector_output(now, output);
        outcomes.extend(self.scheduler.poll(now));
        let (held, lost) = (self.scheduler.blocks_held(), self.scheduler.blocks_lost());
        collected.report = Report { failures, stats, unknown_requests, held, lost };
        let before = self.outcomes.queued();
        let wakers = outcomes.into_iter().filter_map(|outcome| self.deliver(outcome));
        collected.wakers = wakers.collect();
        for outcome in self.publication.take_raised(&self.ranks) {
            collected.wakers.extend(self.outcomes.deliver(outcome));
        }
        collected.has_news = self.outcomes.queued() > before;
        collected
    }

    /// Delivers an outcome, or delays it until ranks on other hosts know of it. Returns the task to
    /// wake.
    pub(super) fn deliver(&mut self, outcome: Outcome) -> Option<Waker> {
        self.traces.outcome(&outcome);
        if let Some(request) = outcome.ends_load() {
            self.grants.end(request);
        }
        if let Outcome::Free { request, kept: Kept::Request }
        | Outcome::Lost { request, kept: Kept::Request } = &outcome
        {
            self.publication.release(request, &mut self.ranks);
        }
        let outcome = self.publication.delay(outcome, &self.ranks)?;
        self.outcomes.deliver(outcome)
    }

    /// Adds requests of workers, and takes those that are due. A registration is not due before all
    /// workers have started its load, because a push may write to all of them.
    pub(super) fn defer_early(
        &mut self,
        actions: Vec<(WorkerRank, WorkerAction, Span)>,
    ) -> Vec<(WorkerRank, WorkerAction, Span)> {
        use kvx_vllm::engine::Action;
        let ranks = &self.ranks;
        let early = |(_, action, _): &(WorkerRank, WorkerAction, Span)| match action {
            WorkerAction::Engine(Action::Register { request, .. }) => ranks.is_pending(request),
            _ => false,
        };
        let all = std::mem::take(&mut self.deferred).into_iter().chain(actions);
        let (early, due) = all.partition(early);
        self.deferred = early;
        due
    }

    /// Ends everything. `result` is `Ok` if nothing touches any block any more.
    pub(super) fn end(&mut self, result: &Result<()>) -> ConnectorEnd {
        let proven = result.is_ok();
        self.outcomes.close();
        let outcomes = self.scheduler.end(proven);
        let mut wakers: Vec<_> =
            outcomes.into_iter().filter_map(|outcome| self.deliver(outcome)).collect();
        for outcome in self.publication.end(proven) {
            wakers.extend(self.outcomes.deliver(outcome));
        }
        wakers.extend(self.outcomes.end(if proven { Released::Free } else { Released::Lost }));
        let tickets = self.shutdown.end(result.clone());
        ConnectorEnd { wakers, tickets, gathering: self.gathering.take() }
    }
}

/// Returns the error of every call after a shutdown.
pub(super) fn closed() -> Error {
    ErrorKind::Closed.because("the connector was shut down: build a new one")
}
