//! The further ranks of an engine's model: processes, each with its share of the weights and a pool
//! of its own.
//!
//! A rank has a socket to rank 0 as its standard input. Over it, in lines, it receives its place,
//! reports that it is ready, and receives where to join the engine's connection with its peers;
//! then it takes steps.

use std::fs::DirBuilder;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::kv::{self, Memory};
use crate::model::{Model, ModelError, PoolShape, Result, Shard};

/// How long a rank may be silent within a step, and while it gets ready.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// How long one may take to end.
const ENDING: Duration = Duration::from_secs(5);
/// Bytes of a line: more is a mistake.
const LINE: u64 = 1 << 16;

/// What a rank is told, first of all.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct RankSetup {
    pub(crate) engine: usize,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) folder: PathBuf,
    pub(crate) threads: usize,
    pub(crate) shape: PoolShape,
    /// Of the whole model.
    pub(crate) kv_heads: usize,
    /// Tokens of a block of the engine's.
    pub(crate) block_size: usize,
    /// It will be told where to join.
    pub(crate) joins: bool,
}

/// Both ends of the socket between rank 0 and a further rank that is to be started.
pub(crate) struct RankSockets {
    pub(crate) rank: usize,
    member: UnixStream,
    head: UnixStream,
}

/// All ranks of an engine.
pub(crate) struct AllRanks {
    /// That of rank 0, which differs from the others' by its number.
    pub(crate) setup: RankSetup,
    /// The pools of those that are in this process: the first one's, or everybody's.
    pub(crate) memories: Vec<Arc<Memory>>,
    /// The others.
    pub(crate) processes: Vec<RankProcess>,
}

/// A rank's process. It ends with the engine's model, and is waited for when this is dropped.
pub(crate) struct RankProcess {
    rank: usize,
    child: Child,
    /// Readable when it has ended.
    end: OwnedFd,
    /// For lines, before the first step.
    head: Option<UnixStream>,
}

/// Connects so many ranks: what the first one is in the model, and the sockets of the others.
pub(crate) fn connect(size: usize) -> Result<(Shard, Vec<RankSockets>)> {
    if size == 1 {
        return Ok((Shard::alone(), Vec::new()));
    }
    let told = |error: std::io::Error| ModelError::new(format!("the ranks' sockets: {error}"));
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for rank in 1..size {
        let (head, member) = UnixStream::pair().map_err(told)?;
        others.push(RankSockets { rank, member, head: head.try_clone().map_err(told)? });
        ours.push(head);
    }
    Ok((Shard::head(ours, PATIENCE).map_err(told)?, others))
}

/// Has a thread of this process be that rank: its memory.
pub(crate) fn start_thread(setup: &RankSetup, sockets: RankSockets) -> Result<Arc<Memory>> {
    let (model, mut pool, memory) = setup.open(sockets.member)?;
    let RankSetup { engine, rank, .. } = *setup;
    let follow = move || {
        if let Err(why) = model.follow(&mut pool) {
            tracing::error!("rank {rank} of engine {engine}'s model has ended: {why}");
        }
    };
    let thread = std::thread::Builder::new().name(format!("engine-{engine}-{rank}"));
    thread
        .spawn(follow)
        .map_err(|error| ModelError::new(format!("the thread of rank {rank}: {error}")))?;
    Ok(memory)
}

impl RankSetup {
    /// Its share of the model, and its pool.
    fn open(&self, socket: UnixStream) -> Result<(Model, crate::model::Pool, Arc<Memory>)> {
        let shard = Shard::member(self.rank, self.size, socket);
        let model = Model::open(&self.folder, shard)?.with_threads(self.threads);
        let (pool, memory) = kv::pool(self.shape)?;
        Ok((model, pool, memory))
    }
}

impl AllRanks {
    /// Has those in other processes join the engine's connection with its peers at the socket in
    /// this folder, until `all_have` says that they have: nobody else joins there, and a server
    /// that is killed later leaves no folder.
    pub(crate) fn join_at(
        &mut self,
        folder: PrivateFolder,
        all_have: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        for process in &mut self.processes {
            process.write_line(&folder.socket())?;
            process.head = None;
        }
        let joined = all_have();
        drop(folder);
        joined
    }
}

/// A folder of mode 0700 with a random name: other users can neither take the name first nor reach
/// the socket in it. It is removed on drop.
pub(crate) struct PrivateFolder(PathBuf);

impl PrivateFolder {
    pub(crate) fn new() -> Result<Self> {
        let name = format!("kvx-serve-{:016x}", RandomState::new().build_hasher().finish());
        let path = std::env::temp_dir().join(name);
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            let path = path.display();
            ModelError::new(format!(
                "no folder {path} for the ranks' socket: {error}; TMPDIR names another place"
            ))
        })?;
        Ok(PrivateFolder(path))
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("ranks")
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        // A folder with other files in it stays.
        std::fs::remove_file(self.socket()).ok();
        std::fs::remove_dir(&self.0).ok();
    }
}

