//! The side channel of a prefill with the MooncakeConnector: a ROUTER for each worker. A decode's
//! question is answered request by request, each when its blocks are written.
//!
//! With a secret, decodes authenticate first, by a [session](super::session). A plain Mooncake
//! agent cannot, so its questions are accepted only if the backend `MOONCAKE` is open, which an
//! operator has to allow.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, ErrorKind, Result};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::refusal_log::RefusalLog;
use super::super::setup::MOONCAKE;
use super::super::shared::Shared;
use super::super::zmtp::{
    ConnectionHandler, Message, MessageLimits, PeerLimits, Received, Router, RouterConnection,
    RouterLimits,
};
use super::bootstrap::BootstrapServer;
use super::channels::{Channels, Listeners};
use super::session::Session;
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::engine::mooncake::AskId;
use kvx_vllm::wire::mooncake::{
    OlderAnswer, OlderPullRequest, PullRequest, PullResponse, PullStatus,
};

/// The limits for decodes that have authenticated. Each waiting load has a connection.
const DECODES: PeerLimits = PeerLimits {
    connections: 4096,
    message: MessageLimits { frames: 4, bytes: Session::sealed_len(PullRequest::MAX_LEN) },
    bytes: 4 * PullRequest::MAX_LEN,
};
/// The limits for decodes that need not authenticate.
const PLAIN: PeerLimits =
    PeerLimits { message: MessageLimits { frames: 4, bytes: PullRequest::MAX_LEN }, ..DECODES };
/// The limits for decodes that have yet to authenticate. A hello has some 80 bytes.
const UNPROVEN: PeerLimits = PeerLimits {
    connections: 512,
    message: MessageLimits { frames: 4, bytes: 4 << 10 },
    bytes: 4 << 20,
};
/// The time limit for authentication after the greeting, and those of [`RouterLimits`].
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of answers that may wait to be sent on a connection. A decode that does not read them
/// loses the connection.
const ANSWERS: usize = 4096;

/// The handler of the connections to one worker's ROUTER.
struct DecodeChannel {
    shared: Weak<Shared>,
    rank: WorkerRank,
    last: AtomicU32,
    refusals: RefusalLog,
}

/// Starts to answer peers.
pub(in super::super) fn serve(listeners: Listeners, shared: &Arc<Shared>) -> Result<Channels> {
    let bootstrap = listeners.bootstrap.map(|listener| {
        let (clock, secret) = (shared.clock, shared.secret.clone());
        let open_queries = !must_authenticate(shared);
        Arc::new(BootstrapServer::serve(listener, clock, secret, open_queries))
    });
    let router = |(rank, listener)| Ok((rank, serve_rank(listener, shared, rank)?));
    Ok(Channels {
        host: listeners.host,
        bootstrap,
        routers: listeners.ranks.into_iter().map(router).collect::<Result<_>>()?,
        engine: shared.setup.settings.engine.clone(),
        data_parallel: shared.setup.data_parallel,
        announcements: Mutex::default(),
    })
}

/// Serves a worker's side channel until it is dropped.
fn serve_rank(listener: TcpListener, shared: &Arc<Shared>, rank: WorkerRank) -> Result<Router> {
    let limits = RouterLimits {
        unauthenticated: if must_authenticate(shared) { UNPROVEN } else { PLAIN },
        authenticated: DECODES,
        answers: 64 << 20,
        patience: PATIENCE,
    };
    let (shared, last, refusals) =
        (Arc::downgrade(shared), AtomicU32::new(0), RefusalLog::default());
    let channel = DecodeChannel { shared, rank, last, refusals };
    Router::serve_by(listener, limits, Arc::new(channel))
}

/// Returns whether every decode has to prove the secret.
fn must_authenticate(shared: &Shared) -> bool {
    shared.secret.is_some() && !shared.setup.admits_mooncake_agents()
}

impl DecodeChannel {
    fn log_refusal(&self, taken: Result<()>) {
        if let Err(error) = taken
            && let Some(suppressed) = self.refusals.count()
        {
            tracing::warn!(%error, suppressed, "a decode's question was refused");
        }
    }
}

/// Builds the answer to a refused question.
fn refusal(older: bool, question: &[u8], error: &Error) -> Vec<u8> {
    let is_plain =
        || OlderPullRequest::decode(question).map_or(true, |asked| asked.kvx_question.is_none());
    if older && is_plain() {
        return OlderAnswer::Failed.encode().to_vec();
    }
    let mut refusal = PullResponse::new(PullStatus::Error);
    (refusal.err_msg, refusal.kvx_settled) = (Some(error.to_string()), true);
    refusal.encode()
}

/// Removes the return path when its connection ends.
struct ForgetAskerOnDrop<'a> {
    talker: &'a DecodeChannel,
    connection: u32,
}

impl Drop for ForgetAskerOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(shared) = self.talker.shared.upgrade() {
            shared.mooncake.askers.remove((self.talker.rank, self.connection));
        }
    }
}

/// Checks that a decode may ask without a session.
///
/// Errors: `Authentication`: it has no secret, or does not prove it.
fn admits_plain(shared: &Shared, rank: WorkerRank) -> Result<()> {
    let is_open =
        || shared.registered(rank).is_some_and(|own| own.agent.backends().contains(&MOONCAKE));
    if shared.secret.is_none() || is_open() {
        return Ok(());
    }
    Err(ErrorKind::Authentication.because(
        "this prefill has a shared secret and the decode has none: set KVX_SECRET_FILE there to \
         the same secret",
    ))
}

