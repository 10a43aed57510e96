//! The prefill's side: the pulls of decodes, and the writes that serve them.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};

use super::super::action::{Action, Connection, Move, MoveId, MoveLists};
use super::super::failure::{FailureKind, MoveFailure, TransferFailure};
use super::super::peers::Reach;
use super::super::plan::{PeerPlan, pair_push};
use super::super::stats::Transferred;
use super::super::step::Kept;
use super::action::{AskId, MooncakeAction};
use super::ask::{AnswerForm, Ask};
use super::layouts::{DecodeWorker, Found, Target};
use super::worker::MooncakeWorker;
use crate::ids::{BlockLists, EngineId, RequestId};
use crate::mapping::{Tp, handshake_ranks};
use crate::time::Time;
use crate::wire::PushGrant;
use crate::wire::mooncake::{PullRequest, PullResponse, PullStatus, PulledRequest};

/// The maximum number of waiting requests for blocks. It bounds what peers can make this engine
/// store.
const MAX_SERVES: usize = 65_536;
/// The maximum size of the waiting requests in bytes.
const MAX_BYTES: usize = 64 << 20;
/// The maximum time for which a write continues after its blocks have expired. The bound matters if
/// the decode hangs.
const LAST_WRITE: Duration = Duration::from_secs(1);

/// The identifier of one request of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ServeId(u64);

/// The decode worker that sent a pull.
#[derive(Clone, Debug)]
struct Asker {
    ask: AskId,
    reader: DecodeWorker,
    /// The number of decode workers that read from this worker.
    readers: usize,
    /// The memory to write into; `None` if the pull only releases blocks.
    target: Option<Arc<Target>>,
}

/// A request for blocks, or a release of blocks.
#[derive(Debug)]
pub(super) struct Serve {
    asker: Asker,
    /// The decode's name of the request.
    theirs: RequestId,
    /// The name of the transfer.
    name: RequestId,
    /// The decode's blocks. Empty if it releases the transfer.
    blocks: BlockLists,
    /// The decode's grant for the writes, if it is a kvx decode.
    grant: Vec<Vec<u8>>,
    connection: Option<Connection>,
    /// The number of writes that may still read local blocks and write remote ones.
    unsettled: usize,
    /// The local request whose blocks are being written. Another request may have the transfer's
    /// name later.
    writing: Option<RequestId>,
    /// True if the request has failed and the decode has received the reason.
    failed: bool,
}

impl Serve {
    /// Changes the name of its transfer.
    pub(super) fn rename(&mut self, name: RequestId, bytes: &mut usize) {
        *bytes -= self.bytes();
        self.name = name;
        *bytes += self.bytes();
    }

    /// Returns the approximate size in bytes.
    fn bytes(&self) -> usize {
        let names = self.theirs.as_str().len() + self.name.as_str().len();
        let grant: usize =
            self.grant.iter().map(|region| size_of::<Vec<u8>>() + region.len()).sum();
        size_of::<Self>()
            + names
            + grant
            + self.blocks.len() * size_of::<u32>()
            + size_of_val(self.blocks.groups())
    }
}

/// A write in flight.
#[derive(Debug)]
pub(super) struct Write {
    serve: ServeId,
    resolved: bool,
}

impl MooncakeWorker {
    /// Adds a local request that a decode will ask for by `name`.
    pub(super) fn named(&mut self, request: RequestId, name: RequestId) {
        if self.mooncake.is_older() {
            self.known_as(&name);
        }
        if !self.transfers.add(request.clone(), name.clone()) {
            let why = format!(
                "two requests have the transfer_id {name}; the blocks of the second are not sent"
            );
            let said = TransferFailure {
                request: Some(request),
                ..TransferFailure::new(FailureKind::SendFailed, why)
            };
            self.record(said);
        }
    }

    /// Handles a request that ended without blocks for a decode, or whose blocks were revoked.
    /// Decodes that ask for it receive the reason.
    pub(super) fn dropped(&mut self, now: Time, request: &RequestId) {
        // Its transfer has ended, or another request had the name first.
        let Some(name) = self.transfers.name_of(request).cloned() else { return };
        let why = "the prefill has ended without the blocks of that transfer";
        self.transfers.end(now, &name, why);
        for serve in self.asked_for.get(&name).cloned().unwrap_or_default() {
            self.fail_serve(now, serve, why);
        }
    }

