//! The socket at which ranks join, and the connections to them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, ErrorKind, Result, Secret};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::Receiver;
use tokio::time::{sleep, timeout};

use super::super::refusal_log::RefusalLog;
use super::super::shared::Shared;
use super::super::zmtp::counted;
use super::gathering::JoinAddress;
use super::limits::{IMPATIENCE, LAST_WORD, PATIENCE, SILENT};
use super::members::{self, ENDED};
use super::process::ProcessHandle;
use super::remote_rank::{RankMessage, RankProcess, rank_name};
use super::stream::{
    MessageReader, MessageWriter, no_secret, prove_as_engine, same_user, within_a_host,
};
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::group::{ToHead, ToRank};

/// The number of processes that may be connected without having named their rank. Others wait.
const UNKNOWN: usize = 64;
/// The limit for such processes at one address (IPv6: a /64). Further connections are dropped.
pub(super) const OF_ONE_ADDRESS: usize = 48;
/// The delay before another attempt to accept a connection.
const AGAIN: Duration = Duration::from_millis(10);

/// The listening socket for ranks.
pub(super) enum RankListener {
    Unix(UnixListener),
    /// A socket whose peers have to prove the secret.
    Tcp(TcpListener, Secret),
}

/// A connection whose peer is still unknown.
enum UnknownProcess {
    Unix(UnixStream),
    Tcp(TcpStream, SocketAddr, Secret),
}

impl RankListener {
    /// Starts to listen. Needs a runtime.
    pub(super) fn open(at: &JoinAddress, secret: Option<&Secret>) -> Result<Self> {
        match at {
            JoinAddress::Path(path) => {
                let failed =
                    |error| Error::os(format!("ranks cannot join at {}", path.display()), error);
                let listener = open(path)?;
                Ok(RankListener::Unix(UnixListener::from_std(listener).map_err(failed)?))
            }
            JoinAddress::Tcp(address) => {
                let secret = secret.ok_or_else(no_secret)?;
                if address.port() == 0 {
                    let why = "ranks have to know the port: name one other than 0";
                    return Err(ErrorKind::Invalid.because(why));
                }
                let failed = |error| Error::os(format!("ranks cannot join at {address}"), error);
                let listener = std::net::TcpListener::bind(address).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                Ok(RankListener::Tcp(
                    TcpListener::from_std(listener).map_err(failed)?,
                    secret.clone(),
                ))
            }
        }
    }

    async fn accept(&self) -> io::Result<UnknownProcess> {
        Ok(match self {
            RankListener::Unix(listener) => UnknownProcess::Unix(listener.accept().await?.0),
            RankListener::Tcp(listener, secret) => {
                let (socket, from) = listener.accept().await?;
                UnknownProcess::Tcp(socket, from, secret.clone())
            }
        })
    }
}

/// The number of connections from each address whose peer is still unknown.
#[derive(Clone, Default)]
pub(super) struct UnprovenCounts(Arc<Mutex<BTreeMap<IpAddr, usize>>>);

/// A connection whose peer is still unknown. It is counted until this is dropped.
pub(super) struct UnprovenConnection(UnprovenCounts, IpAddr);

impl UnprovenCounts {
    /// Counts a connection from this address. Returns `None` if there are [`OF_ONE_ADDRESS`]
    /// already.
    pub(super) fn one_more(&self, from: SocketAddr) -> Option<UnprovenConnection> {
        let of = counted(from);
        let mut counts = self.0.lock();
        let count = counts.entry(of).or_default();
        if *count == OF_ONE_ADDRESS {
            return None;
        }
        *count += 1;
        Some(UnprovenConnection(self.clone(), of))
    }
}

impl Drop for UnprovenConnection {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) = self.0.0.lock().entry(self.1) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// Listens at a path. Replaces a socket at which no process listens any more.
fn open(path: &Path) -> Result<StdUnixListener> {
    let failed = |error| Error::os(format!("ranks cannot join at {}", path.display()), error);
    let listener = match StdUnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if !is_left_behind(path).map_err(failed)? {
                return Err(ErrorKind::Exhausted.because(format!(
                    "{} exists and is in use, or is not a socket: choose another path",
                    path.display()
                )));
            }
            std::fs::remove_file(path).map_err(failed)?;
            StdUnixListener::bind(path)
        }
        bound => bound,
    };
    let listener = listener.map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Returns whether a path is a socket at which no process listens.
