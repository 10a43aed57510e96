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

/// A rank that has not read so many messages is lost. What they hold is shared with the scheduler's
/// half.
const BACKLOG: usize = 1 << 16;

/// A message to a rank, and the file beside it.
pub(in crate::runtime) type RankMessage = (ToRank, Option<OwnedFd>);

/// Hears when a rank has done what it was asked for, or why it does not.
pub(in crate::runtime) type Task = Arc<Slot<Result<(), String>>>;

/// A process that wants to be a rank.
pub(in crate::runtime) struct RankProcess {
    /// In words.
    pub(in crate::runtime) process: Arc<str>,
    /// Its pidfd, if it is of this host.
    pub(in crate::runtime) life: Option<Arc<ProcessHandle>>,
    /// It may be on another host, and shares no memory with the engine.
    pub(in crate::runtime) distant: bool,
}

/// Where a rank is.
enum RankStage {
    /// Its process has not come yet.
    Awaited,
    /// It has, and has not registered its caches.
    Joined { process: Arc<str> },
    /// Its caches are registered.
    Registered { process: Arc<str>, metadata: Box<NixlAgentMetadata>, host_copies: bool },
    /// It has given them back, and has not registered others.
    GaveBack { process: Arc<str> },
    /// It is gone, and does not come back. `proven`: its process touches no memory any more.
    Lost { why: Arc<str>, proven: bool },
}

/// A rank in a process of its own.
///
/// It remembers what the rank has been given, and so has a report of everything, whatever becomes
/// of the rank: what was open when it was lost has failed.
pub(in crate::runtime) struct RemoteRank {
    rank: WorkerRank,
    /// Its prefill writes: it reads its own blocks itself.
    pushes: bool,
    stage: RankStage,
    /// It is on another host, and raises its words itself: so often it was asked to, and has said
    /// that it has.
    distant: bool,
    /// The pidfd of its process, if that is of this host.
    life: Option<Arc<ProcessHandle>>,
    raising: u64,
    raised: u64,
    /// It was given words for the caches that it has, or is about to register.
    has_words: bool,
    to: Option<Sender<RankMessage>>,
    loads: BTreeMap<RequestId, BlockLists>,
    sends: BTreeSet<RequestId>,
    output: WorkerOutput,
    /// Digests that it writes and blocks that it copies, by the numbers that it was asked by.
    tasks: BTreeMap<u64, Task>,
    last_task: u64,
    /// What it grants, by request, to whoever has asked.
    granting: BTreeMap<RequestId, oneshot::Sender<Result<Vec<Vec<u8>>>>>,
    /// Whoever waits for its end.
    ending: Option<Arc<Slot<Result<()>>>>,
}

impl RemoteRank {
    /// One that has not come yet.
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