    /// Handles a request whose blocks are computed.
    pub(super) fn ready(&mut self, now: Time, request: RequestId, blocks: BlockLists, until: Time) {
        let Some(name) = self.transfers.ready(&request, blocks, until) else {
            return self.output.finished_sending.push(request);
        };
        for serve in self.asked_for.get(&name).cloned().unwrap_or_default() {
            self.begin(now, serve);
        }
    }

    pub(super) fn expired(&mut self, now: Time, name: &RequestId) {
        self.output.stats.record_expired();
        self.settle(now, name);
    }

    fn settle(&mut self, now: Time, name: &RequestId) {
        let is_late = self.transfers.is_expired(name);
        if let Some(request) = self.transfers.settle(now, name) {
            if is_late {
                let setting = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT";
                self.output.failures.push(TransferFailure::lease_expired(&request, setting));
            }
            self.output.finished_sending.push(request);
        }
    }

    /// Handles a pull from a decode worker, in which it asks for blocks or releases them. The
    /// runtime answers by `ask`. Pulls may be long, so the runtime decodes them before it takes a
    /// lock.
    ///
    /// # Errors
    ///
    /// Fails if the pull is invalid. The decode gets an answer; the caller should log the error.
    pub fn asked(&mut self, now: Time, ask: AskId, question: Result<PullRequest>) -> Result<()> {
        self.asked_in(now, ask, question, AnswerForm::Each)
    }

    pub(super) fn asked_in(
        &mut self,
        now: Time,
        ask: AskId,
        question: Result<PullRequest>,
        form: AnswerForm,
    ) -> Result<()> {
        let result = question.and_then(|request| self.checked(request));
        let (request, readers) = match result {
            Ok(checked) => checked,
            Err(error) => return self.refuse(ask, form, error),
        };
        let wants = request
            .req_blocks
            .iter()
            .any(|wanted| wanted.block_ids.iter().any(|ids| !ids.is_empty()));
        let (target, replaced) = match self.layouts.find(&request) {
            Found::Known(target) => (Some(target), None),
            Found::New(target, replaced) => (Some(target), replaced),
            Found::Missing if wants => {
                self.answer(ask, form, &PullResponse::new(PullStatus::LayoutMiss));
                return Ok(());
            }
            Found::Full if wants => {
                let why = "the memory layouts of waiting decodes take too much memory; retry later";
                return self.refuse(ask, form, ErrorKind::Exhausted.because(why));
            }
            Found::Missing | Found::Full => (None, None),
        };
        if let Some(replaced) = replaced {
            self.forget_target(now, replaced.id());
        }
        let reader = DecodeWorker::of(&request);
        let open = Ask {
            left: request
                .req_blocks
                .iter()
                .map(|wanted| wanted.request_id.as_str().into())
                .collect(),
            layout_id: if target.is_some() { request.layout_id } else { 0 },
            hears_of_the_end: request.kvx_engine_id.is_some()
                || matches!(form, AnswerForm::Older { .. }),
            form,
        };
        if open.left.is_empty() {
            let mut nothing = PullResponse::new(PullStatus::Finish);
            nothing.layout_id = open.layout_id;
            self.answer(ask, form, &nothing);
            return Ok(());
        }
        self.asks.insert(ask, open);
        let asker = Asker { ask, reader, readers, target };
        let mut grants = request.kvx_grants;
        for wanted in request.req_blocks {
            let grant = grants.remove(&wanted.request_id).unwrap_or_default();
            self.serve(now, &asker, wanted, grant);
        }
        Ok(())
    }

    /// Answers a pull with an error, and returns the error for the log.
    fn refuse(&mut self, ask: AskId, form: AnswerForm, error: Error) -> Result<()> {
        let mut response = PullResponse::new(PullStatus::Error);
        response.err_msg = Some(error.to_string());
        response.kvx_settled = true;
        self.answer(ask, form, &response);
        Err(error)
    }

