//! The engine's end: who joins, and what is heard of them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvx_config::KvTransferConfig;
use kvx_core::{Completion, Deadline, Error, Kind, Result, Ticket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown, socket_with,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::Receiver;
use tokio::time::{sleep, sleep_until, timeout};

use super::super::half::Half;
use super::super::listening::Listening;
use super::super::rank::Rank;
use super::super::register::closed;
use super::super::slot::until;
use super::super::state::{Shared, State};
use super::super::words::{CopiedWords, Published};
use super::away::{Away, Down, name};
use super::stream::{Incoming, same_user, send};
use super::{LAST_WORD, PATIENCE, SILENT};
use crate::engine::{PoolBlocks, WorkerRank};
use crate::params::TransferMode;
use crate::wire::NixlAgentMetadata;
use crate::wire::group::{ToHead, ToRank};

/// Processes that have connected and not said yet who they are; others wait.
const UNKNOWN: usize = 64;
/// A socket that cannot be accepted is tried again after this.
const AGAIN: Duration = Duration::from_millis(10);

/// Ranks that are to join. The socket goes with it.
pub(in crate::runtime) struct Gathering {
    path: PathBuf,
    /// Settled when all have come, or one does not.
    ticket: Option<Ticket>,
}

impl Gathering {
    /// Nobody joins any more.
    pub(in crate::runtime) fn end(mut self, why: Error) {
        if let Some(ticket) = self.ticket.take() {
            ticket.settle(Err(why));
        }
    }
}

impl Drop for Gathering {
    fn drop(&mut self) {
        std::fs::remove_file(&self.path).ok(); // a socket that is left behind is replaced
    }
}

impl Rank {
    /// Whether ranks of an engine with this configuration may be in processes of their own ([`Connector::group`]).
    ///
    /// [`Connector::group`]: crate::runtime::Connector::group
    ///
    /// # Errors
    /// `Unsupported`: all of them have to be in the engine's process.
    pub fn may_join(config: &KvTransferConfig) -> Result<()> {
        let why = match config.connector() {
            Some(kvx_config::Connector::Mooncake) => {
                "ranks in processes of their own are for NixlConnector and NixlPushConnector: with a \
                 MooncakeConnector register all of them here"
            }
            _ => return Ok(()),
        };
        Err(Error::new(Kind::Unsupported, why))
    }
}

impl Shared {
    pub(in crate::runtime) fn group(self: &Arc<Self>, path: &Path, deadline: Deadline) -> Completion<()> {
        let (done, ticket) = Completion::with_ticket();
        match self.may_gather().and_then(|()| open(path)) {
            Ok(listener) => {
                let gathering = Gathering { path: path.to_owned(), ticket: Some(ticket) };
                if let Err((gathering, error)) = self.await_ranks(gathering) {
                    gathering.end(error);
                    return done;
                }
                self.runtime.spawn(gather(Arc::clone(self), listener));
                let shared = Arc::clone(self);
                self.runtime.spawn(async move {
                    sleep_until(until(deadline).into()).await;
                    shared.close_the_gathering();
                });
            }
            Err(error) => ticket.settle(Err(error)),
        }
        done
    }

    fn may_gather(&self) -> Result<()> {
        Rank::may_join(&self.setup.config)?;
        self.state.lock().may_gather()
    }

    /// All workers without caches are to join. Errors: meanwhile nobody may any more; the gathering comes back.
    fn await_ranks(&self, gathering: Gathering) -> Result<(), (Gathering, Error)> {
        // A registration that is under way is waited for.
        let _side = self.side.lock();
        let mut state = self.state.lock();
        if let Err(error) = state.may_gather() {
            return Err((gathering, error));
        }
        state.gathering = Some(gathering);
        if state.ranks.values().all(|held| held.registered.is_none()) {
            // Caches that were given back say nothing of those that come.
            (state.pool, state.published) = (None, None);
        }
        let pushes = self.setup.settings.mode == TransferMode::Push;
        for (rank, held) in state.ranks.iter_mut().filter(|(_, held)| held.registered.is_none()) {
            held.worker = Half::Away(Box::new(Away::new(*rank, pushes)));
        }
        Ok(())
    }

    /// A process takes the place of a rank.
    fn seat(&self, rank: WorkerRank, pid: i32) -> Result<Receiver<Down>> {
        let mut state = self.state.lock();
        let why = match state.ranks.get_mut(&rank).map(|held| &mut held.worker) {
            Some(Half::Away(away)) => match away.join(pid) {
                Ok(down) => return Ok(down),
                Err(error) if error.kind() == Kind::Closed => return Err(error),
                Err(error) => error.sentence().to_owned(),
            },
            Some(Half::Nixl(_) | Half::Mooncake(_)) => format!(
                "process {pid} joined as {}, which the engine's own process is already: start each rank once",
                name(rank)
            ),
            None => format!(
                "process {pid} joined as {}, and the engine was built for {} x {} workers (pipeline x tensor \
                 parallel): see Builder::workers",
                name(rank),
                self.setup.settings.pp_size,
                self.setup.settings.tp_size
            ),
        };
        // Two processes for one place: whose blocks it would load is in doubt. All are if there is no such place.
        let twice = state.ranks.get(&rank).is_some_and(|held| held.worker.away().is_some());
        for (at, held) in &mut state.ranks {
            if let Half::Away(away) = &mut held.worker
                && (!twice || *at == rank)
            {
                away.lose(&why, false);
            }
        }
        let failed = state.gathered(Err(Error::new(Kind::Invalid, why.clone())));
        drop(state);
        failed.settle();
        self.wake_up.notify_one();
        Err(Error::new(Kind::Invalid, why))
    }

    /// The deadline has come: who is not there now does not come any more.
    fn close_the_gathering(&self) {
        let mut state = self.state.lock();
        let mut first = None;
        for held in state.ranks.values_mut() {
            if let Half::Away(away) = &mut held.worker
                && away.missing().is_some()
            {
                away.lose(
                    "it had not joined and registered its caches at the deadline of Connector::group",
                    false,
                );
                first = first.or_else(|| away.missing());
            }
        }
        let Some(first) = first else { return };
        let failed = state.gathered(Err(Error::new(Kind::TimedOut, first)));
        drop(state);
        failed.settle();
        self.wake_up.notify_one();
    }

    fn lose(&self, rank: WorkerRank, why: &str, proven: bool) {
        let mut state = self.state.lock();
        let Some(away) = state.ranks.get_mut(&rank).and_then(|held| held.worker.away_mut()) else { return };
        away.lose(why, proven);
        let why = away.missing().unwrap_or_default();
        let failed = state.gathered(Err(Error::new(Kind::PeerLost, why)));
        drop(state);
        failed.settle();
        self.wake_up.notify_one();
    }

    /// Peers find it no more. May block.
    fn withdraw_rank(self: &Arc<Self>, rank: WorkerRank) {
        if let Some(side) = &*self.side.lock() {
            side.withdraw(self, rank);
        }
    }

    /// Takes what a rank says. Errors: what it says is refused. May block where the rank registers.
    fn heard(&self, rank: WorkerRank, message: ToHead) -> Result<()> {
        match message {
            ToHead::Pool(blocks) => {
                let words = self.share_words(rank, blocks)?;
                self.tell_rank(rank, ToRank::Words, Some(words));
            }
            ToHead::Registered(metadata) => {
                self.take_registration(rank, &metadata)?;
                self.tell_rank(rank, ToRank::Taken, None);
            }
            ToHead::Output(output) => {
                self.with_away(rank, |away| away.hear(output));
                self.wake_up.notify_one();
            }
            ToHead::Digested(number) => self.with_away(rank, |away| away.digested(number)),
            ToHead::Granted { request, told } => self.with_away(rank, |away| away.granted(&request, told)),
            ToHead::GrantsOfAll(request) => self.want_grants(rank, request),
            ToHead::Alive => {}
            ToHead::Hello { .. } | ToHead::Ended(_) => {
                return Err(Error::new(Kind::Malformed, "a message out of turn"));
            }
        }
        Ok(())
    }

    pub(super) fn tell_rank(&self, rank: WorkerRank, message: ToRank, file: Option<OwnedFd>) {
        self.with_away(rank, |away| away.send(message, file));
    }

    fn with_away(&self, rank: WorkerRank, change: impl FnOnce(&mut Away)) {
        if let Some(away) = self.state.lock().ranks.get_mut(&rank).and_then(|held| held.worker.away_mut()) {
            change(away);
        }
    }

    /// The words that a rank registers beside its caches.
    fn share_words(&self, rank: WorkerRank, blocks: PoolBlocks) -> Result<OwnedFd> {
        // Made before the lock is held: they may be large.
        let first = self.state.lock().published.is_none();
        let fresh = first.then(|| Published::new(blocks.most(), self.digests())).transpose()?;
        let (copy, file) = CopiedWords::new(blocks.most())?;
        let mut state = self.state.lock();
        let away = state.ranks.get(&rank).and_then(|held| held.worker.away());
        if away.is_some_and(|away| away.metadata().is_some()) {
            return Err(Error::new(Kind::Malformed, "a message out of turn"));
        }
        let known = state.pool.as_ref().map(PoolBlocks::most);
        if let Some(known) = known.filter(|known| *known != blocks.most()) {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "{} has {} logical blocks, another rank of this engine {known}: give all of them the same",
                    name(rank),
                    blocks.most()
                ),
            ));
        }
        if state.published.is_none() {
            (state.published, state.pool) = (fresh, Some(blocks));
        }
        state.published.as_mut().ok_or_else(closed)?.share(rank, copy);
        Ok(file)
    }

    /// A rank has registered its caches: with the last, peers hear of all.
    fn take_registration(&self, rank: WorkerRank, metadata: &[u8]) -> Result<()> {
        let metadata = NixlAgentMetadata::decode(metadata, self.setup.settings.dialect)?;
        let listening = self.side.lock();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(away) = state.ranks.get_mut(&rank).and_then(|held| held.worker.away_mut()) else {
            return Ok(());
        };
        away.registered(metadata)?;
        let Some(Listening::Nixl(side)) = listening.as_ref().filter(|_| state.missing().is_none()) else {
            return Ok(());
        };
        for (rank, held) in &state.ranks {
            if let Some(metadata) = held.worker.away().and_then(Away::metadata) {
                let generation = side.publish(*rank, metadata);
                state.scheduler.registered(generation);
            }
        }
        let whole = state.gathered(Ok(()));
        drop((guard, listening));
        whole.settle();
        self.wake_up.notify_one();
        Ok(())
    }
}