    /// A process takes the place. Gives what is sent to it.
    ///
    /// Errors: the place is taken, or was.
    pub(in crate::runtime) fn join(
        &mut self,
        RankProcess { process, life, distant }: &RankProcess,
    ) -> Result<Receiver<RankMessage>> {
        match &self.stage {
            RankStage::Awaited => {}
            RankStage::Joined { process: first }
            | RankStage::Registered { process: first, .. }
            | RankStage::GaveBack { process: first } => {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!(
                        "{process} joined as {}, which {first} is already: start each rank once",
                        rank_name(self.rank)
                    ),
                ));
            }
            RankStage::Lost { why, .. } => {
                let why =
                    format!("{why}; it does not come back: restart the engine with all its ranks");
                return Err(Error::new(ErrorKind::Closed, why));
            }
        }
        let (to, down) = mpsc::channel(BACKLOG);
        (self.stage, self.to) = (RankStage::Joined { process: Arc::clone(process) }, Some(to));
        (self.life, self.distant) = (life.clone(), *distant);
        Ok(down)
    }

    /// Returns whether its process has ended, though it is not known to be lost.
    pub(in crate::runtime) fn has_ended(&self) -> bool {
        self.life.as_deref().is_some_and(|life| life.has_ended(Duration::ZERO))
    }

    /// It has registered its caches.
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
            RankStage::Lost { why, .. } => Err(Error::new(ErrorKind::Closed, why.to_string())),
            RankStage::Awaited | RankStage::Registered { .. } => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} has registered its caches already: it gives them back first",
                    rank_name(self.rank)
                ),
            )),
        }
    }

    /// It is given words, for caches that it registers next. Errors: it has some.
    pub(in crate::runtime) fn expect_caches(&mut self) -> Result<()> {
        match &self.stage {
            RankStage::Registered { .. } => return Err(out_of_turn()),
            RankStage::Lost { why, .. } => {
                return Err(Error::new(ErrorKind::Closed, why.to_string()));
            }
            RankStage::Awaited | RankStage::Joined { .. } | RankStage::GaveBack { .. } => {}
        }
        self.has_words = true;
        Ok(())
    }

    /// Returns whether it is on another host: then it makes its words itself.
    pub(in crate::runtime) fn is_distant(&self) -> bool {
        self.distant
    }

    /// Has it raise the words of blocks, if those are its own. One that was lost never says that it
    /// has.
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

    /// Its words are raised, as it was asked for by this number.
    pub(in crate::runtime) fn has_raised(&mut self, number: u64) {
        self.raised = self.raised.max(number.min(self.raising));
    }

    /// The number of what it was asked to raise last, if it has not said that it has.
    pub(in crate::runtime) fn last_unraised(&self) -> Option<u64> {
        (self.raised < self.raising && !matches!(self.stage, RankStage::Lost { proven: true, .. }))
            .then_some(self.raising)
    }

    /// Returns whether peers may still read what it was asked to raise by this number. `None`:
    /// nobody will ever know.
    pub(in crate::runtime) fn is_raised(&self, number: u64) -> Option<bool> {
        match &self.stage {
            _ if self.raised >= number => Some(true),
            RankStage::Lost { proven, .. } => proven.then_some(true),
            _ => Some(false),
        }
    }

    /// Returns whether it has caches, or is about to register some: their words are those of the
    /// engine's other ranks.
    pub(in crate::runtime) fn has_words(&self) -> bool {
        self.has_words
    }

    /// It gives its caches back. Errors: it has none.
    pub(in crate::runtime) fn release_caches(&mut self) -> Result<()> {
        match &self.stage {
            RankStage::Registered { process, .. } => {
                self.stage = RankStage::GaveBack { process: Arc::clone(process) };
            }
            RankStage::Lost { why, .. } => {
                return Err(Error::new(ErrorKind::Closed, why.to_string()));
            }
            _ => return Err(out_of_turn()),
        }
        self.has_words = false;
        Ok(())
    }

    /// Returns whether it is there, and has given its caches back.
    pub(in crate::runtime) fn has_given_back(&self) -> bool {
        matches!(self.stage, RankStage::GaveBack { .. })
    }

    /// What peers are told of it.
    pub(in crate::runtime) fn metadata(&self) -> Option<&NixlAgentMetadata> {
        match &self.stage {
            RankStage::Registered { metadata, .. } => Some(metadata),
            _ => None,
        }
    }

    /// Returns whether peers are told of copies on the host.
    pub(in crate::runtime) fn has_host_copies(&self) -> bool {
        matches!(self.stage, RankStage::Registered { host_copies: true, .. })
    }

    /// Why nothing can be loaded or published now, if so.
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
        // In push the rank says when its writes have let go of them.
        for request in meta.withdrawn.iter().filter(|_| !self.pushes) {
            self.sends.remove(request);
        }
        self.sends.extend(meta.send.iter().map(|order| order.request.clone()));
        let awaited = meta.receive.iter().filter(|order| order.awaited);
        self.loads.extend(awaited.map(|order| (order.request.clone(), order.local.clone())));
        match self.stage {
            // Nothing that is reported is ordered before all have come.
            RankStage::Awaited | RankStage::Joined { .. } => {}
            // Loads that were ordered before caches were given back fail there, as all others.
            RankStage::Registered { .. } | RankStage::GaveBack { .. } => {
                self.send(ToRank::Step(meta), None)
            }
            RankStage::Lost { .. } => self.fail_open_requests(),
        }
    }

    /// Sends it a message. One that does not read is lost; who reads from it hears when it has
    /// gone.
    pub(in crate::runtime) fn send(&mut self, message: ToRank, file: Option<OwnedFd>) {
        let full = self
            .to
            .as_ref()
            .is_some_and(|to| matches!(to.try_send((message, file)), Err(TrySendError::Full(_))));
        if full {
            self.lose(&format!("it has not read {BACKLOG} messages"), false);
        }
    }

    /// Takes its report.
    pub(in crate::runtime) fn take_output(&mut self) -> WorkerOutput {
        std::mem::take(&mut self.output)
    }

    /// What the rank has to tell of what it was given: more is nobody's.
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

    /// Has it write the digests of blocks that are about to be published. What is given hears when
    /// it has, or is lost.
    pub(in crate::runtime) fn digest(&mut self, fresh: &[Fresh]) -> Vec<Task> {
        self.ask_for(fresh, |number, fresh| ToRank::Digest { number, fresh })
    }

    /// Has it copy blocks of a request to the host. What is given hears when it has, or is lost.
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

    /// Asks for something to be done with blocks, not too many at once.
    fn ask_for<T: Clone>(
        &mut self,
        blocks: &[T],
        ask: impl Fn(u64, Vec<T>) -> ToRank,
    ) -> Vec<Task> {
        let mut asked = Vec::new();
        for blocks in blocks.chunks(MAX_ASKED) {
            if self.missing().is_some() {
                break; // nobody loads from it
            }
            self.last_task += 1;
            let (number, done) = (self.last_task, Slot::new());
            self.tasks.insert(number, Arc::clone(&done));
            asked.push(done);
            self.send(ask(number, blocks.to_vec()), None);
        }
        asked
    }

    /// Asks what peers may write into for a request. The answer fails when it is lost.
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

    /// It has answered that.
    pub(in crate::runtime) fn granted(
        &mut self,
        request: &RequestId,
        told: Result<Vec<Vec<u8>>, String>,
    ) {
        if let Some(asked) = self.granting.remove(request) {
            asked.send(told.map_err(refused)).ok(); // the load may be over
        }
    }

    /// It has done what it was asked for by that number, or has failed.
    pub(in crate::runtime) fn has_done(&mut self, number: u64, failed: Option<String>) {
        if let Some(done) = self.tasks.remove(&number) {
            done.set(failed.map_or(Ok(()), Err));
        }
    }

    /// It is gone. `proven`: its process touches no memory any more. The first reason counts.
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
                tracing::warn!(%why, proven, "a rank is lost; the engine loads nothing any more")
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
            debug_assert!(false, "only a lost rank fails what is open");
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
        // What peers read has the engine's words: who still reads one finds that it is another's.
        // What it writes itself goes on if it does, and words of its own are as they were.
        let sends = std::mem::take(&mut self.sends);
        if (self.pushes || self.distant) && !proven {
            said.lost.extend(sends.iter().map(|request| (request.clone(), Kept::Request)));
        }
        said.finished_sending.extend(sends);
    }

    /// Asks it to end. What is given hears of it.
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

    /// What is known of the memory of one that is not there.
    fn memory_state(&self) -> Result<()> {
        match &self.stage {
            RankStage::Lost { why, proven: false } => Err(Error::new(
                ErrorKind::StillShared,
                format!(
                    "nobody knows whether a rank that was lost still touches its memory: {why}"
                ),
            )),
            _ => Ok(()),
        }
    }
}

/// What a rank says when it does not come next.
pub(in crate::runtime) fn out_of_turn() -> Error {
    Error::new(ErrorKind::Malformed, "a message out of turn")
}

/// A rank in words.
pub(in crate::runtime) fn rank_name(rank: WorkerRank) -> String {
    format!("rank pp {} tp {}", rank.pp, rank.tp)
}

/// What another process of the same engine refuses.
pub(in crate::runtime) fn refused(why: String) -> Error {
    Error::new(ErrorKind::Invalid, why)
}

/// Waits until ranks have written digests. One that is lost meanwhile is not waited for. Blocks
/// without a digest are loaded by nobody.
pub(in crate::runtime) fn await_digests(tasks: Vec<Task>) {
    let deadline = Deadline::from(SILENT);
    for done in tasks {
        if done.wait(deadline).is_none() {
            tracing::warn!(
                "a rank has not written the digests of published blocks within {SILENT:?}: their loads fail"
            );
        }
    }
}
