//! A rank's end of a group: it joins, registers its memory, and carries out the engine's orders.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Completion, Deadline, Error, ErrorKind, Memory, Registry, Result, Secret};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{sleep, timeout, timeout_at};

use super::super::connector::Connector;
use super::super::dispatch::drive;
use super::super::generations::{GenerationTable, WordsMemory, len_of_words};
use super::super::host_copies::SavePoint;
use super::super::rank::Rank;
use super::super::register::{self, RegistrationNotice};
use super::super::shared::Shared;
use super::super::slot::{Slot, until};
use super::super::thread::on_its_own;
use super::super::{copies, push, shutdown};
use super::head::HeadHandle;
use super::limits::{LAST_WORD, PATIENCE, PULSE, SILENT};
use super::remote_rank::refused;
use super::setup::from_welcome;
use super::stream::{
    MessageReader, MessageWriter, no_secret, prove_as_rank, same_user, within_a_host,
};
use kvx_vllm::engine::{Fresh, PoolBlocks, RequestId, WorkerRank};
use kvx_vllm::group::{ToHead, ToRank};
use kvx_vllm::mapping::Caches;

/// The delay before another attempt to reach an engine that does not listen yet.
const AGAIN: Duration = Duration::from_millis(20);
/// The time limit for a connection attempt. Another attempt follows.
const TO_CONNECT: Duration = Duration::from_secs(3);
/// The most notes that wait for this process.
const MOST_NOTES: usize = 1 << 16;
/// The time that a rank has for its shutdown after its engine has gone.
const ALONE: Duration = Duration::from_secs(1);

/// A rank of an engine in another process, returned by [`Rank::join`]. Dropping it leaves the
/// engine, which can then load nothing any more.
pub struct JoinedRank {
    connector: Connector,
    rank: WorkerRank,
    link: Arc<EngineChannel>,
}

/// Generation counters for the caches of this rank.
enum SentGenerations {
    /// Counters in this file, which the engine raises.
    File(OwnedFd),
    /// Counters of this process, which this process raises when the engine asks for it.
    Own(Arc<Memory>),
}

/// The state that the handle and the thread share, besides the worker.
struct EngineChannel {
    up: UnboundedSender<ToHead>,
    /// Locked while a question waits for its answer.
    asking: Mutex<()>,
    answer: Arc<Slot<Result<Option<SentGenerations>>>>,
    /// Notes of the engine that this process has not taken.
    notes: Mutex<Vec<Vec<u8>>>,
    /// Why the engine is gone, unless it has ended this rank itself.
    gone: OnceLock<Error>,
}

impl Rank {
    /// Joins the engine that listens at `path` ([`Connector::group`]), as this rank.
    ///
    /// The engine sends everything that it was built with. Only `registry` and the environment are
    /// this process's own. The call blocks until the rank has joined or the deadline has passed,
    /// and waits for an engine that does not listen yet.
    ///
    /// # Errors
    /// - `TimedOut`: no engine accepted the rank by the deadline.
    /// - `PermissionDenied`: the engine refuses the rank. The rank is taken or does not exist, the
    ///   engine is of another version of kvx, or it had lost the rank and has to be restarted with
    ///   all its ranks.
    /// - `Authentication`: the engine runs as another user.
    /// - `PeerLost`, `Malformed`: the connection ended, or does not lead to an engine.
    /// - Errors of the operating system for the socket.
    pub fn join(
        path: impl AsRef<Path>,
        rank: WorkerRank,
        registry: Registry,
        deadline: impl Into<Deadline>,
    ) -> Result<JoinedRank> {
        join(EngineAddress::Path(path.as_ref().to_owned()), rank, registry, deadline.into())
    }

    /// Joins an engine that may be on another host, as [`join`](Self::join) does for one of this
    /// host.
    ///
    /// `address` is a host's name or IP address and a port, at which the engine listens
    /// ([`Connector::group_over_tcp`]). Both processes need the fleet's secret (`KVX_SECRET_FILE`).
    /// The rank's TCP backend binds the address by which this host reaches the engine, unless
    /// `VLLM_NIXL_SIDE_CHANNEL_HOST` or `tcp.bind` names another.
    ///
    /// # Errors
    /// Those of [`join`](Self::join), and:
    /// - `Invalid`: this process has no secret.
    /// - `Authentication`: the engine has another secret.
    pub fn join_over_tcp(
        address: &str,
        rank: WorkerRank,
        registry: Registry,
        deadline: impl Into<Deadline>,
    ) -> Result<JoinedRank> {
        let secret = Secret::from_environment()?.ok_or_else(no_secret)?;
        join(EngineAddress::Tcp(address.to_owned(), secret), rank, registry, deadline.into())
    }
}

