//! A rank in a process of its own, as the engine's process sees it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Deadline, Error, ErrorKind, Result};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::sync::oneshot;

use super::super::generations::StaleBlocks;
use super::super::host_copies::SavePoint;
use super::super::slot::Slot;
use super::limits::SILENT;
use super::process::ProcessHandle;
use kvx_vllm::engine::{
    BlockLists, ConnectorMeta, FailedLoad, Fresh, Kept, LoadFailure, RequestId, Unsaved,
    WorkerOutput, WorkerRank,
};
use kvx_vllm::group::{MAX_ASKED, MAX_RAISED, ToRank};
use kvx_vllm::wire::NixlAgentMetadata;

/// The number of messages that a rank may leave unread before it is lost. Their contents are shared
/// with the scheduler.
const BACKLOG: usize = 1 << 16;

/// A message to a rank, with an optional file.
pub(in crate::runtime) type RankMessage = (ToRank, Option<OwnedFd>);

/// Receives the result of something that a rank was asked for.
pub(in crate::runtime) type Task = Arc<Slot<Result<(), String>>>;

/// A process that asks to become a rank.
pub(in crate::runtime) struct RankProcess {
    /// A description of the process.
    pub(in crate::runtime) process: Arc<str>,
    /// The process's pidfd, if it runs on this host.
    pub(in crate::runtime) life: Option<Arc<ProcessHandle>>,
    /// True if the process may be on another host, and shares no memory with the engine.
    pub(in crate::runtime) distant: bool,
}

/// The stage of a rank's life.
enum RankStage {
    /// The rank's process has not joined yet.
    Awaited,
    /// The process has joined, and has not registered its caches.
    Joined { process: Arc<str> },
    /// The process has registered its caches.
    Registered { process: Arc<str>, metadata: Box<NixlAgentMetadata>, host_copies: bool },
    /// The process has given its caches back, and has not registered others.
    GaveBack { process: Arc<str> },
    /// The rank is gone for good. `proven`: its process touches no memory any more.
    Lost { why: Arc<str>, proven: bool },
}

/// A rank in a process of its own.
///
/// It remembers the orders of the rank, and so reports on all of them, whatever happens to the
/// rank. Orders that were open when the rank was lost have failed.
pub(in crate::runtime) struct RemoteRank {
    rank: WorkerRank,
    /// True if the rank's prefill writes, so that it reads its own blocks itself.
    pushes: bool,
    stage: RankStage,
    /// True if the rank is on another host and raises its own counters. `raising` and `raised`
    /// count the raises that it was asked for and has confirmed.
    distant: bool,
    /// The pidfd of the rank's process, if that runs on this host.
    life: Option<Arc<ProcessHandle>>,
    raising: u64,
    raised: u64,
    /// True if the rank was given counters for caches that it has, or is about to register.
    has_words: bool,
    to: Option<Sender<RankMessage>>,
    loads: BTreeMap<RequestId, BlockLists>,
    sends: BTreeSet<RequestId>,
    output: WorkerOutput,
    /// Tasks for digests and host copies, by the number of the request for them.
    tasks: BTreeMap<u64, Task>,
    last_task: u64,
    /// The receivers of the rank's grants, by request.
    granting: BTreeMap<RequestId, oneshot::Sender<Result<Vec<Vec<u8>>>>>,
    /// The receiver of the rank's end.
    ending: Option<Arc<Slot<Result<()>>>>,
}

impl RemoteRank {
    /// Creates a rank that has not joined yet.
    pub(in crate::runtime) fn new(rank: WorkerRank, pushes: bool) -> Self {
        RemoteRank {
            rank,
            pushes,
            stage: RankStage::Awaited,
            distant: false,
            life: None,
            raising: 0,
            raised: 0,
            has_words: false,
            to: None,
            loads: BTreeMap::new(),
            sends: BTreeSet::new(),
            output: WorkerOutput::default(),
            tasks: BTreeMap::new(),
            last_task: 0,
            granting: BTreeMap::new(),
            ending: None,
        }
    }