    /// Rejects invalid pulls. Returns how many workers read from this one.
    fn checked(&self, request: PullRequest) -> Result<(PullRequest, usize)> {
        if let Some(engine) = request
            .kvx_engine_id
            .as_ref()
            .filter(|engine| **engine != *self.settings.engine.as_str())
        {
            return Err(ErrorKind::PeerRestarted.because(format!(
                "the pull is for engine {engine}, but this is engine {}: query the bootstrap \
                 server again",
                self.settings.engine
            )));
        }
        let own = Tp::new(self.rank.tp, self.settings.tp_size)?;
        let readers = handshake_ranks(own, request.remote_tp_size, 1)?;
        if !readers.contains(&request.remote_tp_rank)
            || request.remote_pp_size > crate::ids::MAX_RANKS
        {
            return Err(ErrorKind::Invalid.because(format!(
                "decode rank {} of {} with {} pipeline stages must not pull from prefill rank {} \
                 of {}",
                request.remote_tp_rank,
                request.remote_tp_size,
                request.remote_pp_size,
                self.rank.tp,
                self.settings.tp_size
            )));
        }
        let readers = readers.len() * request.remote_pp_size as usize;
        Ok((request, readers))
    }

    /// Fails the requests of a decode worker that has restarted, and ends writes for its
    /// previous layout.
    fn forget_target(&mut self, now: Time, id: &EngineId) {
        let of = |serve: &&ServeId| {
            let target = self.serves.get(serve).and_then(|serve| serve.asker.target.as_ref());
            target.is_some_and(|target| target.id() == id)
        };
        let old: Vec<_> = self.serves.keys().filter(of).copied().collect();
        for serve in old {
            self.fail_serve(now, serve, "the decode's worker has since sent another memory layout");
        }
    }

    fn serve(&mut self, now: Time, asker: &Asker, wanted: PulledRequest, grant: Vec<Vec<u8>>) {
        self.last_serve += 1;
        let id = ServeId(self.last_serve);
        let serve = Serve {
            asker: asker.clone(),
            theirs: wanted.request_id.into(),
            name: wanted.transfer_id.into(),
            blocks: BlockLists::new(wanted.block_ids),
            grant,
            connection: None,
            unsettled: 0,
            writing: None,
            failed: false,
        };
        let (name, lets_go) = (serve.name.clone(), serve.blocks.is_empty());
        let others = self.asked_for.get(&name).cloned().unwrap_or_default();
        let same: Vec<_> = others
            .into_iter()
            .filter(|other| self.serves[other].asker.reader == asker.reader)
            .collect();
        let refused = match self.transfers.over(&name) {
            Some(why) if !lets_go => Some(why.to_owned()),
            _ if !lets_go && !same.is_empty() => {
                Some("the same worker has already asked for that transfer".into())
            }
            _ if self.serves.len() >= MAX_SERVES
                || self.serve_bytes + serve.bytes() > MAX_BYTES =>
            {
                Some(format!(
                    "{} requests for blocks with {} bytes already wait here; retry later",
                    self.serves.len(),
                    self.serve_bytes
                ))
            }
            _ => None,
        };
        self.serve_bytes += serve.bytes();
        self.serve_deadlines.set(id, now + self.mooncake.wait);
        self.asked_for.entry(name.clone()).or_default().push(id);
        self.serves.insert(id, serve);
        if let Some(why) = refused {
            return self.fail_serve(now, id, &why);
        }
        if lets_go {
            for other in same {
                self.fail_serve(now, other, "the decode has released that transfer");
            }
        }
        let over = self.transfers.over(&name).is_some();
        if over || self.transfers.get(&name).is_some_and(|transfer| transfer.ready.is_some()) {
            self.begin(now, id);
        }
    }

    /// Writes the blocks of a request, which are ready, or waits for the description of the
    /// decode's memory.
    pub(super) fn begin(&mut self, now: Time, id: ServeId) {
        // Expected race: it failed while it waited for the connection, or is written already.
        let Some(serve) =
            self.serves.get(&id).filter(|serve| serve.writing.is_none() && !serve.failed)
        else {
            return;
        };
        let name = serve.name.clone();
        if serve.blocks.is_empty() {
            return self.serve_over(now, id, true);
        }
        let reader = &serve.asker.reader;
        let Some(transfer) = self.transfers.get(&name).filter(|transfer| !transfer.expired) else {
            return self.fail_serve(now, id, "the blocks of that transfer were freed");
        };
        if transfer.has_had(reader) {
            return self.fail_serve(
                now,
                id,
                "the same worker has already received the blocks of that transfer",
            );
        }
        let Some(target) = serve.asker.target.clone() else {
            return debug_assert!(false, "a worker that wants blocks has a known layout");
        };
        match self.reach(now, &target) {
            Reach::Ready(connection, plan) => self.write(now, id, connection, &plan),
            Reach::Wait => {
                let waiting = self.connecting.entry(target.id().clone()).or_default();
                if !waiting.contains(&id) {
                    waiting.push(id);
                }
            }
            Reach::Refused(why, _) => self.fail_serve(now, id, &why),
        }
    }