fn join(
    engine: EngineAddress,
    rank: WorkerRank,
    registry: Registry,
    deadline: Deadline,
) -> Result<JoinedRank> {
    let started = on_its_own(move |started| run(engine, rank, registry, deadline, started))?;
    let limit = deadline.left().saturating_add(LAST_WORD);
    started.wait(limit.into()).unwrap_or_else(|| {
        Err(ErrorKind::TimedOut
            .because("the thread of this rank got no CPU time before the deadline"))
    })
}

/// The address at which an engine accepts its ranks.
enum EngineAddress {
    Path(PathBuf),
    /// A host and port, for ranks with this secret.
    Tcp(String, Secret),
}

impl fmt::Display for EngineAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineAddress::Path(path) => path.display().fmt(f),
            EngineAddress::Tcp(address, _) => f.write_str(address),
        }
    }
}

impl JoinedRank {
    /// Returns the rank's place in the engine.
    pub fn rank(&self) -> WorkerRank {
        self.rank
    }

    /// Registers the caches of this rank. Peers can load from them once all ranks of the engine
    /// have registered.
    ///
    /// Each region of the caches lies within one piece of `memory`. Call it once, and again after
    /// each [`give_back`](Self::give_back). It may block, because registering can pin pages and the
    /// engine has to answer.
    ///
    /// # Errors
    /// Those of [`Rank::register`], and `TimedOut` or `PeerLost` if the engine does not answer.
    pub fn register<M: Into<Arc<Memory>>>(
        &self,
        caches: Caches,
        memory: impl IntoIterator<Item = M>,
    ) -> Result<()> {
        let shared = self.connector.shared();
        register::check_block_size(shared, &caches)?;
        let _one_at_a_time = self.link.asking.lock();
        if shared.registered(self.rank).is_some() {
            let why =
                "this rank has registered its caches: give them back first (JoinedRank::give_back)";
            return Err(ErrorKind::Invalid.because(why));
        }
        let pool = PoolBlocks::of(caches.geometry());
        let blocks = pool.most();
        let sent = self.link.ask(ToHead::Pool(pool))?;
        let words = || match sent {
            Some(SentGenerations::File(file)) => {
                let memory = Memory::adopt_file(file, len_of_words(blocks, true))?;
                Ok(WordsMemory { memory: Arc::new(memory), leases: true })
            }
            Some(SentGenerations::Own(memory)) if memory.len() >= len_of_words(blocks, false) => {
                Ok(WordsMemory { memory, leases: false })
            }
            _ => Err(ErrorKind::Malformed
                .because("the engine has sent no generation counters for these caches")),
        };
        let memory = memory.into_iter().map(Into::into).collect();
        let agent = shared.state.lock().ranks.get(self.rank).and_then(|held| held.agent.clone());
        let registered = register::open(shared, self.rank, agent, caches, memory, words)?;
        let metadata = shared.setup.metadata(&registered)?;
        // Sent as the caches are taken into use, so that a later `give_back` is sent after it.
        let told = RegistrationNotice::Engine(metadata.encode(), registered.host_copies.is_some());
        let taken_up = || register::take_up(shared, self.rank, registered, told);
        self.link.answer_to(taken_up).map(drop)
    }

    /// Takes the caches out of use, for example before sleep. Peers are refused, and loads in
    /// flight end.
    ///
    /// After `Ok` only this process touches the memory, and the engine publishes and loads nothing.
    /// Caches may then be [registered](Self::register) again, also with another number of blocks if
    /// no rank of the engine has caches. Peers then need a new handshake.
    ///
    /// # Errors
    /// Call this again after an error to wait again.
    /// - Those of [`Rank::give_back`].
    /// - `TimedOut`: only this process touches the memory, but the engine did not confirm it by the
    ///   deadline.
    pub fn give_back(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        register::give_back(self.connector.shared(), self.rank, deadline.into())
    }