    /// Assigns the rank to a process. Returns the messages for the process.
    ///
    /// Errors: `Invalid` if the rank is taken, `Closed` if it was lost.
    pub(in crate::runtime) fn join(
        &mut self,
        RankProcess { process, life, distant }: &RankProcess,
    ) -> Result<Receiver<RankMessage>> {
        match &self.stage {
            RankStage::Awaited => {}
            RankStage::Joined { process: first }
            | RankStage::Registered { process: first, .. }
            | RankStage::GaveBack { process: first } => {
                return Err(ErrorKind::Invalid.because(format!(
                    "{process} joined as {}, which {first} is already: start each rank once",
                    rank_name(self.rank)
                )));
            }
            RankStage::Lost { why, .. } => {
                let why = format!(
                    "{why}; a lost rank cannot join again: restart the engine with all its ranks"
                );
                return Err(ErrorKind::Closed.because(why));
            }
        }
        let (to, down) = mpsc::channel(BACKLOG);
        (self.stage, self.to) = (RankStage::Joined { process: Arc::clone(process) }, Some(to));
        (self.life, self.distant) = (life.clone(), *distant);
        Ok(down)
    }

    /// Returns whether the rank's process has ended, although the rank does not count as lost yet.
    pub(in crate::runtime) fn has_ended(&self) -> bool {
        self.life.as_deref().is_some_and(|life| life.has_ended(Duration::ZERO))
    }

    /// Takes the registration of the rank's caches.
    pub(in crate::runtime) fn registered(
        &mut self,
        registered: NixlAgentMetadata,
        host_copies: bool,
    ) -> Result<()> {
        match &self.stage {
            RankStage::Joined { .. } | RankStage::GaveBack { .. } if !self.has_words => {
                Err(out_of_turn())
            }
            RankStage::Joined { process } | RankStage::GaveBack { process } => {
                let (process, metadata) = (Arc::clone(process), Box::new(registered));
                self.stage = RankStage::Registered { process, metadata, host_copies };
                Ok(())
            }
            RankStage::Lost { why, .. } => Err(ErrorKind::Closed.because(why.to_string())),
            RankStage::Awaited | RankStage::Registered { .. } => {
                Err(ErrorKind::Invalid.because(format!(
                    "{} has registered its caches already: it has to give them back first",
                    rank_name(self.rank)
                )))
            }
        }
    }

    /// Records that the rank gets counters for the caches that it registers next. Errors: it has
    /// registered caches.
    pub(in crate::runtime) fn expect_caches(&mut self) -> Result<()> {
        match &self.stage {
            RankStage::Registered { .. } => return Err(out_of_turn()),
            RankStage::Lost { why, .. } => {
                return Err(ErrorKind::Closed.because(why.to_string()));
            }
            RankStage::Awaited | RankStage::Joined { .. } | RankStage::GaveBack { .. } => {}
        }
        self.has_words = true;
        Ok(())
    }

    /// Returns whether the rank is on another host, and so has its own counters.
    pub(in crate::runtime) fn is_distant(&self) -> bool {
        self.distant
    }

    /// Asks the rank to raise the counters of blocks, if it has its own. A lost rank never confirms
    /// that.
    pub(in crate::runtime) fn raise(&mut self, StaleBlocks { blocks, stamp }: &StaleBlocks) {
        if !self.distant {
            return;
        }
        for blocks in blocks.chunks(MAX_RAISED) {
            self.raising += 1;
            let (number, stamp, blocks) = (self.raising, *stamp, blocks.to_vec());
            self.send(ToRank::Raise { number, stamp, blocks }, None);
        }
    }

    /// Records that the rank has raised its counters up to this number.
    pub(in crate::runtime) fn has_raised(&mut self, number: u64) {
        self.raised = self.raised.max(number.min(self.raising));
    }

    /// Returns the number of the last raise, if the rank has not confirmed it.
    pub(in crate::runtime) fn last_unraised(&self) -> Option<u64> {
        (self.raised < self.raising && !matches!(self.stage, RankStage::Lost { proven: true, .. }))
            .then_some(self.raising)
    }

