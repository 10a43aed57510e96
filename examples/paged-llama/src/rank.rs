//! The further ranks of an engine's model: processes, each with its share of the weights and a pool of its own.
//!
//! A rank has a socket to rank 0 as its standard input. Over it it is told its place, says that it is ready, is told
//! where to join the engine's connection with its peers, all of it in lines, and then takes steps.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
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
pub(crate) struct Place {
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

/// A rank that nobody is yet: both ends of its socket.
pub(crate) struct Vacant {
    pub(crate) rank: usize,
    member: UnixStream,
    head: UnixStream,
}

/// All ranks of an engine.
pub(crate) struct Ranks {
    pub(crate) first: Place,
    /// The pools of those that are in this process: the first one's, or everybody's.
    pub(crate) memories: Vec<Arc<Memory>>,
    /// The others.
    pub(crate) processes: Vec<Process>,
}

/// A rank's process. It ends with the engine's model, and is waited for when this is dropped.
pub(crate) struct Process {
    rank: usize,
    child: Child,
    /// For lines, before the first step.
    head: Option<UnixStream>,
}

/// The place of the first rank of so many, and the others that are vacant.
pub(crate) fn places(size: usize) -> Result<(Shard, Vec<Vacant>)> {
    if size == 1 {
        return Ok((Shard::alone(), Vec::new()));
    }
    let told = |error: std::io::Error| ModelError::new(format!("the ranks' sockets: {error}"));
    let (mut ours, mut vacant) = (Vec::new(), Vec::new());
    for rank in 1..size {
        let (head, member) = UnixStream::pair().map_err(told)?;
        vacant.push(Vacant { rank, member, head: head.try_clone().map_err(told)? });
        ours.push(head);
    }
    Ok((Shard::head(ours, PATIENCE).map_err(told)?, vacant))
}

/// Has a thread of this process be that rank: its memory.
pub(crate) fn start_thread(place: &Place, vacant: Vacant) -> Result<Arc<Memory>> {
    let (model, mut pool, memory) = place.open(vacant.member)?;
    let Place { engine, rank, .. } = *place;
    let follow = move || {
        if let Err(why) = model.follow(&mut pool) {
            tracing::error!("rank {rank} of engine {engine}'s model has ended: {why}");
        }
    };
    let thread = std::thread::Builder::new().name(format!("engine-{engine}-{rank}"));
    thread.spawn(follow).map_err(|error| ModelError::new(format!("the thread of rank {rank}: {error}")))?;
    Ok(memory)
}

impl Place {
    /// Its share of the model, and its pool.
    fn open(&self, socket: UnixStream) -> Result<(Model, crate::model::Pool, Arc<Memory>)> {
        let shard = Shard::member(self.rank, self.size, socket);
        let model = Model::open(&self.folder, shard)?.with_threads(self.threads);
        let (pool, memory) = kv::pool(self.shape)?;
        Ok((model, pool, memory))
    }
}

impl Ranks {
    /// Has those in other processes join the engine's connection with its peers at this path, until `all_have` says
    /// that they have: nobody else joins there.
    pub(crate) fn join_at(&mut self, path: &Path, all_have: impl FnOnce() -> Result<()>) -> Result<()> {
        for process in &mut self.processes {
            process.say(&path)?;
            process.head = None;
        }
        let joined = all_have();
        // A server that is killed leaves no socket.
        std::fs::remove_file(path).ok();
        joined
    }
}

impl Process {
    /// Starts it by a command that ends up in [`be`].
    pub(crate) fn start(mut command: Command, place: &Place, vacant: Vacant) -> Result<Process> {
        let Vacant { rank, member, head } = vacant;
        // What interrupts a terminal's processes is the server's to follow, and its ranks are needed to the end.
        let child = command.stdin(OwnedFd::from(member)).process_group(0).spawn();
        let child =
            child.map_err(|error| ModelError::new(format!("rank {rank} could not be started: {error}")))?;
        let mut process = Process { rank, child, head: Some(head) };
        process.say(place)?;
        Ok(process)
    }

