//! The further ranks of an engine's model: processes, each with its share of the weights and its
//! own pool.
//!
//! A rank's standard input is a socket to rank 0. Over it, as lines of JSON, it receives its setup,
//! reports that it is ready, and receives the socket at which it joins the engine's connector. Then
//! it computes steps.

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

/// The time that a rank may be silent during a step, and while it starts.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The time that a rank may take to end.
const ENDING: Duration = Duration::from_secs(5);
/// The longest line, in bytes.
const LINE: u64 = 1 << 16;

/// The setup of a rank, its first message.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct RankSetup {
    pub(crate) engine: usize,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) folder: PathBuf,
    pub(crate) threads: usize,
    pub(crate) shape: PoolShape,
    /// The number of KV heads of the whole model.
    pub(crate) kv_heads: usize,
    /// Tokens per block of the engine.
    pub(crate) block_size: usize,
    /// The rank will receive a socket at which it joins the connector.
    pub(crate) joins: bool,
}

/// Both ends of the socket between rank 0 and a further rank to start.
pub(crate) struct RankSockets {
    pub(crate) rank: usize,
    member: UnixStream,
    head: UnixStream,
}

/// All ranks of an engine.
pub(crate) struct AllRanks {
    /// The setup of rank 0; the setups of other ranks differ only in the number.
    pub(crate) setup: RankSetup,
    /// The pools of the ranks in this process: only rank 0's, or all of them.
    pub(crate) memories: Vec<Arc<Memory>>,
    /// The ranks in other processes.
    pub(crate) processes: Vec<RankProcess>,
}

/// A rank's process. It ends with the engine's model; dropping this waits for it.
pub(crate) struct RankProcess {
    rank: usize,
    child: Child,
    /// A pidfd, readable when the process has ended.
    end: OwnedFd,
    /// The socket for lines, until the first step.
    head: Option<UnixStream>,
}

/// Connects `size` ranks. Returns rank 0's share of the model, and the sockets of the others.
pub(crate) fn connect(size: usize) -> Result<(Shard, Vec<RankSockets>)> {
    if size == 1 {
        return Ok((Shard::alone(), Vec::new()));
    }
    let told = |error: std::io::Error| {
        ModelError::new(format!("cannot create the sockets of the ranks: {error}"))
    };
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for rank in 1..size {
        let (head, member) = UnixStream::pair().map_err(told)?;
        others.push(RankSockets { rank, member, head: head.try_clone().map_err(told)? });
        ours.push(head);
    }
    Ok((Shard::head(ours, PATIENCE).map_err(told)?, others))
}

/// Runs a rank on a thread of this process, and returns its memory.
pub(crate) fn start_thread(setup: &RankSetup, sockets: RankSockets) -> Result<Arc<Memory>> {
    let (model, mut pool, memory) = setup.open(sockets.member)?;
    let RankSetup { engine, rank, .. } = *setup;
    let follow = move || {
        if let Err(why) = model.follow(&mut pool) {
            tracing::error!("rank {rank} of engine {engine}'s model has ended: {why}");
        }
    };
    let thread = std::thread::Builder::new().name(format!("engine-{engine}-{rank}"));
    thread.spawn(follow).map_err(|error| {
        ModelError::new(format!("cannot start the thread of rank {rank}: {error}"))
    })?;
    Ok(memory)
}

impl RankSetup {
    /// Opens this rank's share of the model, and allocates its pool.
    fn open(&self, socket: UnixStream) -> Result<(Model, crate::model::Pool, Arc<Memory>)> {
        let shard = Shard::member(self.rank, self.size, socket);
        let model = Model::open(&self.folder, shard)?.with_threads(self.threads);
        let (pool, memory) = kv::pool(self.shape)?;
        Ok((model, pool, memory))
    }
}