    fn write(&mut self, now: Time, id: ServeId, connection: Connection, plan: &Arc<PeerPlan>) {
        let Some(serve) = self.serves.get_mut(&id) else {
            return debug_assert!(false, "begin writes requests that exist");
        };
        let Some(transfer) = self.transfers.get_mut(&serve.name) else {
            return debug_assert!(false, "begin looks the transfer up");
        };
        // Expected race: the transfer ended while this request waited for the connection, and
        // another prefill has its name. The write starts once that prefill has computed its blocks.
        let Some(blocks) = transfer.ready.clone() else { return };
        if plan.lanes.is_empty() {
            return self.serve_over(now, id, true);
        }
        let paired = pair_push(plan, &serve.blocks, &blocks, &self.settings.groups);
        let groups = match paired.and_then(|paired| paired.push_moves()) {
            Ok(groups) => groups,
            Err(why) => return self.fail_serve(now, id, &why),
        };
        (serve.writing, serve.connection) = (Some(transfer.request.clone()), Some(connection));
        transfer.running += 1;
        self.peers.hold(connection);
        self.serve_deadlines.clear(&id);
        let groups: Arc<[_]> = groups.into();
        let lists = MoveLists { local: blocks, remote: serve.blocks.clone(), tokens: None };
        let request = transfer.request.clone();
        let deadline = (transfer.until + LAST_WRITE).min(now + self.settings.load_timeout);
        let grants: Arc<[PushGrant]> = match (&serve.asker.target, serve.grant.is_empty()) {
            (Some(target), false) => {
                let rank = target.rank();
                [PushGrant { pp: rank.pp, tp: rank.tp, regions: serve.grant.clone() }].into()
            }
            _ => [].into(),
        };
        for lane in &plan.lanes {
            let groups = lane.select(&groups);
            for part in lane.parts() {
                self.last_move += 1;
                let move_id = MoveId(self.last_move);
                self.writes.insert(move_id, Write { serve: id, resolved: false });
                serve.unsettled += 1;
                let what = Move {
                    id: move_id,
                    request: request.clone(),
                    connection,
                    part,
                    groups: Arc::clone(&groups),
                    lists: lists.clone(),
                    notification: None,
                    grants: Arc::clone(&grants),
                    deadline,
                };
                let theirs = serve.theirs.clone();
                self.actions.push_back(MooncakeAction::Write { what, theirs });
            }
        }
    }

    /// Handles the outcome of a write. `Ok` means that its data has arrived, and that it no longer
    /// accesses its memory.
    pub fn move_resolved(
        &mut self,
        now: Time,
        id: MoveId,
        result: std::result::Result<Transferred, MoveFailure>,
    ) {
        // Expected race: the transport has already reported the write.
        let Some(write) = self.writes.get_mut(&id).filter(|write| !write.resolved) else { return };
        let serve = write.serve;
        match result {
            Ok(transferred) => {
                self.output.stats.record(transferred);
                if let Some(connection) = self.serves.get(&serve).and_then(|serve| serve.connection)
                {
                    self.peers.proven(connection);
                }
                self.write_settled(now, id);
            }
            Err(failure) => {
                write.resolved = true;
                let connection = self.serves.get(&serve).and_then(|serve| serve.connection);
                if let Some(connection) = connection.filter(|_| failure.peer_is_gone) {
                    self.with_peers(|peers, actions| peers.invalidate(connection, actions));
                }
                if failure.settled
                    && self.serves.get(&serve).is_some_and(|serve| serve.unsettled == 1)
                {
                    self.mark_failed(serve, &failure.error, false);
                } else {
                    self.fail_serve(now, serve, &failure.error);
                }
                if failure.settled {
                    self.write_settled(now, id);
                }
            }
        }
    }

    /// Handles the report that a failed write no longer accesses its memory.
    pub fn move_settled(&mut self, now: Time, id: MoveId) {
        if self.writes.get(&id).is_some_and(|write| write.resolved) {
            self.write_settled(now, id);
        }
    }