/// A gathering that has ended, for whoever waits for it.
struct Gathered(Option<Ticket>, Result<()>);

impl Gathered {
    fn settle(self) {
        if let Some(ticket) = self.0 {
            ticket.settle(self.1);
        }
    }
}

impl State {
    fn may_gather(&self) -> Result<()> {
        let refused = |why: &'static str| Err(Error::new(Kind::Invalid, why));
        if self.is_closing() {
            return Err(closed());
        }
        if self.gathering.is_some() {
            return refused("ranks join this connector already: call Connector::group once");
        }
        if self.ranks.values().all(|held| held.registered.is_some()) {
            return refused("all workers have registered their caches here: none is left to join");
        }
        Ok(())
    }

    fn gathered(&mut self, result: Result<()>) -> Gathered {
        Gathered(self.gathering.as_mut().and_then(|gathering| gathering.ticket.take()), result)
    }
}

/// Listens at a path. A socket that nobody listens at any more is replaced.
fn open(path: &Path) -> Result<UnixListener> {
    let failed = |error| Error::os(format!("ranks cannot join at {}", path.display()), error);
    let listener = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if !is_left_behind(path).map_err(failed)? {
                return Err(Error::new(
                    Kind::Exhausted,
                    format!(
                        "{} is there, and no socket that an engine has left behind: name a path of its own",
                        path.display()
                    ),
                ));
            }
            std::fs::remove_file(path).map_err(failed)?;
            UnixListener::bind(path)
        }
        bound => bound,
    };
    let listener = listener.map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Whether there is a socket at a path, and nobody listens at it.