impl AllRanks {
    /// Makes the ranks in other processes join the engine's connector at the socket in this folder,
    /// and removes the folder when `all_have` returns. No one else can join there, and a server
    /// that is killed later leaves no folder behind.
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
                "cannot create the folder {path} for the ranks' socket: {error}; set TMPDIR to \
                 another folder"
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
    /// Starts a rank with a command that calls [`run`].
    pub(crate) fn start(
        mut command: Command,
        setup: &RankSetup,
        sockets: RankSockets,
    ) -> Result<Self> {
        let RankSockets { rank, member, head } = sockets;
        let failed = |error| ModelError::new(format!("rank {rank} could not be started: {error}"));
        // A terminal's interrupt must reach only the server, which needs its ranks to the end.
        let child =
            command.stdin(OwnedFd::from(member)).process_group(0).spawn().map_err(failed)?;
        // The process is not reaped yet, so its id is not reused.
        let end = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        let end = end.map_err(|error| failed(error.into()))?;
        let mut process = RankProcess { rank, child, end, head: Some(head) };
        process.write_line(setup)?;
        Ok(process)
    }

    /// Waits until the rank has its weights and its pool, as long as the model's socket waits for a
    /// step.
    pub(crate) fn ready(&mut self, joins: bool) -> Result<()> {
        let Some(head) = self.head.take() else {
            debug_assert!(false, "`ready` is called once, before the rank joins");
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

    /// Calls `ended` with a message when the process has ended, even if it was meant to.
    pub(crate) fn watch(&self, ended: impl FnOnce(String) + Send + 'static) -> Result<()> {
        let (rank, pid) = (self.rank, self.child.id());
        let end = self.end.try_clone().map_err(ModelError::of)?;
        let watch = move || {
            // Dropping the `RankProcess` ends the process, if necessary by killing it, so this loop
            // ends.
            while !is_readable(&end, None) {}
            ended(format!(
                "rank {rank} of the model (process {pid}) has ended; see its messages above"
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
            "rank {rank} (process {pid}{ended}) did not start: {error}; see its messages above"
        ))
    }

    /// Returns how the process has ended, if it ends in time.
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

/// Waits until the file is readable or the time is over. Returns false also after a signal.
fn is_readable(file: &OwnedFd, within: Option<Duration>) -> bool {
    let within = within.map(|within| Timespec::try_from(within).expect("the time fits"));
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
                    "rank {rank} (process {pid}) does not end within {ENDING:?} and is killed"
                );
                let _ = self.child.kill().and_then(|()| self.child.wait());
            }
        }
    }
}

/// Runs a rank's process, whose standard input is the socket to rank 0.
///
/// # Errors
///
/// Returns the error that ended the rank, unless rank 0 ended.
pub fn run() -> Result<()> {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(ModelError::of)?;
    let socket = UnixStream::from(stdin);
    let setup: RankSetup = read_line_json(&socket).map_err(|error| {
        ModelError::new(format!(
            "`kvx serve` did not start this process as a rank: {error}; use `kvx serve` instead"
        ))
    })?;
    let opened = socket.try_clone().map_err(ModelError::of).and_then(|steps| setup.open(steps));
    let ready = opened.as_ref().map(drop).map_err(ToString::to_string);
    // If the server has ended meanwhile, this rank is not needed.
    if write_line(&socket, &ready).is_err() {
        return Ok(());
    }
    let (model, mut pool, memory) = opened?;
    // Like the first step, this line arrives when rank 0 is ready, or never if it has ended.
    let joined = match setup.joins.then(|| read_line_json::<PathBuf>(&socket)) {
        Some(Ok(path)) => Some(kv::join(&path, &setup, memory).map_err(ModelError::of)?),
        Some(Err(_)) => return Ok(()),
        None => None,
    };
    drop(socket);
    model.follow(&mut pool)?;
    // The engine closes its connector after its model; the loss of a killed engine is noticed at
    // once.
    joined.map_or(Ok(()), |joined| {
        joined.ended_blocking(ENDING).map_or(Ok(()), |ended| ended.map_err(ModelError::of))
    })
}

fn write_line(mut socket: &UnixStream, line: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(line)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Reads the next line. The peer sends nothing after it before it has an answer.
fn read_line_json<T: DeserializeOwned>(socket: &UnixStream) -> std::io::Result<T> {
    let mut line = String::new();
    BufReader::new(socket.take(LINE)).read_line(&mut line)?;
    if line.is_empty() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}
