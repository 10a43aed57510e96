//! The decode's side: questions to bootstrap servers and to the workers of a prefill, each on its
//! own connection.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result, Secret};

use super::super::caches::caches_are_gone;
use super::super::setup::MOONCAKE;
use super::super::shared::Shared;
use super::super::zmtp::{SocketType, resolve};
use super::super::{copies, push};
use super::client;
use super::prefill_connection::PrefillConnection;
use kvx_vllm::engine::mooncake::{PullId, QueryId, Unanswered};
use kvx_vllm::engine::{Address, RequestId, Time, WorkerRank};
use kvx_vllm::wire::mooncake::{
    OlderAnswer, OlderPullRequest, PullRequest, PullResponse, PullStatus, PulledRequest,
};

/// The time limit for a connection to a worker, and for sending a question.
const LIMIT: Duration = Duration::from_secs(10);

/// Returns whether a question asks for blocks, and does not only end a request.
fn wants(wanted: &PulledRequest) -> bool {
    wanted.block_ids.iter().any(|blocks| !blocks.is_empty())
}

/// A question to a worker of a prefill.
pub(in super::super) struct Question {
    pub(in super::super) pull: PullId,
    pub(in super::super) address: Arc<str>,
    pub(in super::super) message: Box<PullRequest>,
    pub(in super::super) is_kvx: bool,
    pub(in super::super) deadline: Time,
}

/// Answers [`MooncakeAction::Query`](kvx_vllm::engine::mooncake::MooncakeAction::Query).
pub(in super::super) async fn query(
    shared: Arc<Shared>,
    rank: WorkerRank,
    query: QueryId,
    address: Address,
    deadline: Time,
) {
    let limit = left(&shared, deadline);
    let listed = client::query(&address, shared.secret.as_ref(), limit).await;
    let listed = listed.map_err(|error| error.to_string());
    shared.report_mooncake(rank, |worker, now| worker.queried(now, query, listed));
}

/// Answers [`MooncakeAction::Ask`](kvx_vllm::engine::mooncake::MooncakeAction::Ask).
pub(in super::super) async fn pull(shared: Arc<Shared>, rank: WorkerRank, question: Question) {
    let pull = question.pull;
    let mut delivered = false;
    if let Err(error) = exchange(&shared, rank, question, &mut delivered).await {
        let how = Unanswered { delivered, error: error.to_string() };
        shared.report_mooncake(rank, |worker, now| worker.unanswered(now, pull, how));
    }
}

/// Sends a question, and receives answers until the last one.
async fn exchange(
    shared: &Arc<Shared>,
    rank: WorkerRank,
    question: Question,
    delivered: &mut bool,
) -> Result<()> {
    let Question { pull, address, message, is_kvx, deadline } = question;
    let at = address.strip_prefix("tcp://").and_then(Address::parse);
    let at = at.ok_or_else(|| {
        ErrorKind::Malformed.because(format!("{address} is not of the form tcp://host:port"))
    })?;
    let older = shared.is_older_mooncake();
    let secret = shared.secret.as_ref().filter(|_| is_kvx);
    // The worker proves the secret before memory is granted to it.
    let mut connection = match shared.mooncake.idle.take(&address, secret.is_some()) {
        Some(kept) => kept,
        None => connect(shared, &at, secret, deadline).await?,
    };
    // The grant may stem from another worker's question, before this worker started its load.
    copies::idle(shared, rank, left(shared, deadline).into()).await?;
    let message = with_grants(shared, rank, message, is_kvx).await?;
    let bytes = match (older, is_kvx) {
        (false, _) => message.encode(),
        (true, true) => OlderPullRequest::to_kvx(&message).encode(),
        (true, false) => OlderPullRequest::plain(&message)?.encode(),
    };
    drop(message);
    // Expected race: the worker closes an idle connection while memory is registered.
    if !connection.is_quiet() {
        connection = connect(shared, &at, secret, deadline).await?;
    }
    *delivered = true;
    connection.send(&bytes, LIMIT.min(left(shared, deadline))).await?;
    drop(bytes);
    loop {
        let limit = left(shared, deadline);
        let late = || ErrorKind::TimedOut.because("the prefill did not answer in time");
        let answer =
            tokio::time::timeout(limit, connection.receive(LIMIT)).await.map_err(|_| late())??;
        if older && !is_kvx {
            let answer = OlderAnswer::decode(&answer);
            if answer.is_ok() {
                shared.mooncake.idle.keep(address, connection);
            }
            shared.report_mooncake(rank, |worker, now| worker.older_answered(now, pull, answer));
            return Ok(());
        }
        // Decoded before the lock, because it may be long.
        let answer = PullResponse::decode(&answer);
        if answer.as_ref().is_ok_and(|answer| answer.status == PullStatus::Continue) {
            shared.report_mooncake(rank, |worker, now| worker.answered(now, pull, answer));
            continue;
        }
        if answer.is_ok() {
            shared.mooncake.idle.keep(address, connection);
        }
        shared.report_mooncake(rank, |worker, now| worker.answered(now, pull, answer));
        return Ok(());
    }
}

