//! `/v1/realtime`: a WebSocket that one decode instance serves. The proxy forwards its bytes
//! unchanged.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE};
use hyper::http::request::Parts;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, split};
use tracing::Instrument as _;

use crate::fleet::instance::{InFlight, Instance, Role};
use crate::metrics::RequestOutcome;
use crate::relay::answer_head::{AnswerHead, AnswerKind};
use crate::relay::api_error::ApiError;
use crate::relay::job::{Job, JobResult};
use crate::relay::legs::LegRequest;
use crate::request::NO_PROMPT;
use crate::request::headers;
use crate::upstream::Fault;

/// The only WebSocket path: its messages name no hosts. Messages of other paths might, and the
/// proxy could not remove them.
const PATH: &str = "/v1/realtime";
/// The estimated tokens of a session, for the choice of an instance.
const TOKENS: u64 = 1024;

/// Returns the client's connection if it requests a WebSocket on this path.
pub(super) fn asked(parts: &mut Parts) -> Option<OnUpgrade> {
    let protocol = parts.headers.get(UPGRADE)?.to_str().ok()?;
    let is_ours = parts.method == Method::GET && parts.uri.path() == PATH;
    (is_ours && protocol.trim().eq_ignore_ascii_case("websocket"))
        .then(|| parts.extensions.remove::<OnUpgrade>())?
}

/// Requests the WebSocket from a decode instance. Forwards any answer other than 101 to the client.
pub(super) async fn realtime(job: Job, client: OnUpgrade) -> JobResult {
    let mut job = job.admit().await?;
    let live = Arc::clone(&job.live);
    let fleet = &live.fleet;
    let name = job.path.query().and_then(model);
    job.record.route("passed", "");
    job.record.model(name.as_deref());
    job.streamed = true;
    let model = name.as_deref().map(|name| fleet.names.named(name));
    // No instance serves this model: let one answer with its own error.
    let model = model.filter(|model| fleet.decode.iter().any(|one| one.state.models.serve(*model)));
    let mut headers = job.headers.clone();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    let sent = LegRequest::new(&job.path, headers, Bytes::new());
    let opens = |one: &Instance| !one.setup.h2c;
    if !fleet.decode.iter().any(|one| opens(one)) {
        let words = "all decode instances use HTTP/2, over which this proxy opens no WebSocket";
        return Err(job.refused(ApiError::client(StatusCode::NOT_IMPLEMENTED, words)));
    }
    let mut avoid = Vec::new();
    loop {
        let Some(decode) =
            fleet.choose_alone_that(&job.requirements(TOKENS, &NO_PROMPT, model, &avoid), opens)
        else {
            return job.give_up(None, |fleet| fleet.why_unserved(name.as_deref(), &[Role::Decode]));
        };
        let fault = match job.answer(&decode, sent.clone(), AnswerKind::Any, job.first_byte()).await
        {
            Ok(opened) if opened.parts.status == StatusCode::SWITCHING_PROTOCOLS => {
                return switch(job, decode, opened, client);
            }
            Ok(opened) => return Ok(job.pass(opened, decode, None, None)),
            Err(fault) => fault,
        };
        if !fault.not_accepted() || !job.may_retry("decode") {
            return job.fail(&decode.instance, fault);
        }
        avoid.push(Arc::clone(&decode.instance));
    }
}

/// Switches both connections to the WebSocket after the instance has accepted it.
fn switch(mut job: Job, decode: InFlight, opened: AnswerHead, client: OnUpgrade) -> JobResult {
    let mut parts = opened.parts;
    let Some(instance) = parts.extensions.remove::<OnUpgrade>() else {
        return job.fail(&decode.instance, Fault::Broken("it opened no WebSocket".to_owned()));
    };
    decode.instance.state.succeeded();
    headers::drop_hop_by_hop(&mut parts.headers);
    parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    parts.headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    job.record.stamp(&mut parts.headers);
    job.record.decode(&decode.instance);
    job.record.first_byte(parts.status.as_u16());
    let span = job.record.span.clone();
    tokio::spawn(carry(job, decode, client, instance).instrument(span));
    Ok(Response::from_parts(parts, Body::empty()))
}

/// Copies bytes both ways until both sides end, one fails, or no bytes pass for too long. The
/// request is in progress until then.
async fn carry(mut job: Job, decode: InFlight, client: OnUpgrade, instance: OnUpgrade) {
    let (up, down) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut end = job.core.end.subscribe();
    let both_ways = async {
        let client = client.await.map_err(|_| RequestOutcome::ClientGone)?;
        let instance = instance.await.map_err(|_| RequestOutcome::BrokenOff)?;
        let (client_says, to_client) = split(TokioIo::new(client));
        let (instance_says, to_instance) = split(TokioIo::new(instance));
        tokio::try_join!(
            copy(
                client_says,
                to_instance,
                &up,
                [RequestOutcome::ClientGone, RequestOutcome::BrokenOff]
            ),
            copy(
                instance_says,
                to_client,
                &down,
                [RequestOutcome::BrokenOff, RequestOutcome::ClientGone]
            ),
        )
    };
    let outcome = tokio::select! {
        ended = both_ways => ended.map_or_else(|outcome| outcome, |_| RequestOutcome::Ok),
        () = silence(&up, &down, job.live.setup.timeouts.idle) => RequestOutcome::Timeout,
        () = tokio::time::sleep_until(job.until) => RequestOutcome::Timeout,
        _ = end.wait_for(|end| *end) => RequestOutcome::BrokenOff,
    };
    job.record.passed(down.into_inner() as usize, 0);
    job.record.ended(outcome, StatusCode::SWITCHING_PROTOCOLS.as_u16());
    drop(decode);
}

/// Copies until the end of the input, then shuts down the output. An error names the side that
/// failed.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    count: &AtomicU64,
    [reading, writing]: [RequestOutcome; 2],
) -> Result<(), RequestOutcome> {
    let mut bytes = vec![0; 16 << 10];
    loop {
        let length = from.read(&mut bytes).await.map_err(|_| reading)?;
        if length == 0 {
            return to.shutdown().await.map_err(|_| writing);
        }
        to.write_all(&bytes[..length]).await.map_err(|_| writing)?;
        count.fetch_add(length as u64, Relaxed);
    }
}

/// Returns once no bytes have passed for `idle`, or up to twice as long.
async fn silence(up: &AtomicU64, down: &AtomicU64, idle: Duration) {
    let passed = || up.load(Relaxed) + down.load(Relaxed);
    loop {
        let before = passed();
        tokio::time::sleep(idle).await;
        if passed() == before {
            return;
        }
    }
}

/// Returns the model that a query names, in the form that OpenAI's clients use.
fn model(query: &str) -> Option<String> {
    let name = query.split('&').find_map(|pair| pair.strip_prefix("model="))?;
    let mut parts = name.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::model;

    #[test]
    fn the_model_of_a_query_is_read() {
        assert_eq!(model("a=1&model=org%2Fname-1").as_deref(), Some("org/name-1"));
        assert_eq!(model("model=m").as_deref(), Some("m"));
        for none in ["", "models=m", "a=model", "model=%2", "model=%zz", "model=%ff"] {
            assert_eq!(model(none), None, "{none}");
        }
    }
}
