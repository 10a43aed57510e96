//! Legs: the requests to instances that serve one request of a client.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::PathAndQuery;
use hyper::{Method, Response};
use kvx_vllm::Version;
use kvx_vllm::params::recipe::Answer;
use serde_json::Value;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tracing::Instrument;

use super::answer_head::{AnswerHead, AnswerKind, open};
use super::core::{Core, LiveSetup};
use crate::fleet::instance::{InFlight, Instance, Role};
use crate::release::Delivery;
use crate::request::headers;
use crate::timeline::{LegEnd, LegLog, Told};
use crate::upstream::{Fault, WHOLE, accepted, json_headers, whole};

/// What the legs of a request share.
#[derive(Clone, Copy)]
pub(crate) struct LegContext<'a> {
    pub(crate) core: &'a Core,
    pub(crate) live: &'a LiveSetup,
    /// The legs of the request's timeline.
    pub(crate) log: &'a LegLog,
}

/// Measures a leg, and counts it when it ends or is cancelled.
struct LegTimer<'a> {
    core: &'a Core,
    log: &'a LegLog,
    number: usize,
    leg: &'static str,
    end: LegEnd,
    started: Instant,
}

impl<'a> LegTimer<'a> {
    fn new(to: LegContext<'a>, instance: &Instance, role: Role) -> Self {
        LegTimer {
            core: to.core,
            log: to.log,
            number: to.log.begin(role, &instance.shared_name),
            leg: role.as_str(),
            end: LegEnd { outcome: "cancelled", ..LegEnd::default() },
            started: Instant::now(),
        }
    }

    fn ended(mut self, outcome: &'static str) -> Duration {
        self.end.outcome = outcome;
        self.started.elapsed()
    }

    fn failed(mut self, fault: &Fault) {
        (self.end.outcome, self.end.failed) = (fault.outcome(), true);
    }
}

impl Drop for LegTimer<'_> {
    fn drop(&mut self) {
        self.core.metrics.leg(self.leg, self.end.outcome, self.started.elapsed());
        self.log.end(self.number, std::mem::take(&mut self.end));
    }
}

/// The answer of a prefill leg.
#[derive(Debug)]
pub(crate) struct PrefillResult {
    pub(crate) answer: Answer,
    /// The version that determines the decode leg's format: one flat list of block ids means vLLM
    /// 0.16.
    pub(crate) version: Version,
    pub(crate) time: Duration,
}

/// Why a prefill leg has no answer that the decode leg can use.
#[derive(Debug)]
pub(crate) enum PrefillEnd {
    /// The instance rejected the client's request: its answer goes to the client.
    Rejected(Box<Response<Bytes>>),
    /// Another instance may succeed.
    Failed(Fault),
}

/// A request to an instance: path, headers and body.
#[derive(Clone, Debug)]
pub(crate) struct LegRequest {
    pub(crate) path: PathAndQuery,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The progress of the request, if it matters.
    pub(crate) delivery: Delivery,
}

impl LegRequest {
    /// Builds a leg with these headers.
    pub(crate) fn new(path: &PathAndQuery, headers: HeaderMap, body: Bytes) -> Self {
        LegRequest { path: path.clone(), headers, body, delivery: Delivery::default() }
    }

    /// Builds a leg with a JSON body.
    pub(crate) fn json(path: &PathAndQuery, headers: &HeaderMap, body: Bytes) -> Self {
        let mut headers = headers.clone();
        json_headers(&mut headers, body.len());
        LegRequest::new(path, headers, body)
    }

    /// Returns the same request, whose progress `delivery` tells.
    pub(crate) fn watched(&self, delivery: &Delivery) -> Self {
        LegRequest { delivery: delivery.clone(), ..self.clone() }
    }

    /// Addresses the leg to one data parallel rank of the instance.
    pub(crate) fn for_rank(mut self, rank: Option<usize>) -> Self {
        const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");
        if let Some(rank) = rank {
            self.headers.insert(RANK, HeaderValue::from(rank));
        }
        self
    }
}

/// Sends a prefill leg and reads its answer. Records the result in the instance's state.
pub(crate) async fn prefill(
    to: LegContext<'_>,
    leg: &InFlight,
    mut sent: LegRequest,
    until: Instant,
) -> Result<PrefillResult, PrefillEnd> {
    let instance = &leg.instance;
    let mut timed = LegTimer::new(to, instance, Role::Prefill);
    headers::readable(&mut sent.headers);
    let span = tracing::info_span!("prefill", instance = instance.name());
    let ended = prefill_answer(to, leg, sent, until).instrument(span).await;
    match ended {
        Ok((answer, version, told)) => {
            instance.state.succeeded();
            timed.end.told = told;
            Ok(PrefillResult { answer, version, time: timed.ended("ok") })
        }
        Err(PrefillEnd::Rejected(response)) => {
            instance.state.succeeded();
            timed.ended("status");
            Err(PrefillEnd::Rejected(response))
        }
        Err(PrefillEnd::Failed(fault)) => {
            timed.failed(&fault);
            to.core.blame(to.live, instance, &fault);
            Err(PrefillEnd::Failed(fault))
        }
    }
}

