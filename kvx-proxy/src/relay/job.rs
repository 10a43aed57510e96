//! A client's request in progress.

use std::sync::Arc;

use axum::body::Body;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::PathAndQuery;
use hyper::{Method, Response};
use kvx_vllm::params::XRequestId;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::answer_body::{AnswerResources, pass};
use super::answer_head::{AnswerHead, AnswerKind};
use super::api_error::ApiError;
use super::core::{Core, LiveSetup};
use super::fallback::FallbackPermit;
use super::legs::{self, LegContext, LegRequest, PrefillTask};
use super::record::Record;
use super::redaction::Redaction;
use super::retries::{Attempts, RetryDecision};
use crate::admission::AdmissionError;
use crate::fleet::Fleet;
use crate::fleet::choice::Requirements;
use crate::fleet::instance::{InFlight, Instance, Role};
use crate::fleet::models::ModelName;
use crate::metrics::RequestOutcome;
use crate::random::random_bytes;
use crate::request::{PromptKey, headers};
use crate::upstream::Fault;

/// A client's request in progress, with what its legs need.
pub(crate) struct Job {
    pub(crate) core: Arc<Core>,
    pub(crate) live: Arc<LiveSetup>,
    pub(crate) record: Record,
    pub(crate) method: Method,
    pub(crate) path: PathAndQuery,
    /// The client's headers, filtered for any leg.
    pub(crate) headers: HeaderMap,
    pub(crate) id: XRequestId,
    /// The client's original `Authorization` header.
    pub(crate) authorization: Option<HeaderValue>,
    pub(crate) until: Instant,
    /// True if the answer is streamed. Any other answer arrives as a whole, at the end of the
    /// generation.
    pub(crate) streamed: bool,
    /// Hosts and engine ids that the legs named, for [`Redaction`].
    pub(crate) named: Vec<String>,
    fallback: Option<FallbackPermit>,
    attempts: Attempts,
    place: Option<OwnedSemaphorePermit>,
}

/// The response of a job, or the record and the error with which it ends.
pub(crate) type JobResult = Result<Response<Body>, Box<(Record, ApiError)>>;

/// Returns random bytes for ids and traces.
///
/// # Errors
///
/// Fails if the kernel returns no random bytes: predictable ids could name another request's
/// blocks.
pub(super) fn random_id() -> Result<[u8; 16], ApiError> {
    random_bytes()
        .map_err(|error| ApiError::unavailable(format!("this request has no id: {error}")))
}

impl Job {
    /// Starts a request: assigns its id and trace. Fails while the proxy drains.
    pub(crate) fn begin(core: &Arc<Core>, parts: &Parts) -> Result<Self, ApiError> {
        let working = core.work().ok_or_else(ApiError::draining)?;
        let live = core.live();
        let asked_id = headers::request_id(&parts.headers).map_err(ApiError::bad_request)?;
        let mut sent = headers::for_instances(
            parts.headers.clone(),
            live.key_for_instances.as_ref(),
            live.keys.is_some(),
        );
        let trace = match headers::trace_id(&sent) {
            Some(trace) => trace.to_owned(),
            None => {
                let hex = |bytes: &[u8]| {
                    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
                };
                let trace = hex(&random_id()?);
                let value = format!("00-{trace}-{}-00", hex(&random_id()?[..8]));
                sent.insert(headers::TRACEPARENT, value.parse().expect("hexadecimal digits"));
                sent.remove("tracestate");
                trace
            }
        };
        // Requests in progress have distinct ids, by which instances distinguish them. Nothing
        // below can fail, so the record always releases the id.
        let id = match asked_id.filter(|id| core.take_id(id.as_str())) {
            Some(id) => id,
            None => {
                let id = XRequestId::from_random(random_id()?);
                core.take_id(id.as_str());
                id
            }
        };
        sent.insert(headers::REQUEST_ID, id.as_str().parse().expect("an id fits a header"));
        let path =
            parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let method = parts.method.clone();
        let mut record = Record::new(
            Arc::clone(core),
            working,
            id.as_str().to_owned(),
            trace,
            method.as_str(),
            path.path(),
        );
        record.owns_id();
        core.budget.deposit(live.setup.retries.budget);
        Ok(Job {
            until: Instant::now() + live.setup.timeouts.request,
            streamed: false,
            named: Vec::new(),
            fallback: None,
            attempts: Attempts::new(live.setup.retries.attempts),
            core: Arc::clone(core),
            live,
            record,
            method,
            path,
            headers: sent,
            id,
            authorization: parts.headers.get(AUTHORIZATION).cloned(),
            place: None,
        })
    }