fn is_left_behind(path: &Path) -> io::Result<bool> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(connect(&socket, &SocketAddrUnix::new(path)?) == Err(Errno::CONNREFUSED))
}

/// Accepts ranks until the connector ends.
pub(super) async fn gather(shared: Arc<Shared>, listener: RankListener) {
    let (unknown, unproven) = (Arc::new(Semaphore::new(UNKNOWN)), UnprovenCounts::default());
    let warned = Arc::new(RefusalLog::default());
    loop {
        let Ok(process) = listener.accept().await else {
            sleep(AGAIN).await;
            continue;
        };
        let counted = match &process {
            UnknownProcess::Unix(_) => None,
            UnknownProcess::Tcp(_, from, _) => match unproven.one_more(*from) {
                Some(counted) => Some(counted),
                None => continue, // drops the connection
            },
        };
        let permit = Arc::clone(&unknown).acquire_owned().await.expect("nobody closes it");
        let (shared, warned) = (Arc::clone(&shared), Arc::clone(&warned));
        tokio::spawn(async move {
            let mut admitted = match prove(process).await {
                Ok(admitted) => admitted,
                Err(error) => return log_refusal(&warned, &error),
            };
            match welcome(&shared, &mut admitted).await {
                Ok((rank, down)) => {
                    drop((permit, counted));
                    serve(&shared, admitted, rank, down).await;
                }
                Err(error) => {
                    log_refusal(&warned, &error);
                    refuse(&mut admitted.outgoing, error.sentence()).await;
                }
            }
        });
    }
}

fn log_refusal(log: &RefusalLog, error: &Error) {
    if let Some(suppressed) = log.count() {
        tracing::warn!(%error, suppressed, "a process that tried to join was refused");
    }
}

/// A process that may join: one of this user, or one that has proved the secret.
struct AdmittedProcess {
    outgoing: MessageWriter,
    incoming: MessageReader,
    newcomer: RankProcess,
}

/// Checks whether a process may join. Errors: it may not.
async fn prove(process: UnknownProcess) -> Result<AdmittedProcess> {
    match process {
        UnknownProcess::Unix(socket) => {
            let pid = match same_user(&socket) {
                Ok(pid) => pid,
                Err(error) => {
                    refuse(&mut within_a_host(socket).0, error.sentence()).await;
                    return Err(error);
                }
            };
            let life = ProcessHandle::open(pid);
            let (outgoing, incoming) = within_a_host(socket);
            let process = format!("process {pid}").into();
            let newcomer = RankProcess { process, life, distant: false };
            Ok(AdmittedProcess { outgoing, incoming, newcomer })
        }
        UnknownProcess::Tcp(socket, from, secret) => {
            let proven = timeout(IMPATIENCE, prove_as_engine(socket, &secret)).await;
            let late = || {
                ErrorKind::TimedOut
                    .because(format!("it did not authenticate within {IMPATIENCE:?}"))
            };
            let (outgoing, incoming) = proven
                .unwrap_or_else(|_| Err(late()))
                .map_err(|error| Error::new(error.kind(), format!("{from}: {error}")))?;
            let process = format!("the process at {from}").into();
            Ok(AdmittedProcess {
                outgoing,
                incoming,
                newcomer: RankProcess { process, life: None, distant: true },
            })
        }
    }
}

/// Asks a process for its rank, and assigns it.
async fn welcome(
    shared: &Arc<Shared>,
    admitted: &mut AdmittedProcess,
) -> Result<(WorkerRank, Receiver<RankMessage>)> {
    let AdmittedProcess { outgoing, incoming, newcomer, .. } = admitted;
    let process = &newcomer.process;
    let hello = timeout(PATIENCE, incoming.next()).await;
    let hello = hello.map_err(|_| {
        ErrorKind::TimedOut.because(format!("{process} did not name its rank within {PATIENCE:?}"))
    })??;
    let hello = hello.map(|bytes| ToHead::decode(&bytes)).transpose()?;
    let Some(ToHead::Hello { version, rank }) = hello else {
        return Err(ErrorKind::Malformed.because(format!("{process} did not name its rank")));
    };
    if version != env!("CARGO_PKG_VERSION") {
        return Err(ErrorKind::Incompatible.because(format!(
            "{} runs kvx {version}, its engine kvx {}: run both with the same version",
            rank_name(rank),
            env!("CARGO_PKG_VERSION")
        )));
    }
    let down = members::seat(shared, rank, newcomer)?;
    let setup = ToRank::Welcome(shared.setup.welcome()).encode()?;
    match timeout(PATIENCE, outgoing.send(&setup, None)).await {
        Ok(Ok(())) => Ok((rank, down)),
        _ => {
            members::lose(shared, rank, "it has not read the engine's setup", false);
            Err(ErrorKind::PeerLost.because(format!(
                "{} did not read the engine's setup when it joined",
                rank_name(rank)
            )))
        }
    }
}