    /// Returns whether the rank has carried out the raise of this number. `None`: that will never
    /// be known.
    pub(in crate::runtime) fn is_raised(&self, number: u64) -> Option<bool> {
        match &self.stage {
            _ if self.raised >= number => Some(true),
            RankStage::Lost { proven, .. } => proven.then_some(true),
            _ => Some(false),
        }
    }

    /// Returns whether the rank has caches or is about to register some. All ranks share the same
    /// generations.
    pub(in crate::runtime) fn has_words(&self) -> bool {
        self.has_words
    }

    /// Records that the rank gives its caches back. Errors: it has none.
    pub(in crate::runtime) fn release_caches(&mut self) -> Result<()> {
        match &self.stage {
            RankStage::Registered { process, .. } => {
                self.stage = RankStage::GaveBack { process: Arc::clone(process) };
            }
            RankStage::Lost { why, .. } => {
                return Err(ErrorKind::Closed.because(why.to_string()));
            }
            _ => return Err(out_of_turn()),
        }
        self.has_words = false;
        Ok(())
    }

    /// Returns whether the rank has joined and given its caches back.
    pub(in crate::runtime) fn has_given_back(&self) -> bool {
        matches!(self.stage, RankStage::GaveBack { .. })
    }

    /// Returns the metadata for peers.
    pub(in crate::runtime) fn metadata(&self) -> Option<&NixlAgentMetadata> {
        match &self.stage {
            RankStage::Registered { metadata, .. } => Some(metadata),
            _ => None,
        }
    }

    /// Returns whether peers see copies on the host.
    pub(in crate::runtime) fn has_host_copies(&self) -> bool {
        matches!(self.stage, RankStage::Registered { host_copies: true, .. })
    }

    /// Returns why nothing can be loaded or published now, if so.
    pub(in crate::runtime) fn missing(&self) -> Option<String> {
        match &self.stage {
            RankStage::Awaited => Some(format!("{} has not joined", rank_name(self.rank))),
            RankStage::Joined { process } => {
                let rank = rank_name(self.rank);
                Some(format!("{rank} ({process}) has joined, and not registered its caches"))
            }
            RankStage::GaveBack { process } => {
                let rank = rank_name(self.rank);
                Some(format!(
                    "{rank} ({process}) has given its caches back, and not registered others"
                ))
            }
            RankStage::Registered { .. } => None,
            RankStage::Lost { why, .. } => Some(why.to_string()),
        }
    }

    /// Takes the message of a step.
    pub(in crate::runtime) fn start_load_kv(&mut self, meta: ConnectorMeta) {
        // In push the rank reports when its writes have ended.
        for request in meta.withdrawn.iter().filter(|_| !self.pushes) {
            self.sends.remove(request);
        }
        self.sends.extend(meta.send.iter().map(|order| order.request.clone()));
        let awaited = meta.receive.iter().filter(|order| order.awaited);
        self.loads.extend(awaited.map(|order| (order.request.clone(), order.local.clone())));
        match self.stage {
            // No order that needs a report is given before all ranks have joined.
            RankStage::Awaited | RankStage::Joined { .. } => {}
            // Loads that were ordered before caches were given back fail in the rank.
            RankStage::Registered { .. } | RankStage::GaveBack { .. } => {
                self.send(ToRank::Step(meta), None)
            }
            RankStage::Lost { .. } => self.fail_open_requests(),
        }
    }

    /// Sends a message. A rank that does not read its messages is lost. The reading task notices a
    /// rank that has ended.
    pub(in crate::runtime) fn send(&mut self, message: ToRank, file: Option<OwnedFd>) {
        let full = self
            .to
            .as_ref()
            .is_some_and(|to| matches!(to.try_send((message, file)), Err(TrySendError::Full(_))));
        if full {
            self.lose(&format!("it left {BACKLOG} messages unread"), false);
        }
    }