fn is_left_behind(path: &Path) -> io::Result<bool> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(connect(&socket, &SocketAddrUnix::new(path)?) == Err(Errno::CONNREFUSED))
}

/// Lets ranks in until the connector ends.
async fn gather(shared: Arc<Shared>, listener: UnixListener) {
    let listener = match tokio::net::UnixListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            let error = Error::os("ranks cannot be listened for", error);
            let failed = shared.state.lock().gathered(Err(error));
            return failed.settle();
        }
    };
    let unknown = Arc::new(Semaphore::new(UNKNOWN));
    loop {
        match listener.accept().await {
            Err(_) => sleep(AGAIN).await,
            Ok((socket, _)) => {
                let permit = Arc::clone(&unknown).acquire_owned().await.expect("nobody closes it");
                let shared = Arc::clone(&shared);
                tokio::spawn(async move {
                    let socket = Arc::new(socket);
                    let mut incoming = Incoming::new(Arc::clone(&socket));
                    match welcome(&shared, &socket, &mut incoming).await {
                        Ok(come) => {
                            drop(permit);
                            serve(&shared, socket, incoming, come).await;
                        }
                        Err(error) => {
                            tracing::warn!(%error, "a process that would join was refused");
                            refuse(&socket, error.sentence()).await;
                        }
                    }
                });
            }
        }
    }
}

/// A rank that has come.
struct Come {
    rank: WorkerRank,
    down: Receiver<Down>,
    process: Option<OwnedFd>,
}