    /// Takes the engine's [notes](Rank::note), in their order.
    pub fn notes(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.link.notes.lock())
    }

    /// Waits until the engine has ended, or has lost this rank. `Ok` means that the engine was shut
    /// down and nothing touches the memory any more.
    ///
    /// # Errors
    /// - `PeerLost`: the engine's process is gone, or the engine has given this rank up.
    /// - `TimedOut`, `Malformed`, `Invalid`: the engine did not answer in time, broke the protocol,
    ///   or refused a message of this rank.
    /// - Those of [`Connector::shutdown`].
    pub async fn ended(&self) -> Result<()> {
        self.connector.outcomes_ready().await;
        self.end()
    }

    /// Blocks the thread until the engine has ended, as [`ended`](Self::ended) does without
    /// blocking. Returns `None` if the deadline passed first.
    ///
    /// # Errors
    /// Those of [`ended`](Self::ended).
    pub fn ended_blocking(&self, deadline: impl Into<Deadline>) -> Option<Result<()>> {
        self.connector.outcomes_ready_blocking(deadline).then(|| self.end())
    }

    fn end(&self) -> Result<()> {
        let result = result_of(self.connector.shared());
        self.link.gone.get().cloned().map_or(Ok(()), Err).and(result)
    }

    /// Leaves the engine. `Ok` means that nothing touches the memory any more.
    ///
    /// # Errors
    /// Those of [`Connector::shutdown`].
    pub fn leave(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        self.connector.shutdown(deadline)
    }
}

impl fmt::Debug for JoinedRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinedRank(pp {}, tp {})", self.rank.pp, self.rank.tp)
    }
}

impl EngineChannel {
    /// Asks the engine a question. After a timeout the engine counts as lost, because its answer
    /// might come later and be taken for that of another question.
    fn ask(&self, question: ToHead) -> Result<Option<SentGenerations>> {
        self.answer_to(|| self.up.send(question).map_err(|_| self.lost()))
    }

    /// Waits for the answer to a question that `ask` sends.
    fn answer_to(&self, ask: impl FnOnce() -> Result<()>) -> Result<Option<SentGenerations>> {
        if self.gone.get().is_some() {
            return Err(self.lost());
        }
        drop(self.answer.take()); // the answer to an abandoned question
        ask()?;
        self.answer.wait(PATIENCE.into()).unwrap_or_else(|| {
            let late = ErrorKind::TimedOut
                .because(format!("the engine has not answered within {PATIENCE:?}: join again"));
            self.gone.set(late.clone()).ok();
            Err(late)
        })
    }

    fn lost(&self) -> Error {
        let ended = || ErrorKind::Closed.because("this rank has left its engine: join again");
        self.gone.get().cloned().unwrap_or_else(ended)
    }
}

async fn run(
    engine: EngineAddress,
    rank: WorkerRank,
    registry: Registry,
    deadline: Deadline,
    started: Arc<Slot<Result<JoinedRank>>>,
) {
    let entered = match timeout_at(until(deadline).into(), enter(&engine, rank)).await {
        Ok(entered) => entered,
        Err(_) => Err(ErrorKind::TimedOut.because(format!(
            "no engine accepted this rank at {engine} in time: check that the engine runs and \
             listens there (Connector::group, group_over_tcp)"
        ))),
    };
    let set_up = entered.and_then(|(outgoing, incoming, told)| {
        let own = incoming.own_address();
        Ok((outgoing, incoming, from_welcome(&told, own, registry)?))
    });
    let (outgoing, incoming, (mut setup, secret)) = match set_up {
        Ok(set_up) => set_up,
        Err(error) => return started.set(Err(error)),
    };
    // Starts to send signs of life now, because resolving a name may take long.
    let (up, going_up) = unbounded_channel();
    let writing = tokio::spawn(pass_up(outgoing, going_up));
    setup.bind_beside_the_side_channel().await;
    let runtime = tokio::runtime::Handle::current();
    let shared = match Shared::of_rank(setup, rank, up.clone(), secret, runtime) {
        Ok(shared) => Arc::new(shared),
        Err(error) => return started.set(Err(error)),
    };
    let (asking, answer, gone) = (Mutex::default(), Slot::new(), OnceLock::new());
    let link = Arc::new(EngineChannel { up, asking, answer, notes: Mutex::new(Vec::new()), gone });
    let connector = Connector::of(Arc::clone(&shared));
    started.set(Ok(JoinedRank { connector, rank, link: Arc::clone(&link) }));
    drop(started);
    tokio::spawn(obey(Arc::clone(&shared), rank, Arc::clone(&link), incoming));
    drive(&shared).await;
    let result = result_of(&shared);
    // An engine that has gone needs no report.
    link.up.send(ToHead::Ended(result.err().map(|error| error.to_string()))).ok();
    timeout(LAST_WORD, writing).await.ok();
}