    /// Takes the report of the rank.
    pub(in crate::runtime) fn take_output(&mut self) -> WorkerOutput {
        std::mem::take(&mut self.output)
    }

    /// Adds a report of the rank, and ignores what it reports about other requests than its own.
    pub(in crate::runtime) fn take_report(&mut self, mut output: WorkerOutput) {
        let (loads, sends) = (&mut self.loads, &mut self.sends);
        output.failed_recving.retain(|failed| loads.contains_key(&failed.request));
        output.failing.retain(|(request, _)| loads.contains_key(request));
        output.lost.retain(|(request, kept)| match kept {
            Kept::Load => loads.contains_key(request),
            Kept::Request => sends.contains(request),
        });
        output.finished_recving.retain(|request| loads.remove(request).is_some());
        output.finished_sending.retain(|request| sends.remove(request));
        let said = &mut self.output;
        said.at = output.at;
        said.finished_sending.extend(output.finished_sending);
        said.finished_recving.extend(output.finished_recving);
        said.failed_recving.extend(output.failed_recving);
        said.failing.extend(output.failing);
        said.lost.extend(output.lost);
        said.clocks.extend(output.clocks);
        said.failures.extend(output.failures);
        said.stats.aggregate(output.stats);
    }

    /// Asks the rank for the digests of blocks that are about to be published. The tasks end when
    /// the rank has written them or is lost.
    pub(in crate::runtime) fn digest(&mut self, fresh: &[Fresh]) -> Vec<Task> {
        self.ask_for(fresh, |number, fresh| ToRank::Digest { number, fresh })
    }

    /// Asks the rank to copy blocks of a request to the host. The tasks end when the rank has done
    /// so or is lost.
    pub(in crate::runtime) fn save(
        &mut self,
        of: u64,
        blocks: &[Unsaved],
        when: SavePoint,
    ) -> Vec<Task> {
        if !self.has_host_copies() {
            return Vec::new();
        }
        let early = when == SavePoint::Early;
        self.ask_for(blocks, |number, blocks| ToRank::Save { number, of, early, blocks })
    }

    /// Asks for work on blocks, in messages of limited size.
    fn ask_for<T: Clone>(
        &mut self,
        blocks: &[T],
        ask: impl Fn(u64, Vec<T>) -> ToRank,
    ) -> Vec<Task> {
        let mut asked = Vec::new();
        for blocks in blocks.chunks(MAX_ASKED) {
            if self.missing().is_some() {
                break; // peers cannot load from it
            }
            self.last_task += 1;
            let (number, done) = (self.last_task, Slot::new());
            self.tasks.insert(number, Arc::clone(&done));
            asked.push(done);
            self.send(ask(number, blocks.to_vec()), None);
        }
        asked
    }

    /// Asks the rank for its grants for a request. The answer fails if the rank is lost.
    pub(in crate::runtime) fn grant(
        &mut self,
        request: &RequestId,
    ) -> oneshot::Receiver<Result<Vec<Vec<u8>>>> {
        let (sender, answer) = oneshot::channel();
        if self.missing().is_none() {
            self.granting.insert(request.clone(), sender);
            self.send(ToRank::Grant(request.clone()), None);
        }
        answer
    }

    /// Delivers the grants of the rank.
    pub(in crate::runtime) fn granted(
        &mut self,
        request: &RequestId,
        told: Result<Vec<Vec<u8>>, String>,
    ) {
        if let Some(asked) = self.granting.remove(request) {
            asked.send(told.map_err(refused)).ok(); // the load may be over
        }
    }

    /// Ends a task, which the rank has carried out or which has failed.
    pub(in crate::runtime) fn has_done(&mut self, number: u64, failed: Option<String>) {
        if let Some(done) = self.tasks.remove(&number) {
            done.set(failed.map_or(Ok(()), Err));
        }
    }