async fn refuse(outgoing: &mut MessageWriter, why: &str) {
    if let Ok(message) = ToRank::Refused(why.to_owned()).encode() {
        timeout(LAST_WORD, outgoing.send(&message, None)).await.ok();
    }
    outgoing.end();
}

/// Handles a rank's connection until one of the two ends.
async fn serve(
    shared: &Arc<Shared>,
    admitted: AdmittedProcess,
    rank: WorkerRank,
    down: Receiver<RankMessage>,
) {
    let AdmittedProcess { outgoing, mut incoming, newcomer } = admitted;
    let life = newcomer.life;
    tracing::info!(pp = rank.pp, tp = rank.tp, process = %newcomer.process, "a rank has joined");
    let writing = tokio::spawn(pass_down(Arc::clone(shared), rank, outgoing, down));
    let (why, proven) = loop {
        let message = match timeout(SILENT, incoming.next()).await {
            // A child process may keep the socket open.
            Err(_) => {
                break (
                    format!("it was silent for {SILENT:?}"),
                    has_ended(life, Duration::ZERO).await,
                );
            }
            Ok(Ok(Some(bytes))) => ToHead::decode(&bytes),
            Ok(Ok(None)) => {
                let ended = has_ended(life, LAST_WORD).await;
                break (if ended { ENDED } else { "it has closed the connection" }.into(), ended);
            }
            Ok(Err(error)) => break (error.to_string(), has_ended(life, LAST_WORD).await),
        };
        let heard = match message {
            Ok(ToHead::Ended(None)) => break ("it has left the engine".to_owned(), true),
            Ok(ToHead::Ended(Some(why))) => {
                break (
                    format!("it has left the engine, and its memory may still be in use: {why}"),
                    false,
                );
            }
            Ok(message @ (ToHead::Pool(_) | ToHead::Registered { .. } | ToHead::GivesBack)) => {
                let shared = Arc::clone(shared);
                let heard = tokio::task::spawn_blocking(move || {
                    members::take_message(&shared, rank, message)
                })
                .await;
                heard.unwrap_or_else(|_| {
                    Err(ErrorKind::Closed.because("the engine is shutting down"))
                })
            }
            Ok(message) => members::take_message(shared, rank, message),
            Err(error) => Err(error),
        };
        if let Err(error) = heard {
            members::send(shared, rank, ToRank::Refused(error.sentence().to_owned()), None);
            break (error.sentence().to_owned(), false);
        }
    };
    members::lose(shared, rank, &why, proven);
    let shared = Arc::clone(shared);
    let withdraw = move || shared.listening.lock().iter().for_each(|on| on.withdraw(rank));
    tokio::task::spawn_blocking(withdraw).await.ok();
    writing.await.ok();
}

/// Writes the messages to a rank until there are no more.
async fn pass_down(
    shared: Arc<Shared>,
    rank: WorkerRank,
    mut outgoing: MessageWriter,
    mut down: Receiver<RankMessage>,
) {
    while let Some((message, file)) = down.recv().await {
        let sent = match message.encode() {
            Ok(bytes) => {
                timeout(SILENT, outgoing.send(&bytes, file.as_ref().map(|file| file.as_fd()))).await
            }
            Err(error) => Ok(Err(error)),
        };
        match sent {
            Ok(Ok(())) => {}
            // The reading task finds out the reason.
            Ok(Err(error)) if error.kind() == ErrorKind::PeerLost => break,
            Ok(Err(error)) => {
                members::lose(&shared, rank, error.sentence(), false);
                break;
            }
            // No message can follow one that was cut short.
            Err(_) => {
                members::lose(&shared, rank, &format!("it has read nothing for {SILENT:?}"), false);
                break;
            }
        }
    }
    if down.is_closed() {
        outgoing.end();
    }
}

/// Returns whether a process has ended, or does so within this time. A killed process closes its
/// sockets before it has ended.
async fn has_ended(life: Option<Arc<ProcessHandle>>, within: Duration) -> bool {
    let Some(life) = life else { return false };
    tokio::task::spawn_blocking(move || life.has_ended(within)).await.unwrap_or(false)
}