/// Joins the engine. Returns the connection and what the engine was built with.
async fn enter(
    engine: &EngineAddress,
    rank: WorkerRank,
) -> Result<(MessageWriter, MessageReader, String)> {
    let (mut outgoing, mut incoming) = loop {
        match engine.connect().await {
            Ok(Ok(connected)) => break connected,
            Ok(Err(refused)) => return Err(refused),
            Err(error) if is_early(&error) => sleep(AGAIN).await,
            Err(error) => {
                return Err(Error::os(format!("this rank cannot join at {engine}"), error));
            }
        }
    };
    let hello = ToHead::Hello { version: env!("CARGO_PKG_VERSION").to_owned(), rank };
    outgoing.send(&hello.encode()?, None).await.ok(); // the answer says why it was refused
    match incoming.next().await?.map(|bytes| ToRank::decode(&bytes)).transpose()? {
        Some(ToRank::Welcome(told)) => Ok((outgoing, incoming, told)),
        Some(ToRank::Refused(why)) => {
            Err(ErrorKind::PermissionDenied.because(format!("the engine refused this rank: {why}")))
        }
        Some(_) => Err(ErrorKind::Malformed.because("the engine's first message is not a welcome")),
        None => Err(ErrorKind::PeerLost
            .because("the engine closed the connection before it accepted this rank")),
    }
}

impl EngineAddress {
    /// Connects to the engine. The inner error says why this process is refused, the outer one why
    /// no connection was made.
    async fn connect(&self) -> io::Result<Result<(MessageWriter, MessageReader)>> {
        match self {
            EngineAddress::Path(path) => {
                let socket = UnixStream::connect(path).await?;
                Ok(same_user(&socket).map(|_| within_a_host(socket)))
            }
            EngineAddress::Tcp(address, secret) => {
                let socket = timeout(TO_CONNECT, TcpStream::connect(address)).await;
                let socket = socket.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
                let proven = timeout(PATIENCE, prove_as_rank(socket, secret)).await;
                let late = || {
                    ErrorKind::TimedOut
                        .because(format!("{address} did not authenticate within {PATIENCE:?}"))
                };
                Ok(proven.unwrap_or_else(|_| Err(late())))
            }
        }
    }
}

/// Returns whether the engine may not listen yet, or its host may not be up yet.
fn is_early(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::WouldBlock
            | io::ErrorKind::TimedOut
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
    ) || error.raw_os_error().is_none() && error.kind() != io::ErrorKind::InvalidInput // the name is not known yet
}