    /// Records the loss of the rank. `proven`: its process touches no memory any more. The first
    /// reason counts.
    pub(in crate::runtime) fn lose(&mut self, why: &str, mut proven: bool) {
        let process = match &self.stage {
            RankStage::Lost { .. } => return,
            RankStage::Awaited => {
                // There was no process.
                proven = true;
                String::new()
            }
            RankStage::Joined { process }
            | RankStage::Registered { process, .. }
            | RankStage::GaveBack { process } => {
                format!(" ({process})")
            }
        };
        let why: Arc<str> = format!("{}{process}: {why}", rank_name(self.rank)).into();
        match self.ending {
            Some(_) => tracing::info!(%why, proven, "a rank has ended"),
            None => {
                tracing::warn!(
                    %why,
                    proven,
                    "a rank is lost, so the engine can load nothing any more"
                )
            }
        }
        for done in std::mem::take(&mut self.tasks).into_values() {
            done.set(Err(why.to_string()));
        }
        self.stage = RankStage::Lost { why, proven };
        (self.to, self.life) = (None, None);
        self.fail_open_requests();
        self.granting.clear();
        if let Some(ending) = self.ending.take() {
            ending.set(self.memory_state());
        }
    }

    fn fail_open_requests(&mut self) {
        let RankStage::Lost { why, proven } = &self.stage else {
            debug_assert!(false, "only a lost rank fails its open requests");
            return;
        };
        let said = &mut self.output;
        for (request, blocks) in std::mem::take(&mut self.loads) {
            let mut invalid: Vec<_> = blocks.iter().collect();
            invalid.sort_unstable();
            said.lost.extend((!proven).then(|| (request.clone(), Kept::Load)));
            said.finished_recving.push(request.clone());
            said.failed_recving.push(FailedLoad {
                request,
                failure: LoadFailure::Rank(why.to_string()),
                invalid,
            });
        }
        // The engine raises the counters that peers of this rank read, so a late reader notices
        // that a block was reused. That does not hold for the rank's own writes, nor for counters
        // of its own.
        let sends = std::mem::take(&mut self.sends);
        if (self.pushes || self.distant) && !proven {
            said.lost.extend(sends.iter().map(|request| (request.clone(), Kept::Request)));
        }
        said.finished_sending.extend(sends);
    }

    /// Asks the rank to end. The slot receives the result.
    pub(in crate::runtime) fn shutdown(&mut self, deadline: Deadline) -> Arc<Slot<Result<()>>> {
        let ending = Slot::new();
        match self.stage {
            RankStage::Awaited | RankStage::Lost { .. } => ending.set(self.memory_state()),
            RankStage::Joined { .. }
            | RankStage::Registered { .. }
            | RankStage::GaveBack { .. } => {
                self.ending = Some(Arc::clone(&ending));
                self.send(ToRank::End(deadline.left()), None);
            }
        }
        ending
    }

    /// Returns the state of the memory of a rank that is lost.
    fn memory_state(&self) -> Result<()> {
        match &self.stage {
            RankStage::Lost { why, proven: false } => Err(ErrorKind::StillShared
                .because(format!("a rank that was lost may still touch its memory: {why}"))),
            _ => Ok(()),
        }
    }
}

/// Returns the error of a message that must not arrive at this point.
pub(in crate::runtime) fn out_of_turn() -> Error {
    ErrorKind::Malformed.because("the rank sent a message out of turn")
}

/// Returns the name of a rank for messages.
pub(in crate::runtime) fn rank_name(rank: WorkerRank) -> String {
    format!("rank pp {} tp {}", rank.pp, rank.tp)
}

/// Returns the error for a refusal by another process of the same engine.
pub(in crate::runtime) fn refused(why: String) -> Error {
    ErrorKind::Invalid.because(why)
}

/// Waits until ranks have written digests. Does not wait for a rank that is lost meanwhile. Peers
/// cannot load blocks without a digest.
pub(in crate::runtime) fn await_digests(tasks: Vec<Task>) {
    let deadline = Deadline::from(SILENT);
    for done in tasks {
        if done.wait(deadline).is_none() {
            tracing::warn!(
                "a rank did not write the digests of published blocks within {SILENT:?}, so loads \
                 of them will fail"
            );
        }
    }
}
