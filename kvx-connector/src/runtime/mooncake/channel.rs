//! The side channel of a prefill with the MooncakeConnector: a ROUTER for each worker. A decode's
//! question is answered request by request, each when its blocks are written.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, ErrorKind, Result, Secret};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::super::refusal_log::RefusalLog;
use super::super::setup::MOONCAKE;
use super::super::shared::Shared;
use super::super::zmtp::{
    ConnectionHandler, MessageLimits, PeerLimits, Received, Router, RouterConnection, RouterLimits,
};
use super::bootstrap::BootstrapServer;
use super::channels::{Channels, Listeners};
use super::proof::{self, Nonce};
use kvx_vllm::engine::WorkerRank;
use kvx_vllm::engine::mooncake::AskId;
use kvx_vllm::wire::mooncake::{
    OlderAnswer, OlderPullRequest, PullRequest, PullResponse, PullStatus,
};

/// The limits for the decodes of a worker. Each waiting load has a connection.
const DECODES: PeerLimits = PeerLimits {
    connections: 4096,
    message: MessageLimits { frames: 4, bytes: PullRequest::MAX_LEN },
    bytes: 4 * PullRequest::MAX_LEN,
};
/// The limits for all connections.
const LIMITS: RouterLimits = RouterLimits {
    unauthenticated: DECODES,
    authenticated: DECODES,
    answers: 64 << 20,
    patience: Duration::from_secs(5),
};
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
        Arc::new(BootstrapServer::serve(listener, shared.clock, shared.secret.clone()))
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
    let (shared, last, refusals) =
        (Arc::downgrade(shared), AtomicU32::new(0), RefusalLog::default());
    let channel = DecodeChannel { shared, rank, last, refusals };
    Router::serve_by(listener, LIMITS, Arc::new(channel))
}

/// Returns the frames of an answer. A REQ socket, which asks before vLLM 0.16, starts with an empty
/// frame and expects it back.
fn answer(older: bool, frames: impl IntoIterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
    older.then(Vec::new).into_iter().chain(frames).collect()
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

/// Authenticates a question. Returns the secret and nonce that seal its answers, if there is a
/// secret. A plain Mooncake agent cannot prove anything, so its questions are accepted if the
/// backend `MOONCAKE` is open, which an operator has to allow.
///
/// Errors: `Authentication`: the decode has no secret or another one, or this prefill has none.
fn admits(
    shared: &Shared,
    rank: WorkerRank,
    question: &[u8],
    seal: Option<&[u8]>,
) -> Result<Option<(Secret, Nonce)>> {
    let denied = |why: &str| Err(Error::new(ErrorKind::Authentication, why.to_owned()));
    match (&shared.secret, seal) {
        (None, None) => Ok(None),
        (Some(secret), Some(seal)) => {
            let nonce = proof::open_question(secret, question, seal)?;
            Ok(Some((secret.clone(), nonce)))
        }
        (Some(_), None)
            if shared
                .registered(rank)
                .is_some_and(|own| own.agent.backends().contains(&MOONCAKE)) =>
        {
            Ok(None)
        }
        (Some(_), None) => denied(
            "this prefill has a shared secret and the decode has none: set KVX_SECRET_FILE there \
             to the same secret",
        ),
        (None, Some(_)) => denied(
            "this decode has a shared secret and the prefill has none: give both the same secret, \
             or neither",
        ),
    }
}

impl ConnectionHandler for DecodeChannel {
    async fn talk(&self, mut peer: RouterConnection) -> Result<()> {
        let connection = self.last.fetch_add(1, Ordering::Relaxed);
        let _gone = ForgetAskerOnDrop { talker: self, connection };
        let (way_back, mut answers) = mpsc::channel(ANSWERS);
        // Expected race: the connector ends while a decode connects.
        let Some(shared) = self.shared.upgrade() else { return Ok(()) };
        shared.mooncake.askers.insert((self.rank, connection), way_back);
        let older = shared.is_older_mooncake();
        drop(shared);
        let mut questions = 0_u32;
        // The seal of the last question, which also seals the answers to it.
        let mut seal = None;
        loop {
            tokio::select! {
                told = answers.recv() => {
                    let Some(told) = told else { return Ok(()) };
                    let proof = seal.as_ref().map(|(secret, nonce)| proof::seal_answer(secret, nonce, &told));
                    peer.send(&answer(older, [told].into_iter().chain(proof))).await?;
                },
                readable = peer.readable() => {
                    readable?;
                    let message = match peer.receive_one().await? {
                        Received::Message(message) => message,
                        Received::Command => continue,
                        Received::End => return Ok(()),
                    };
                    let Some(shared) = self.shared.upgrade() else { return Ok(()) };
                    let ask = AskId(u64::from(connection) << 32 | u64::from(questions));
                    questions = questions.wrapping_add(1);
                    // The first frame is the socket's name. REQ sockets send an empty one after it.
                    let frame = |at: usize| message.frames().get(at + usize::from(older)).map(Vec::as_slice);
                    let question = frame(1).unwrap_or_default();
                    match admits(&shared, self.rank, question, frame(2)) {
                        Ok(by) => seal = by,
                        Err(error) => {
                            self.log_refusal(Err(error.clone()));
                            peer.send(&answer(older, [refusal(older, question, &error)])).await?;
                            continue;
                        }
                    }
                    // Decoded before the lock, because it may be long.
                    let mut taken = Ok(());
                    if older {
                        let question = OlderPullRequest::decode(question);
                        shared.report_mooncake(self.rank, |worker, now| {
                            taken = worker.older_asked_for(now, ask, question);
                        });
                    } else {
                        let question = PullRequest::decode(question);
                        shared.report_mooncake(self.rank, |worker, now| {
                            taken = worker.asked_for(now, ask, question);
                        });
                    }
                    self.log_refusal(taken);
                }
            }
        }
    }
}