/// Carries out the engine's messages until one of the two ends.
async fn obey(
    shared: Arc<Shared>,
    rank: WorkerRank,
    link: Arc<EngineChannel>,
    mut incoming: MessageReader,
) {
    // The counters of this process, if the engine cannot raise them itself.
    let mut own_words: Option<GenerationTable> = None;
    let gone = loop {
        let message = match incoming.next().await {
            Ok(Some(bytes)) => ToRank::decode(&bytes),
            Ok(None) => {
                let why = "the engine's process is gone, or the engine has given this rank up";
                break ErrorKind::PeerLost.because(why);
            }
            Err(error) => break error,
        };
        match message {
            Ok(ToRank::Step(meta)) => shared.with_state(|state, now| {
                // The engine has started the load in its process.
                if let Some(held) = state.ranks.get_mut(rank) {
                    held.begin(now, meta);
                }
            }),
            Ok(ToRank::Words(None)) => {
                link.answer.set(Ok(incoming.take_file().map(SentGenerations::File)))
            }
            Ok(ToRank::Words(Some(what))) => {
                let made = GenerationTable::made(what);
                link.answer.set(
                    made.map(|words| Some(SentGenerations::Own(own_words.insert(words).memory()))),
                );
            }
            Ok(ToRank::Raise { number, stamp, blocks }) => {
                own_words.iter().for_each(|words| words.raise(&blocks, stamp));
                link.up.send(ToHead::Raised(number)).ok(); // it may have gone
            }
            Ok(ToRank::Taken) => link.answer.set(Ok(None)),
            Ok(ToRank::GivenBack) => shared.state.lock().head.iter().for_each(HeadHandle::confirm),
            Ok(ToRank::Refused(why)) => {
                break ErrorKind::Invalid
                    .because(format!("the engine refused a message of this rank: {why}"));
            }
            Ok(ToRank::Digest { number, fresh }) => {
                write_digests(&shared, rank, &link, number, fresh)
            }
            Ok(ToRank::Save { number, of, early, blocks }) => {
                let up = link.up.clone();
                let done = move |result: Result<(), String>| {
                    // An engine that has gone needs no report.
                    up.send(ToHead::Done { number, failed: result.err() }).ok();
                };
                let when = if early { SavePoint::Early } else { SavePoint::AtEnd };
                match shared.registered(rank) {
                    Some(own) => copies::save_here(&shared, rank, &own, (of, blocks, when), done),
                    None => done(Err("this rank has given its caches back".to_owned())),
                }
            }
            Ok(ToRank::Grant(request)) => {
                tokio::spawn(grant(Arc::clone(&shared), Arc::clone(&link), request));
            }
            Ok(ToRank::Grants { request, told }) => {
                shared.state.lock().grants.answer(&request, told.map_err(refused));
            }
            Ok(ToRank::Note(note)) => {
                let mut notes = link.notes.lock();
                if notes.len() == MOST_NOTES {
                    break ErrorKind::Exhausted
                        .because(format!("{MOST_NOTES} notes of the engine were left untaken"));
                }
                notes.push(note);
            }
            Ok(ToRank::End(within)) => drop(shutdown::request(&shared, within.into())),
            Ok(ToRank::Welcome(_)) => {
                break ErrorKind::Malformed.because("the engine sent a second welcome");
            }
            Err(error) => break error,
        }
    };
    if !shared.is_closed() {
        tracing::warn!(%gone, "this rank has lost its engine");
        link.gone.set(gone.clone()).ok();
    }
    link.answer.set(Err(gone));
    let mut state = shared.state.lock();
    state.grants.forget_questions();
    state.head.iter().for_each(HeadHandle::confirm_all);
    drop(state);
    drop(shutdown::request(&shared, ALONE.into()));
}

/// Returns the result of the connector's shutdown.
fn result_of(shared: &Shared) -> Result<()> {
    shared.state.lock().shutdown.result().cloned().unwrap_or(Ok(()))
}

/// Writes the digests that the engine asks for.
fn write_digests(
    shared: &Arc<Shared>,
    rank: WorkerRank,
    link: &Arc<EngineChannel>,
    number: u64,
    fresh: Vec<Fresh>,
) {
    let (shared, link) = (Arc::clone(shared), Arc::clone(link));
    tokio::task::spawn_blocking(move || {
        if let Some(own) = shared.registered(rank) {
            copies::publish_digests(&shared, rank, &own, &fresh);
        }
        link.up.send(ToHead::Done { number, failed: None }).ok(); // the engine may have gone
    });
}

/// Sends the engine this rank's grants for a request.
async fn grant(shared: Arc<Shared>, link: Arc<EngineChannel>, request: RequestId) {
    let grants = push::grants_here(&shared, &request).await;
    let told = grants.map_err(|error| error.sentence().to_owned());
    let told = told.map(|grants| grants.into_iter().flat_map(|grant| grant.regions).collect());
    link.up.send(ToHead::Granted { request, told }).ok(); // the engine may have gone
}

/// Writes the messages to the engine up to the last one, with signs of life in between.
async fn pass_up(mut outgoing: MessageWriter, mut going_up: UnboundedReceiver<ToHead>) {
    loop {
        let message = timeout(PULSE, going_up.recv()).await.unwrap_or(Some(ToHead::Alive));
        let Some(message) = message else { return }; // all senders have gone
        let last = matches!(message, ToHead::Ended(_));
        let sent = match message.encode() {
            // No message can follow one that was cut short.
            Ok(bytes) => {
                timeout(SILENT, outgoing.send(&bytes, None)).await.is_ok_and(|sent| sent.is_ok())
            }
            Err(_) => false,
        };
        if last || !sent {
            outgoing.end();
            return;
        }
    }
}