async fn prefill_answer(
    LegContext { core, live, .. }: LegContext<'_>,
    leg: &InFlight,
    sent: LegRequest,
    until: Instant,
) -> Result<(Answer, Version, Told), PrefillEnd> {
    let until = until.min(Instant::now() + live.setup.timeouts.prefill);
    let failed = PrefillEnd::Failed;
    let response = live
        .upstream
        .send(&leg.instance.setup, Method::POST, &sent.path, sent.headers, sent.body, until)
        .await
        .map_err(failed)?;
    let (parts, body) = accepted(response, until).await.map_err(failed)?.into_parts();
    let body = whole(body, WHOLE, until).await.map_err(failed)?;
    if !parts.status.is_success() {
        return Err(PrefillEnd::Rejected(Box::new(Response::from_parts(parts, body))));
    }
    let value: Value = serde_json::from_slice(&body)
        .map_err(|_| failed(Fault::Broken("its answer with status 200 is not JSON".to_owned())))?;
    let answer =
        Answer::from_body(&value).map_err(|error| failed(Fault::Broken(error.to_string())))?;
    // With bidirectional transfer, a decode instance's blocks count as cached too.
    if !live.fleet.pools[leg.instance.pool].bidirectional {
        core.compare_cached(leg, &value);
    }
    let flat =
        value.pointer("/kv_transfer_params/remote_block_ids/0").is_some_and(Value::is_number);
    let version = if flat { Version::V0_16 } else { Version::default() };
    Ok((answer, version, Told::from_answer(&value)))
}

/// A prefill leg that runs concurrently with a decode leg. Dropping it cancels the leg and closes
/// its connection, which the instance notices.
#[derive(Debug)]
pub(crate) struct PrefillTask(Option<JoinHandle<Result<PrefillResult, PrefillEnd>>>);

impl PrefillTask {
    pub(crate) fn start(
        core: &Arc<Core>,
        live: &Arc<LiveSetup>,
        log: &Arc<LegLog>,
        instance: InFlight,
        sent: LegRequest,
        until: Instant,
    ) -> Self {
        let (core, live, log) = (Arc::clone(core), Arc::clone(live), Arc::clone(log));
        let leg = async move {
            let to = LegContext { core: &core, live: &live, log: &log };
            prefill(to, &instance, sent, until).await
        };
        PrefillTask(Some(tokio::spawn(leg.in_current_span())))
    }

    /// Waits for the leg to end. A second call never returns.
    pub(crate) async fn ended(&mut self) -> Result<PrefillResult, PrefillEnd> {
        let Some(task) = &mut self.0 else { return std::future::pending().await };
        let ended = task.await;
        self.0 = None;
        ended.unwrap_or_else(|error| {
            let why = match error.is_panic() {
                true => "a bug in the router ended the leg: its log shows the panic",
                false => "the leg was cancelled",
            };
            Err(PrefillEnd::Failed(Fault::Broken(why.to_owned())))
        })
    }

    /// Lets the leg run to its end.
    pub(crate) fn detach(mut self) {
        self.0 = None;
    }
}

impl Drop for PrefillTask {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

/// Sends a leg whose answer goes to the client, and waits for its beginning.
pub(crate) async fn answer(
    to: LegContext<'_>,
    instance: &InFlight,
    method: Method,
    sent: LegRequest,
    kind: AnswerKind,
    until: Instant,
) -> Result<AnswerHead, Fault> {
    let instance = &instance.instance;
    let mut timed = LegTimer::new(to, instance, Role::Decode);
    let span = tracing::info_span!("decode", instance = instance.name());
    let opened = async {
        let upstream = &to.live.upstream;
        let LegRequest { path, headers, body, delivery } = sent;
        let response = upstream
            .send_watched(&instance.setup, method, &path, headers, body, until, &delivery)
            .await?;
        open(response, kind, until).await
    };
    match opened.instrument(span).await {
        Ok(opened) => {
            (timed.end.goes_on, timed.end.failed) = (true, opened.is_error);
            timed.ended(if opened.parts.status.is_success() && !opened.is_error {
                "ok"
            } else {
                "status"
            });
            Ok(opened)
        }
        Err(fault) => {
            timed.failed(&fault);
            Err(fault)
        }
    }
}
