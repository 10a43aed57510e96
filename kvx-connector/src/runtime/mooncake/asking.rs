//! The decode's side: questions to bootstrap servers and to the workers of a prefill, each on a connection of its own.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, Kind, Result};

use super::super::builder::MOONCAKE;
use super::super::push::Grant;
use super::super::state::Shared;
use super::super::zmtp::{Client, Limits, SocketType, resolve};
use super::{client, proof};
use crate::engine::mooncake::{PullId, QueryId, Unanswered};
use crate::engine::{Address, RequestId, Time, WorkerRank};
use crate::wire::mooncake::{PullRequest, PullResponse};

/// An answer, and what a later version may add.
const ANSWER: Limits = Limits { frames: 4, bytes: PullResponse::MAX_LEN };
/// Bytes of answers in memory for all questions of an engine.
pub(super) const BYTES: usize = 64 << 20;
/// How long a worker may take to greet, and to take a question.
const LIMIT: Duration = Duration::from_secs(10);
/// How long blocks are held that a plain Mooncake agent may still write to: then they are lost.
const MAY_WRITE_FOR: Duration = Duration::from_secs(60);

/// One question that goes to a worker of a prefill.
pub(super) struct Question {
    pub(super) pull: PullId,
    pub(super) address: Arc<str>,
    pub(super) message: Box<PullRequest>,
    pub(super) is_kvx: bool,
    pub(super) deadline: Time,
}

impl Shared {
    /// Answers [`MooncakeAction::Query`](crate::engine::mooncake::MooncakeAction::Query).
    pub(super) async fn query(
        self: Arc<Self>,
        rank: WorkerRank,
        query: QueryId,
        address: Address,
        deadline: Time,
    ) {
        let listed = client::query(&address, self.left(deadline)).await;
        let listed = listed.map_err(|error| error.to_string());
        self.tell_mooncake(rank, |worker, now| worker.queried(now, query, listed));
    }

    /// Answers [`MooncakeAction::Ask`](crate::engine::mooncake::MooncakeAction::Ask).
    pub(super) async fn pull(self: Arc<Self>, rank: WorkerRank, question: Question) {
        let pull = question.pull;
        let mut delivered = false;
        let Err(error) = self.exchange(rank, question, &mut delivered).await;
        let how = Unanswered { delivered, error: error.to_string() };
        self.tell_mooncake(rank, |worker, now| worker.unanswered(now, pull, how));
    }

    /// Asks, and hears answers until there are no more to come.
    async fn exchange(
        self: &Arc<Self>,
        rank: WorkerRank,
        question: Question,
        delivered: &mut bool,
    ) -> Result<std::convert::Infallible> {
        let Question { pull, address, message, is_kvx, deadline } = question;
        let at = address.strip_prefix("tcp://").and_then(Address::parse);
        let at = at.ok_or_else(|| Error::new(Kind::Malformed, format!("{address} is no tcp://host:port")))?;
        let bytes = self.granting(rank, message, is_kvx).await?;
        let secret = self.secret.as_ref().filter(|_| is_kvx);
        let sealed = match secret {
            None => None,
            Some(secret) => Some((secret, proof::seal_question(secret, &bytes)?)),
        };
        let limit = LIMIT.min(self.left(deadline));
        let addresses = resolve(&at.host, at.port, limit).await?;
        let budget = &self.mooncake.answers;
        let mut client = Client::connect(SocketType::Dealer, &addresses, ANSWER, budget, limit).await?;
        *delivered = true;
        let mut frames = vec![&bytes[..]];
        frames.extend(sealed.iter().map(|(_, (_, seal))| &seal[..]));
        client.send(&frames, limit).await?;
        drop(bytes);
        loop {
            let limit = self.left(deadline);
            let late = || Error::new(Kind::TimedOut, "the prefill did not answer in time");
            let answer = tokio::time::timeout(limit, client.receive(LIMIT)).await.map_err(|_| late())??;
            let frame = |at: usize| answer.frames().get(at).map_or(&[][..], Vec::as_slice);
            let (answer, seal) = (frame(0), frame(1));
            if let Some((secret, (nonce, _))) = &sealed {
                proof::check_answer(secret, nonce, answer, seal)?;
            }
            self.tell_mooncake(rank, |worker, now| worker.answered(now, pull, answer));
        }
    }

    fn left(&self, deadline: Time) -> Duration {
        deadline.since(self.clock.now())
    }

    /// The question with what it grants: to a kvx a region for each request, else the name of a Mooncake agent, which
    /// writes wherever it likes.
    async fn granting(
        self: &Arc<Self>,
        rank: WorkerRank,
        mut message: Box<PullRequest>,
        is_kvx: bool,
    ) -> Result<Vec<u8>> {
        let wanted = message.req_blocks.iter().filter(|wanted| !wanted.block_ids.iter().all(Vec::is_empty));
        let wanted: Vec<RequestId> = wanted.map(|wanted| wanted.request_id.as_str().into()).collect();
        if !is_kvx {
            self.tell_abroad(rank, &mut message, &wanted)?;
        } else if !wanted.is_empty() {
            let shared = Arc::clone(self);
            // Registering memory may take long.
            let granted = self.runtime.spawn_blocking(move || {
                let grants = wanted
                    .iter()
                    .map(|request| Ok((request.as_str().to_owned(), shared.granted(rank, request)?)));
                grants.collect::<Result<_>>()
            });
            let gone = |_| Error::new(Kind::Closed, "the connector ends");
            message.kvx_grants = granted.await.map_err(gone)??;
        }
        Ok(message.encode())
    }

    fn tell_abroad(&self, rank: WorkerRank, message: &mut PullRequest, wanted: &[RequestId]) -> Result<()> {
        let own = self.registered(rank).ok_or_else(super::super::finish::caches_are_gone)?;
        let name = own.agent.foreign_metadata(MOONCAKE).map_err(|error| {
            let why = format!(
                "the prefill is no kvx, as its bootstrap server lists it, and this decode has no Mooncake engine for \
                 it to write to: name MOONCAKE in kv_connector_extra_config.backends ({error})"
            );
            Error::new(error.kind(), why)
        })?;
        let name = String::from_utf8_lossy(&name);
        let at = Address::parse(&name).ok_or_else(|| {
            Error::new(
                Kind::Unsupported,
                format!("{name} is no host:port of a Mooncake engine, which a vLLM needs"),
            )
        })?;
        (message.remote_hostname, message.remote_port) = (at.host.to_string(), at.port);
        message.kvx_metadata = None;
        let mut state = self.state.lock();
        for request in wanted {
            let before = state.grants.remove(request);
            let granted = before.as_ref().map_or_else(Arc::default, |grant| Arc::clone(grant.granted()));
            if !state.scheduler.is_loading(request) || matches!(before, Some(Grant::Fenced(_))) {
                before.into_iter().for_each(|before| drop(state.grants.insert(request.clone(), before)));
                return Err(Error::new(
                    Kind::Revoked,
                    "the request was given up: nothing is to be written for it",
                ));
            }
            state.grants.insert(request.clone(), Grant::Abroad(granted));
        }
        Ok(())
    }

    /// The end of a load whose blocks a plain Mooncake agent may write to: it cannot be asked whether it still does.
    pub(in super::super) async fn forget_abroad(&self, rank: WorkerRank, request: &RequestId) {
        tokio::time::sleep(MAY_WRITE_FOR).await;
        tracing::warn!(
            %request,
            "blocks are lost: a Mooncake agent that is no kvx was told of them, and nothing proves that it has done"
        );
        self.tell_mooncake(rank, |worker, now| worker.fence_forgotten(now, request));
    }
}
