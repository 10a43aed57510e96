//! The socket that ranks join at: who comes, and what goes to and fro.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, Kind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown, socket_with,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::Receiver;
use tokio::time::{sleep, timeout};

use super::super::state::Shared;
use super::away::{Down, name};
use super::stream::{Incoming, same_user, send};
use super::{LAST_WORD, PATIENCE, SILENT};
use crate::engine::WorkerRank;
use crate::wire::group::{ToHead, ToRank};

/// Processes that have connected and not said yet who they are; others wait.
const UNKNOWN: usize = 64;
/// A socket that cannot be accepted is tried again after this.
const AGAIN: Duration = Duration::from_millis(10);

/// Listens at a path. A socket that nobody listens at any more is replaced.
pub(super) fn open(path: &Path) -> Result<UnixListener> {
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
pub(super) async fn gather(shared: Arc<Shared>, listener: UnixListener) {
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
            Ok(message @ (ToHead::Pool(_) | ToHead::Registered(_) | ToHead::GivesBack)) => {
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