/// Hears who it is, and gives it its place.
async fn welcome(shared: &Arc<Shared>, socket: &UnixStream, incoming: &mut Incoming) -> Result<Come> {
    let pid = same_user(socket)?;
    let process = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let hello = timeout(PATIENCE, incoming.next()).await;
    let hello = hello.map_err(|_| {
        Error::new(Kind::TimedOut, format!("process {pid} has not said within {PATIENCE:?} which rank it is"))
    })??;
    let hello = hello.map(|bytes| ToHead::decode(&bytes)).transpose()?;
    let Some(ToHead::Hello { version, rank }) = hello else {
        return Err(Error::new(Kind::Malformed, format!("process {pid} has not said which rank it is")));
    };
    if version != env!("CARGO_PKG_VERSION") {
        return Err(Error::new(
            Kind::Incompatible,
            format!(
                "{} is of kvx {version}, its engine of kvx {}: run both with the same",
                name(rank),
                env!("CARGO_PKG_VERSION")
            ),
        ));
    }
    let down = shared.seat(rank, pid)?;
    let setup = ToRank::Welcome(shared.setup.told(&shared.setup.settings.address)).encode()?;
    match timeout(PATIENCE, send(socket, &setup, None)).await {
        Ok(Ok(())) => Ok(Come { rank, down, process }),
        _ => {
            shared.lose(rank, "it has not read what the engine was built with", false);
            Err(Error::new(Kind::PeerLost, format!("{} went as it joined", name(rank))))
        }
    }
}

async fn refuse(socket: &UnixStream, why: &str) {
    if let Ok(message) = ToRank::Refused(why.to_owned()).encode() {
        timeout(LAST_WORD, send(socket, &message, None)).await.ok();
    }
    shutdown(socket, Shutdown::Both).ok(); // it may have gone
}

/// Speaks with a rank until one of the two ends.
async fn serve(shared: &Arc<Shared>, socket: Arc<UnixStream>, mut incoming: Incoming, come: Come) {
    let Come { rank, down, process } = come;
    tracing::info!(pp = rank.pp, tp = rank.tp, "a rank has joined");
    let writing = tokio::spawn(pass_down(Arc::clone(shared), rank, Arc::clone(&socket), down));
    let (why, proven) = loop {
        let message = match timeout(SILENT, incoming.next()).await {
            // A child of it may hold the socket open.
            Err(_) => {
                break (
                    format!("nothing was heard of it for {SILENT:?}"),
                    has_ended(process, Duration::ZERO).await,
                );
            }
            Ok(Ok(Some(bytes))) => ToHead::decode(&bytes),
            Ok(Ok(None)) => {
                let ended = has_ended(process, LAST_WORD).await;
                break (
                    if ended { "its process has ended" } else { "it has closed the connection" }.into(),
                    ended,
                );
            }
            Ok(Err(error)) => break (error.to_string(), has_ended(process, LAST_WORD).await),
        };
        let heard = match message {
            Ok(ToHead::Ended(None)) => break ("it has left the engine".to_owned(), true),
            Ok(ToHead::Ended(Some(why))) => {
                break (format!("it has left the engine, and its memory: {why}"), false);
            }
            Ok(message @ (ToHead::Pool(_) | ToHead::Registered(_))) => {
                let shared = Arc::clone(shared);
                let heard = tokio::task::spawn_blocking(move || shared.heard(rank, message)).await;
                heard.unwrap_or_else(|_| Err(Error::new(Kind::Closed, "the engine ends")))
            }
            Ok(message) => shared.heard(rank, message),
            Err(error) => Err(error),
        };
        if let Err(error) = heard {
            shared.tell_rank(rank, ToRank::Refused(error.sentence().to_owned()), None);
            break (error.sentence().to_owned(), false);
        }
    };
    shared.lose(rank, &why, proven);
    let withdrawing = Arc::clone(shared);
    tokio::task::spawn_blocking(move || withdrawing.withdraw_rank(rank)).await.ok();
    writing.await.ok();
}

/// Writes what goes to a rank, until nothing does any more.
async fn pass_down(shared: Arc<Shared>, rank: WorkerRank, socket: Arc<UnixStream>, mut down: Receiver<Down>) {
    while let Some((message, file)) = down.recv().await {
        let sent = match message.encode() {
            Ok(bytes) => timeout(SILENT, send(&socket, &bytes, file.as_ref().map(|file| file.as_fd()))).await,
            Err(error) => Ok(Err(error)),
        };
        match sent {
            Ok(Ok(())) => {}
            // Who reads from it hears what has become of it.
            Ok(Err(error)) if error.kind() == Kind::PeerLost => break,
            Ok(Err(error)) => {
                shared.lose(rank, error.sentence(), false);
                break;
            }
            // What was cut short cannot be followed by anything else.
            Err(_) => {
                shared.lose(rank, &format!("it has read nothing for {SILENT:?}"), false);
                break;
            }
        }
    }
    if down.is_closed() {
        shutdown(&*socket, Shutdown::Both).ok(); // it may have gone
    }
}

/// Whether a process has ended, or does so within this time: one that was killed closes its sockets first.
async fn has_ended(process: Option<OwnedFd>, within: Duration) -> bool {
    let Some(process) = process else { return false };
    let limit = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
    let asking = move || poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)) == Ok(1);
    tokio::task::spawn_blocking(asking).await.unwrap_or(false)
}
