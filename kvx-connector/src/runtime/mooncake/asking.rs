//! The decode's side: questions to bootstrap servers and to the workers of a prefill, each on a connection of its own.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::sync::Mutex;
use kvx_core::{Error, ErrorKind, Result};

use super::super::builder::MOONCAKE;
use super::super::push::{Grant, GrantedWrites};
use super::super::state::Shared;
use super::super::zmtp::{Client, MessageLimits, SocketType, resolve};
use super::{client, proof};
use crate::engine::mooncake::{Mooncake, PullId, QueryId, Unanswered};
use crate::engine::{Address, RequestId, Time, WorkerRank};
use crate::wire::mooncake::{
    OlderAnswer, OlderPullRequest, PullRequest, PullResponse, PullStatus, PulledRequest,
};

/// An answer, and what a later version may add.
const ANSWER: MessageLimits = MessageLimits { frames: 4, bytes: PullResponse::MAX_LEN };
/// Bytes of answers in memory for all questions of an engine.
pub(super) const BYTES: usize = 64 << 20;
/// How long a worker may take to greet, and to take a question.
const LIMIT: Duration = Duration::from_secs(10);
/// How long blocks are held that a plain Mooncake agent may still write to: then they are lost.
const MAY_WRITE_FOR: Duration = Duration::from_secs(60);

/// How long a connection is kept for the next question to the same worker, and how many are.
const KEPT: Duration = Duration::from_secs(30);
const MOST_KEPT: usize = 256;

/// Connections to workers that have answered: the next question needs no greeting.
#[derive(Debug, Default)]
pub(super) struct IdleClients(Mutex<HashMap<Arc<str>, (Client, Instant)>>);

impl IdleClients {
    pub(super) fn take(&self, address: &str) -> Option<Client> {
        let (client, since) = self.0.lock().remove(address)?;
        (since.elapsed() < KEPT && client.is_quiet()).then_some(client)
    }

    pub(super) fn keep(&self, address: Arc<str>, client: Client) {
        let mut kept = self.0.lock();
        kept.retain(|_, (_, since)| since.elapsed() < KEPT);
        if kept.len() < MOST_KEPT {
            kept.insert(address, (client, Instant::now()));
        }
    }
}

#[cfg(test)]
impl IdleClients {
    /// The one that is kept.
    pub(super) fn only(&self) -> Option<Client> {
        let mut kept = self.0.lock();
        assert!(kept.len() <= 1, "a worker has one");
        kept.drain().next().map(|(_, (client, _))| client)
    }
}