/// Answers a hello. Returns the session, and the answer that proves the secret.
///
/// Errors: `Authentication`: the decode has another secret, or this prefill has none.
fn accept(shared: &Shared, hello: &[u8]) -> Result<(Session, Vec<u8>)> {
    let secret = shared.secret.as_ref().ok_or_else(|| {
        ErrorKind::Authentication.because(
            "this decode has a shared secret and the prefill has none: give both the same secret, \
             or neither",
        )
    })?;
    Session::accept(secret, hello)
}

/// A connection of a decode.
struct DecodeConnection {
    peer: RouterConnection,
    /// True for a REQ socket, which asks before vLLM 0.16. It sends an empty frame before each
    /// message, and expects one back.
    older: bool,
    session: Option<Session>,
}

impl DecodeConnection {
    /// Returns the frame of a message that counts. The first one is the socket's name.
    fn content<'a>(&self, message: &'a Message) -> &'a [u8] {
        message.frames().get(1 + usize::from(self.older)).map_or(&[][..], Vec::as_slice)
    }

    async fn send(&mut self, answer: Vec<u8>) -> Result<()> {
        let answer = match &mut self.session {
            Some(session) => session.seal(&answer),
            None => answer,
        };
        let frames: Vec<_> = self.older.then(Vec::new).into_iter().chain([answer]).collect();
        self.peer.send(&frames).await
    }

    /// Proves the secret to a decode that has sent a hello, and waits for its own proof.
    async fn authenticate(&mut self, mut session: Session, proof: Vec<u8>) -> Result<()> {
        self.send(proof).await?;
        let message = timeout(PATIENCE, self.peer.receive()).await.map_err(|_| unproven())??;
        session.open(self.content(&message.ok_or_else(unproven)?))?;
        self.peer.set_authenticated()?;
        self.session = Some(session);
        Ok(())
    }
}

fn unproven() -> Error {
    ErrorKind::Authentication
        .because(format!("the decode has not proved this fleet's secret within {PATIENCE:?}"))
}

impl DecodeChannel {
    /// Handles a message: a hello or a question.
    async fn take(
        &self,
        decode: &mut DecodeConnection,
        ask: AskId,
        message: &Message,
    ) -> Result<()> {
        // Expected race: the connector ends while a decode asks.
        let Some(shared) = self.shared.upgrade() else { return Ok(()) };
        let content = decode.content(message);
        let opened;
        let question = match &mut decode.session {
            Some(session) => {
                opened = session.open(content)?;
                &opened[..]
            }
            None if Session::is_hello(content) => match accept(&shared, content) {
                Ok((session, proof)) => {
                    drop(shared);
                    return decode.authenticate(session, proof).await;
                }
                Err(error) => {
                    self.log_refusal(Err(error.clone()));
                    return decode.send(refusal(false, content, &error)).await;
                }
            },
            None => match admits_plain(&shared, self.rank) {
                Ok(()) => content,
                Err(error) => {
                    self.log_refusal(Err(error.clone()));
                    return decode.send(refusal(decode.older, content, &error)).await;
                }
            },
        };
        // Decoded before the lock, because it may be long.
        let mut taken = Ok(());
        if decode.older {
            let question = OlderPullRequest::decode(question);
            shared.report_mooncake(self.rank, |worker, now| {
                taken = worker.older_asked(now, ask, question);
            });
        } else {
            let question = PullRequest::decode(question);
            shared.report_mooncake(self.rank, |worker, now| {
                taken = worker.asked(now, ask, question);
            });
        }
        self.log_refusal(taken);
        Ok(())
    }

    /// Sends an answer or handles a message, whichever is ready first. Returns false once the
    /// connection has ended.
    async fn turn(
        &self,
        decode: &mut DecodeConnection,
        answers: &mut mpsc::Receiver<Vec<u8>>,
        ask: AskId,
    ) -> Result<bool> {
        tokio::select! {
            answer = answers.recv() => {
                let Some(answer) = answer else { return Ok(false) };
                decode.send(answer).await?;
            },
            readable = decode.peer.readable() => {
                readable?;
                match decode.peer.receive_one().await? {
                    Received::Message(message) => self.take(decode, ask, &message).await?,
                    Received::Command => {}
                    Received::End => return Ok(false),
                }
            }
        }
        Ok(true)
    }
}

impl ConnectionHandler for DecodeChannel {
    async fn talk(&self, peer: RouterConnection) -> Result<()> {
        let connection = self.last.fetch_add(1, Ordering::Relaxed);
        let _gone = ForgetAskerOnDrop { talker: self, connection };
        let (way_back, mut answers) = mpsc::channel(ANSWERS);
        // Expected race: the connector ends while a decode connects.
        let Some(shared) = self.shared.upgrade() else { return Ok(()) };
        shared.mooncake.askers.insert((self.rank, connection), way_back);
        let older = shared.is_older_mooncake();
        let must_authenticate = must_authenticate(&shared);
        drop(shared);
        let mut decode = DecodeConnection { peer, older, session: None };
        let deadline = Instant::now() + PATIENCE;
        let mut turns = 0_u32;
        loop {
            let ask = AskId(u64::from(connection) << 32 | u64::from(turns));
            turns = turns.wrapping_add(1);
            let awaits_proof = must_authenticate && decode.session.is_none();
            let turn = self.turn(&mut decode, &mut answers, ask);
            let is_open = if awaits_proof {
                timeout_at(deadline, turn).await.map_err(|_| unproven())??
            } else {
                turn.await?
            };
            if !is_open {
                return Ok(());
            }
        }
    }
}