/// Connects to a worker. With a secret, both ends prove it.
async fn connect(
    shared: &Shared,
    at: &Address,
    secret: Option<&Secret>,
    deadline: Time,
) -> Result<PrefillConnection> {
    let limit = || LIMIT.min(left(shared, deadline));
    let addresses = resolve(&at.host, at.port, limit()).await?;
    let kind = if shared.is_older_mooncake() { SocketType::Req } else { SocketType::Dealer };
    PrefillConnection::open(kind, &addresses, secret, &shared.mooncake.answers, limit()).await
}

fn left(shared: &Shared, deadline: Time) -> Duration {
    deadline.since(shared.clock.now())
}

/// Adds grants to a question. A kvx prefill gets a region for each request. Any other gets the
/// address of a Mooncake agent, and can then write anywhere in its registered memory.
async fn with_grants(
    shared: &Arc<Shared>,
    rank: WorkerRank,
    mut message: Box<PullRequest>,
    is_kvx: bool,
) -> Result<Box<PullRequest>> {
    let asked = message.req_blocks.len();
    if is_kvx {
        let wanted = message.req_blocks.iter().filter(|wanted| wants(wanted));
        let wanted: Vec<RequestId> =
            wanted.map(|wanted| wanted.request_id.as_str().into()).collect();
        let to_grant = Arc::clone(shared);
        // Registering memory may take long.
        let granting = shared.runtime.spawn_blocking(move || grants_of(&to_grant, rank, wanted));
        let gone = |_| ErrorKind::Closed.because("the connector is shutting down");
        let grants = granting.await.map_err(gone)??;
        message
            .req_blocks
            .retain(|wanted| !wants(wanted) || grants.contains_key(&wanted.request_id));
        message.kvx_grants = grants;
    } else {
        name_foreign(shared, rank, &mut message)?;
    }
    if asked > 0 && message.req_blocks.is_empty() {
        return Err(ErrorKind::Revoked
            .because("the requests were aborted, so the prefill must not write for them"));
    }
    Ok(message)
}

/// Returns a worker's grants for requests, except for requests that were given up meanwhile. May
/// block.
fn grants_of(
    shared: &Shared,
    rank: WorkerRank,
    wanted: Vec<RequestId>,
) -> Result<BTreeMap<String, Vec<Vec<u8>>>> {
    let mut grants = BTreeMap::new();
    for request in wanted {
        match push::grant(shared, &request).and_then(|granted| granted.metadata_of(rank)) {
            Ok(regions) => drop(grants.insert(request.as_str().to_owned(), regions)),
            Err(error) if error.kind() == ErrorKind::Revoked => {}
            Err(error) => return Err(error),
        }
    }
    Ok(grants)
}

/// Sends the addresses to a plain Mooncake agent, for the requests that were not given up.
fn name_foreign(shared: &Shared, rank: WorkerRank, message: &mut PullRequest) -> Result<()> {
    let own = shared.registered(rank).ok_or_else(caches_are_gone)?;
    let name = own.agent.foreign_metadata(MOONCAKE).map_err(|error| {
        let why = format!(
            "the prefill does not run kvx, and this decode has no Mooncake engine for it to write \
             to: add MOONCAKE to kv_connector_extra_config.backends ({error})"
        );
        Error::new(error.kind(), why)
    })?;
    let name = String::from_utf8_lossy(&name);
    let at = Address::parse(&name).ok_or_else(|| {
        ErrorKind::Unsupported.because(format!(
            "{name} is not the host:port of a Mooncake engine, which a vLLM needs"
        ))
    })?;
    (message.remote_hostname, message.remote_port) = (at.host.to_string(), at.port);
    message.kvx_metadata = None;
    let mut guard = shared.state.lock();
    let state = &mut *guard;
    message.req_blocks.retain(|wanted| {
        if !wants(wanted) {
            return true;
        }
        let request = RequestId::from(wanted.request_id.as_str());
        state.scheduler.is_loading(&request) && state.grants.open_to_foreign(&request)
    });
    Ok(())
}