    /// Waits until it has its weights and its pool, for as long as the socket of the model does.
    pub(crate) fn ready(&mut self, joins: bool) -> Result<()> {
        let said: std::io::Result<std::result::Result<(), String>> =
            self.head.as_ref().map_or_else(|| Err(std::io::ErrorKind::NotConnected.into()), hear);
        if !joins {
            self.head = None;
        }
        match said {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => Err(ModelError::new(format!("rank {}: {why}", self.rank))),
            Err(error) => Err(self.silent(&error)),
        }
    }

    /// Calls this with words when it has ended, also when it was to end.
    pub(crate) fn watch(&self, ended: impl FnOnce(String) + Send + 'static) -> Result<()> {
        let (rank, pid) = (self.rank, self.child.id());
        let watched =
            pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).map_err(ModelError::of)?;
        let watch = move || {
            // It is waited for when it is dropped, and killed if need be: this ends then.
            while poll(&mut [PollFd::new(&watched, PollFlags::IN)], None) == Err(Errno::INTR) {}
            ended(format!("rank {rank} of the model (process {pid}) has ended; its last words are above"));
        };
        let thread = std::thread::Builder::new().name(format!("rank-{rank}"));
        thread.spawn(watch).map(drop).map_err(ModelError::of)
    }

    fn say(&mut self, line: &impl Serialize) -> Result<()> {
        let said = self.head.as_ref().map_or_else(|| Ok(()), |head| say(head, line));
        said.map_err(|error| self.silent(&error))
    }

    fn silent(&mut self, error: &std::io::Error) -> ModelError {
        let ended = self.ended(Duration::from_millis(100));
        let ended = ended.map_or_else(String::new, |status| format!(", {status}"));
        let (rank, pid) = (self.rank, self.child.id());
        ModelError::new(format!(
            "rank {rank} (process {pid}{ended}) did not get ready: {error}; see its words above"
        ))
    }

    fn ended(&mut self, within: Duration) -> Option<std::process::ExitStatus> {
        let until = Instant::now() + within;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                Ok(status) => return status,
                Err(_) => return None,
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.head = None;
        let (rank, pid) = (self.rank, self.child.id());
        match self.ended(ENDING) {
            Some(status) if status.success() => {}
            Some(status) => tracing::warn!("rank {rank} (process {pid}) has ended: {status}"),
            None => {
                tracing::warn!("rank {rank} (process {pid}) does not end within {ENDING:?}, and is killed");
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
pub fn be() -> Result<()> {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(ModelError::of)?;
    let socket = UnixStream::from(stdin);
    let place: Place = hear(&socket).map_err(|error| {
        ModelError::new(format!("no server has started this as a rank of its model: {error}; see kvx serve"))
    })?;
    let opened = socket.try_clone().map_err(ModelError::of).and_then(|steps| place.open(steps));
    let ready = opened.as_ref().map(drop).map_err(ToString::to_string);
    // A server that has gone meanwhile needs no rank.
    if say(&socket, &ready).is_err() {
        return Ok(());
    }
    let (model, mut pool, memory) = opened?;
    let joined = match place.joins.then(|| hear::<PathBuf>(&socket)) {
        Some(Ok(path)) => Some(kv::join(&path, &place, memory).map_err(ModelError::of)?),
        Some(Err(_)) => return Ok(()),
        None => None,
    };
    drop(socket);
    model.follow(&mut pool)?;
    // The engine ends its connection behind its model; one that was killed is missed at once.
    joined.map_or(Ok(()), |joined| joined.wait(ENDING).map_or(Ok(()), |ended| ended.map_err(ModelError::of)))
}

fn say(mut socket: &UnixStream, line: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(line)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// The next line: nothing is sent behind it before it was answered.
fn hear<T: DeserializeOwned>(socket: &UnixStream) -> std::io::Result<T> {
    let mut line = String::new();
    BufReader::new(socket.take(LINE)).read_line(&mut line)?;
    if line.is_empty() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}