    /// Handles the report that a failed write may access its memory until the process exits.
    pub fn move_forgotten(&mut self, now: Time, id: MoveId) {
        // Expected race: the write has settled.
        let Some(write) = self.writes.get(&id).filter(|write| write.resolved) else { return };
        let Some(serve) = self.serves.get_mut(&write.serve) else {
            return debug_assert!(false, "a request outlives its writes");
        };
        // The decode is never notified that the write has ended, because it may never end.
        if let Some(open) = self.asks.get_mut(&serve.asker.ask) {
            open.left.remove(&serve.theirs);
            if open.left.is_empty() {
                self.asks.remove(&serve.asker.ask);
            }
        }
        if let Some(transfer) = self.transfers.get(&serve.name)
            && serve.writing.as_ref() == Some(&transfer.request)
        {
            let lost = (transfer.request.clone(), Kept::Request);
            if !self.output.lost.contains(&lost) {
                self.output.lost.push(lost);
            }
        }
        self.write_settled(now, id);
    }

    fn write_settled(&mut self, now: Time, id: MoveId) {
        let Some(Write { serve: id, .. }) = self.writes.remove(&id) else {
            return debug_assert!(false, "each write settles once");
        };
        let Some(serve) = self.serves.get_mut(&id) else {
            return debug_assert!(false, "a request outlives its writes");
        };
        serve.unsettled -= 1;
        if serve.unsettled == 0 {
            let written = !serve.failed;
            self.serve_over(now, id, written);
        }
    }

    /// Fails a pulled request. Its writes are cancelled, and it ends when they have settled.
    pub(super) fn fail_serve(&mut self, now: Time, id: ServeId, why: &str) {
        // Expected race: it has already failed, or ended while it waited for the connection.
        let Some(serve) = self.serves.get(&id).filter(|serve| !serve.failed) else { return };
        let running = serve.unsettled > 0;
        self.mark_failed(id, why, running);
        if !running {
            return self.serve_over(now, id, false);
        }
        let moves = self.writes.iter().filter(|(_, write)| write.serve == id && !write.resolved);
        let cancels: Vec<_> = moves.map(|(id, _)| Action::Cancel { id: *id }).collect();
        self.actions.extend(cancels.into_iter().map(MooncakeAction::Engine));
    }

    /// Records a failure and reports it to the decode. With `now`, writes may still be in progress.
    /// Otherwise this is the final report.
    fn mark_failed(&mut self, id: ServeId, why: &str, now: bool) {
        // Expected race: it has already failed, and its decode knows why.
        let Some(serve) = self.serves.get_mut(&id).filter(|serve| !serve.failed) else { return };
        serve.failed = true;
        let (ask, theirs) = (serve.asker.ask, serve.theirs.clone());
        if let Some(request) = serve.writing.clone() {
            let mut said = TransferFailure::new(FailureKind::SendFailed, why);
            said.remote_request = Some(theirs.clone());
            said.request = Some(request);
            self.record(said);
        }
        let hears_of_the_end = self.asks.get(&ask).is_some_and(|open| open.hears_of_the_end);
        if now {
            self.tell(ask, &theirs, Some(why), false, !hears_of_the_end);
        } else {
            self.tell(ask, &theirs, Some(why), true, true);
        }
    }

    /// Ends a pulled request without writes in progress. `had` means that the decode needs nothing
    /// more.
    fn serve_over(&mut self, now: Time, id: ServeId, had: bool) {
        let Some(serve) = self.serves.remove(&id) else {
            return debug_assert!(false, "each request ends once");
        };
        self.serve_bytes -= serve.bytes();
        self.serve_deadlines.clear(&id);
        if let Some(others) = self.asked_for.get_mut(&serve.name) {
            others.retain(|other| *other != id);
            if others.is_empty() {
                self.asked_for.remove(&serve.name);
            }
        }
        let Asker { ask, reader, readers, .. } = serve.asker;
        match had {
            true => self.tell(ask, &serve.theirs, None, true, true),
            // A decode that received the failure and still listens learns that the request has
            // ended.
            false => self.tell(ask, &serve.theirs, Some("its writes have ended"), true, true),
        }
        if let Some(request) = &serve.writing {
            if let Some(transfer) = self.transfers.get_mut(&serve.name)
                && transfer.request == *request
            {
                transfer.running -= 1;
            }
            if let Some(connection) = serve.connection {
                self.with_peers(|peers, actions| peers.release(now, connection, actions));
            }
        }
        if had {
            self.transfers.add_reader_that_has(&serve.name, reader, readers);
        }
        self.settle(now, &serve.name);
    }
}