impl RankProcess {
    /// Starts it by a command that ends up in [`run`].
    pub(crate) fn start(
        mut command: Command,
        setup: &RankSetup,
        sockets: RankSockets,
    ) -> Result<Self> {
        let RankSockets { rank, member, head } = sockets;
        let failed = |error| ModelError::new(format!("rank {rank} could not be started: {error}"));
        // A terminal's interrupt must reach the server alone, which needs its ranks to the end.
        let child =
            command.stdin(OwnedFd::from(member)).process_group(0).spawn().map_err(failed)?;
        // It is not waited for yet, so the number is its own.
        let end = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let end = end.map_err(|error| failed(error.into()))?;
        let mut process = RankProcess { rank, child, end, head: Some(head) };
        process.write_line(setup)?;
        Ok(process)
    }

    /// Waits until it has its weights and its pool, for as long as the socket of the model does.
    pub(crate) fn ready(&mut self, joins: bool) -> Result<()> {
        let Some(head) = self.head.take() else {
            debug_assert!(false, "a rank is waited for once, before it joins");
            return Ok(());
        };
        let said: std::io::Result<std::result::Result<(), String>> = read_line_json(&head);
        self.head = joins.then_some(head);
        match said {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => Err(ModelError::new(format!("rank {}: {why}", self.rank))),
            Err(error) => Err(self.not_ready(&error)),
        }
    }

    /// Calls this with words when it has ended, also when it was to end.
    pub(crate) fn watch(&self, ended: impl FnOnce(String) + Send + 'static) -> Result<()> {
        let (rank, pid) = (self.rank, self.child.id());
        let end = self.end.try_clone().map_err(ModelError::of)?;
        let watch = move || {
            // It is waited for when it is dropped, and killed if need be: this ends then.
            while !is_readable(&end, None) {}
            ended(format!(
                "rank {rank} of the model (process {pid}) has ended; its last words are above"
            ));
        };
        let thread = std::thread::Builder::new().name(format!("rank-{rank}"));
        thread.spawn(watch).map(drop).map_err(ModelError::of)
    }

    fn write_line(&mut self, line: &impl Serialize) -> Result<()> {
        let said = self.head.as_ref().map_or_else(|| Ok(()), |head| write_line(head, line));
        said.map_err(|error| self.not_ready(&error))
    }

    fn not_ready(&mut self, error: &std::io::Error) -> ModelError {
        let ended = self.wait_for_exit(Duration::from_millis(100));
        let ended = ended.map_or_else(String::new, |status| format!(", {status}"));
        let (rank, pid) = (self.rank, self.child.id());
        ModelError::new(format!(
            "rank {rank} (process {pid}{ended}) did not get ready: {error}; see its words above"
        ))
    }

    /// How it has ended, if it does in time.
    fn wait_for_exit(&mut self, within: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + within;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if is_readable(&self.end, Some(left)) {
                return self.child.wait().ok();
            }
            if left.is_zero() {
                return None;
            }
        }
    }
}

/// Waits until it is, or the time is over. False also when a signal has come between.
fn is_readable(file: &OwnedFd, within: Option<Duration>) -> bool {
    let within = within.map(|within| Timespec::try_from(within).expect("seconds that fit"));
    poll(&mut [PollFd::new(file, PollFlags::IN)], within.as_ref()) == Ok(1)
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        self.head = None;
        let (rank, pid) = (self.rank, self.child.id());
        match self.wait_for_exit(ENDING) {
            Some(status) if status.success() => {}
            Some(status) => tracing::warn!("rank {rank} (process {pid}) has ended: {status}"),
            None => {
                tracing::warn!(
                    "rank {rank} (process {pid}) does not end within {ENDING:?}, and is killed"
                );
                let _ = self.child.kill().and_then(|()| self.child.wait());
            }
        }
    }
}

/// The whole life of a rank's process: the socket to rank 0 is its standard input.
///
/// # Errors
///
/// What has ended it but the end of rank 0.
pub fn run() -> Result<()> {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(ModelError::of)?;
    let socket = UnixStream::from(stdin);
    let setup: RankSetup = read_line_json(&socket).map_err(|error| {
        ModelError::new(format!(
            "no server has started this as a rank of its model: {error}; see kvx serve"
        ))
    })?;
    let opened = socket.try_clone().map_err(ModelError::of).and_then(|steps| setup.open(steps));
    let ready = opened.as_ref().map(drop).map_err(ToString::to_string);
    // A server that has gone meanwhile needs no rank.
    if write_line(&socket, &ready).is_err() {
        return Ok(());
    }
    let (model, mut pool, memory) = opened?;
    // Like the first step, it comes when rank 0 is so far, or has ended.
    let joined = match setup.joins.then(|| read_line_json::<PathBuf>(&socket)) {
        Some(Ok(path)) => Some(kv::join(&path, &setup, memory).map_err(ModelError::of)?),
        Some(Err(_)) => return Ok(()),
        None => None,
    };
    drop(socket);
    model.follow(&mut pool)?;
    // The engine ends its connection behind its model; one that was killed is missed at once.
    joined.map_or(Ok(()), |joined| {
        joined.ended_blocking(ENDING).map_or(Ok(()), |ended| ended.map_err(ModelError::of))
    })
}

fn write_line(mut socket: &UnixStream, line: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(line)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// The next line: nothing is sent behind it before it was answered.
fn read_line_json<T: DeserializeOwned>(socket: &UnixStream) -> std::io::Result<T> {
    let mut line = String::new();
    BufReader::new(socket.take(LINE)).read_line(&mut line)?;
    if line.is_empty() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}