/// Whether a question asks for blocks, and not for the end of a request alone.
fn wants(wanted: &PulledRequest) -> bool {
    wanted.block_ids.iter().any(|blocks| !blocks.is_empty())
}

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
        if let Err(error) = self.exchange(rank, question, &mut delivered).await {
            let how = Unanswered { delivered, error: error.to_string() };
            self.tell_mooncake(rank, |worker, now| worker.unanswered(now, pull, how));
        }
    }

    /// Asks, and hears answers until there are no more to come.
    async fn exchange(
        self: &Arc<Self>,
        rank: WorkerRank,
        question: Question,
        delivered: &mut bool,
    ) -> Result<()> {
        let Question { pull, address, message, is_kvx, deadline } = question;
        let at = address.strip_prefix("tcp://").and_then(Address::parse);
        let at = at.ok_or_else(|| {
            Error::new(ErrorKind::Malformed, format!("{address} is no tcp://host:port"))
        })?;
        let older = self.is_older_mooncake();
        // The grant of another worker's question may be older than this worker's load.
        self.copies_are_idle(rank, self.left(deadline).into()).await?;
        let message = self.granting(rank, message, is_kvx).await?;
        let bytes = match (older, is_kvx) {
            (false, _) => message.encode(),
            (true, true) => OlderPullRequest::to_kvx(&message).encode(),
            (true, false) => OlderPullRequest::plain(&message)?.encode(),
        };
        drop(message);
        let secret = self.secret.as_ref().filter(|_| is_kvx);
        let sealed = match secret {
            None => None,
            Some(secret) => Some((secret, proof::seal_question(secret, &bytes)?)),
        };
        let limit = LIMIT.min(self.left(deadline));
        let mut client = match self.mooncake.idle.take(&address) {
            Some(client) => client,
            None => {
                let addresses = resolve(&at.host, at.port, limit).await?;
                let kind = if older { SocketType::Req } else { SocketType::Dealer };
                Client::connect(kind, &addresses, ANSWER, &self.mooncake.answers, limit).await?
            }
        };
        *delivered = true;
        let mut frames = vec![&bytes[..]];
        frames.extend(sealed.iter().map(|(_, (_, seal))| &seal[..]));
        client.send(&frames, limit).await?;
        drop(bytes);
        loop {
            let limit = self.left(deadline);
            let late = || Error::new(ErrorKind::TimedOut, "the prefill did not answer in time");
            let answer =
                tokio::time::timeout(limit, client.receive(LIMIT)).await.map_err(|_| late())??;
            let frame = |at: usize| answer.frames().get(at).map_or(&[][..], Vec::as_slice);
            let (answer, seal) = (frame(0), frame(1));
            if let Some((secret, (nonce, _))) = &sealed {
                proof::check_answer(secret, nonce, answer, seal)?;
            }
            if older && !is_kvx {
                let answer = OlderAnswer::decode(answer);
                if answer.is_ok() {
                    self.mooncake.idle.keep(address, client);
                }
                self.tell_mooncake(rank, |worker, now| {
                    worker.older_answered_with(now, pull, answer)
                });
                return Ok(());
            }
            // Read before the lock, as it may be long.
            let answer = PullResponse::decode(answer);
            if answer.as_ref().is_ok_and(|answer| answer.status == PullStatus::Continue) {
                self.tell_mooncake(rank, |worker, now| worker.answered_with(now, pull, answer));
                continue;
            }
            if answer.is_ok() {
                self.mooncake.idle.keep(address, client);
            }
            self.tell_mooncake(rank, |worker, now| worker.answered_with(now, pull, answer));
            return Ok(());
        }
    }

    /// Whether the protocol is that of before vLLM 0.16.
    pub(super) fn is_older_mooncake(&self) -> bool {
        self.setup.settings.mooncake.as_ref().is_some_and(Mooncake::is_older)
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
    ) -> Result<Box<PullRequest>> {
        let asked = message.req_blocks.len();
        if is_kvx {
            let wanted = message.req_blocks.iter().filter(|wanted| wants(wanted));
            let wanted: Vec<RequestId> =
                wanted.map(|wanted| wanted.request_id.as_str().into()).collect();
            let shared = Arc::clone(self);
            // Registering memory may take long.
            let granting = self.runtime.spawn_blocking(move || shared.granted_of(rank, wanted));
            let gone = |_| Error::new(ErrorKind::Closed, "the connector ends");
            let grants = granting.await.map_err(gone)??;
            message
                .req_blocks
                .retain(|wanted| !wants(wanted) || grants.contains_key(&wanted.request_id));
            message.kvx_grants = grants;
        } else {
            self.tell_abroad(rank, &mut message)?;
        }
        if asked > 0 && message.req_blocks.is_empty() {
            return Err(Error::new(
                ErrorKind::Revoked,
                "the requests were given up: nothing is to be written for them",
            ));
        }
        Ok(message)
    }

    /// What a worker grants for requests; those that were given up meanwhile are left out. May block.
    fn granted_of(
        &self,
        rank: WorkerRank,
        wanted: Vec<RequestId>,
    ) -> Result<BTreeMap<String, Vec<Vec<u8>>>> {
        let mut grants = BTreeMap::new();
        for request in wanted {
            match self.granted(rank, &request) {
                Ok(regions) => drop(grants.insert(request.as_str().to_owned(), regions)),
                Err(error) if error.kind() == ErrorKind::Revoked => {}
                Err(error) => return Err(error),
            }
        }
        Ok(grants)
    }

    /// Tells a plain Mooncake agent where to write, for those requests that were not given up.
    fn tell_abroad(&self, rank: WorkerRank, message: &mut PullRequest) -> Result<()> {
        let own = self.registered(rank).ok_or_else(super::super::finish::caches_are_gone)?;
        let name = own.agent.foreign_metadata(MOONCAKE).map_err(|error| {
            let why = format!(
                "the prefill does not say that it is a kvx, and this decode has no Mooncake engine for \
                 it to write to: name MOONCAKE in kv_connector_extra_config.backends ({error})"
            );
            Error::new(error.kind(), why)
        })?;
        let name = String::from_utf8_lossy(&name);
        let at = Address::parse(&name).ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!("{name} is no host:port of a Mooncake engine, which a vLLM needs"),
            )
        })?;
        (message.remote_hostname, message.remote_port) = (at.host.to_string(), at.port);
        message.kvx_metadata = None;
        let mut guard = self.state.lock();
        let state = &mut *guard;
        message.req_blocks.retain(|wanted| {
            if !wants(wanted) {
                return true;
            }
            let request = RequestId::from(wanted.request_id.as_str());
            let before = state.grants.get(&request);
            if !state.scheduler.is_loading(&request) || matches!(before, Some(Grant::Fenced(_))) {
                return false;
            }
            let granted = before.map_or_else(Arc::default, |grant| Arc::clone(grant.granted()));
            state.grants.insert(request, Grant::Abroad(granted));
            true
        });
        Ok(())
    }

    /// The end of a load whose blocks a plain Mooncake agent may write to: it cannot be asked whether it still does.
    pub(in super::super) async fn lose_after_a_while(
        &self,
        rank: WorkerRank,
        request: &RequestId,
        told: &Arc<GrantedWrites>,
    ) {
        self.tell_mooncake(rank, |worker, _| worker.fence_is_slow(request));
        tokio::time::sleep(MAY_WRITE_FOR).await;
        // A later load may have this name.
        let is_same =
            |grant: &Grant| matches!(grant, Grant::Abroad(granted) if Arc::ptr_eq(granted, told));
        if !self.state.lock().grants.get(request).is_some_and(is_same) {
            return;
        }
        let mut lost = false;
        self.tell_mooncake(rank, |worker, now| lost = worker.fence_forgotten(now, request));
        if lost {
            tracing::warn!(
                %request,
                "blocks are lost: a Mooncake agent that is no kvx was told of them, and nothing proves that it has done"
            );
        }
    }
}