    /// Waits until the request is admitted.
    pub(crate) async fn admit(mut self) -> Result<Self, Box<(Record, ApiError)>> {
        struct QueueGauge<'a>(&'a Core);
        impl Drop for QueueGauge<'_> {
            fn drop(&mut self) {
                self.0.metrics.queued.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
            }
        }
        let admission = Arc::clone(&self.live.admission);
        let started = Instant::now();
        self.core.metrics.queued.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let place = {
            let _queued = QueueGauge(&self.core);
            admission.enter().await
        };
        self.record.queued(started.elapsed());
        match place {
            Ok(place) => {
                self.place = Some(place);
                Ok(self)
            }
            Err(AdmissionError::Full) => {
                let waiting = admission.waiting();
                Err(self.refused(ApiError::unavailable(format!(
                    "{waiting} requests are queued already: try again later"
                ))))
            }
            Err(AdmissionError::TimedOut) => Err(self.refused(ApiError::unavailable(
                "too many requests are in progress: try again later",
            ))),
        }
    }

    pub(crate) fn refused(self, refusal: ApiError) -> Box<(Record, ApiError)> {
        Box::new((self.record, refusal))
    }

    /// Takes this request's part of the share of fallbacks, until the answer ends. Counts it on its
    /// `first` attempt.
    ///
    /// # Errors
    ///
    /// Fails if others have taken the share.
    pub(crate) fn enter_fallback(
        &mut self,
        decode: &InFlight,
        model: Option<&str>,
        first: bool,
    ) -> Result<(), ApiError> {
        let (core, fleet, instance) = (&self.core, &self.live.fleet, &decode.instance);
        self.fallback = None; // that of an earlier attempt
        let load = fleet.decode_load(instance.pool);
        let permit = core.fallbacks.enter(&instance.pool_name, decode.tokens(), load);
        let why = || fleet.why_unserved(model, &[Role::Prefill]);
        let Some(permit) = permit else {
            core.metrics.fallback("refused");
            core.fallbacks.warn(false, why);
            return Err(ApiError::unavailable(format!(
                "{}, and the limit for prompts that decode instances compute is reached: try again \
                 later",
                why()
            )));
        };
        self.fallback = Some(permit);
        if first {
            core.metrics.fallback("served");
            core.fallbacks.warn(true, why);
        }
        Ok(())
    }

    /// Returns what this request requires of an instance.
    pub(crate) fn requirements<'a>(
        &self,
        tokens: u64,
        prompt: &'a PromptKey,
        model: Option<ModelName<'a>>,
        avoid: &'a [Arc<Instance>],
    ) -> Requirements<'a> {
        let PromptKey { prefix, ref chunks, tokens: ref ids } = *prompt;
        let (token_ids, now) = (ids.as_deref(), std::time::Instant::now());
        Requirements { tokens, prefix, chunks, token_ids, model, avoid, now }
    }

    /// Returns true if a leg may be retried, and counts the retry.
    pub(crate) fn may_retry(&mut self, leg: &'static str) -> bool {
        match self.attempts.decide(&self.core.budget) {
            RetryDecision::Yes => {
                self.core.metrics.retry(leg);
                self.record.attempts(self.attempts.made);
                true
            }
            RetryDecision::OutOfAttempts => false,
            RetryDecision::OutOfBudget => {
                self.core.metrics.retries_denied.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                false
            }
        }
    }

    /// Returns what the legs of this request share.
    pub(crate) fn legs(&self) -> LegContext<'_> {
        LegContext { core: &self.core, live: &self.live, log: self.record.legs() }
    }

    /// Sends a leg whose answer goes to the client, and blames the instance for its faults.
    pub(crate) async fn answer(
        &self,
        instance: &InFlight,
        sent: LegRequest,
        kind: AnswerKind,
        until: Instant,
    ) -> Result<AnswerHead, Fault> {
        let until = until.min(self.until);
        let sent = sent.for_rank(instance.instance.next_rank());
        let answered =
            legs::answer(self.legs(), instance, self.method.clone(), sent, kind, until).await;
        if let Err(fault) = &answered {
            // Every instance may answer a passed-through request with an error: that is no fault.
            let is_answer =
                kind == AnswerKind::Any && matches!(fault, Fault::Busy(_) | Fault::Status(_));
            if !is_answer && !self.is_out_of_time(fault) {
                self.core.blame(&self.live, &instance.instance, fault);
            }
        }
        answered
    }

    /// Returns the deadline for the first byte of a leg that is sent now.
    pub(crate) fn first_byte(&self) -> Instant {
        match self.streamed {
            true => self.until.min(Instant::now() + self.live.setup.timeouts.first_byte),
            false => self.until,
        }
    }

    /// Returns true if the request only ran out of time: no instance's fault, and no reason to
    /// retry.
    pub(crate) fn is_out_of_time(&self, fault: &Fault) -> bool {
        !self.streamed && matches!(fault, Fault::Late(_))
    }

    /// Turns an instance's answer into the client's response.
    pub(crate) fn pass(
        mut self,
        opened: AnswerHead,
        decode: InFlight,
        prefill: Option<PrefillTask>,
        capture: Option<super::conversation::Capture>,
    ) -> Response<Body> {
        self.record.decode(&decode.instance);
        let held = AnswerResources {
            live: self.live,
            decode,
            prefill,
            capture,
            named: self.named,
            error: None,
            _fallback: self.fallback,
            _place: self.place,
            until: self.until,
        };
        pass(opened, self.record, held)
    }

    /// Forwards an error that has been read completely, from an instance of either role, which may
    /// have been blamed for it.
    pub(crate) fn pass_whole(
        mut self,
        instance: &Instance,
        response: Response<bytes::Bytes>,
        is_blamed: bool,
    ) -> Response<Body> {
        let (mut parts, mut body) = response.into_parts();
        headers::drop_hop_by_hop(&mut parts.headers);
        headers::drop_instance(&mut parts.headers, instance.name());
        let redaction = Redaction::new(&self.live.fleet, &self.named, &self.record.id);
        if let Some(original) = redaction.error(&mut parts, &mut body) {
            self.record.hid(instance.name(), &original, is_blamed);
        }
        let outcome = if parts.status.is_client_error() {
            RequestOutcome::ClientError
        } else {
            RequestOutcome::UpstreamError
        };
        self.record.ended(outcome, parts.status.as_u16());
        self.record.stamp(&mut parts.headers);
        Response::from_parts(parts, Body::from(body))
    }

    /// Ends the request when no instance is left: with the last failure if there was one.
    pub(crate) fn give_up(
        self,
        last: Option<(Arc<Instance>, Fault)>,
        otherwise: impl FnOnce(&Fleet) -> String,
    ) -> JobResult {
        match last {
            Some((instance, fault)) => self.fail(&instance, fault),
            None => {
                let words = format!("{}: try again later", otherwise(&self.live.fleet));
                Err(self.refused(ApiError::unavailable(words)))
            }
        }
    }

    /// Ends the request with the last failure, forwarding the instance's own answer if there is
    /// one.
    pub(crate) fn fail(mut self, instance: &Instance, fault: Fault) -> JobResult {
        self.record.set_error(format!("instance {} {fault}", instance.name()));
        match fault {
            Fault::Busy(response) | Fault::Status(response) => {
                let is_blamed = !self.record.is_passed();
                Ok(self.pass_whole(instance, *response, is_blamed))
            }
            fault => Err(self.refused(ApiError::upstream(instance, &fault))),
        }
    }
}
