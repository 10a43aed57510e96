//! Serves completions with a prefill and a decode instance.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvx_vllm::Version;
use kvx_vllm::params::recipe::concurrent::{self, Legs, PushTarget};
use kvx_vllm::params::recipe::{Answer, sequential};
use kvx_vllm::params::{MooncakeTransferId, ParamsError, XRequestId};
use serde_json::Value;

use super::answer_head::{AnswerHead, AnswerKind};
use super::api_error::ApiError;
use super::conversation::{Capture, Key};
use super::core::LiveSetup;
use super::decode_only;
use super::job::{Job, JobResult, random_id};
use super::legs::{self, LegRequest, PrefillEnd, PrefillTask};
use crate::fleet::instance::{InFlight, Instance, PrefillKind};
use crate::fleet::missing::BOTH;
use crate::fleet::models::ModelName;
use crate::fleet::watch;
use crate::release::{Delivery, OrphanGuard, was_turned_away};
use crate::request::CompletionRequest;
use crate::request::json::JsonObject;
use crate::setup::{Fallback, PoolConnector};
use crate::upstream::Fault;

/// The source of the blocks that a decode instance waits for.
enum ExpectedSource {
    /// Mooncake: nothing to compare.
    Rank,
    /// NIXL push: the engine that the decode leg names.
    Engine(String),
}

/// The request of a decode leg, and the prefill leg that runs concurrently.
struct Handover {
    sent: LegRequest,
    beside: Option<(PrefillTask, ExpectedSource)>,
    /// The blocks of a prefill that has ended.
    kept: Option<OrphanGuard>,
}

/// Why a prefill produced no handover.
enum HandoverError {
    /// An instance rejected the client's request with this answer.
    Rejected(Box<hyper::Response<Bytes>>),
    /// The proxy's own error: another instance would not help.
    Refused(ApiError),
    /// Another instance may succeed.
    Failed(Fault),
    /// The first token ended the text: there are no blocks to hand over, and no decode instance may
    /// wait for them.
    Stopped,
}

impl From<ParamsError> for HandoverError {
    fn from(error: ParamsError) -> Self {
        HandoverError::Refused(ApiError::bad_request(error.to_string()))
    }
}

impl From<ApiError> for HandoverError {
    fn from(error: ApiError) -> Self {
        HandoverError::Refused(error)
    }
}

/// Returns the reason to send a completion to a decode instance alone, if there is one.
pub(crate) fn reason_to_go_alone(
    live: &LiveSetup,
    asked: &CompletionRequest,
    model: Option<ModelName<'_>>,
) -> Option<&'static str> {
    match asked.alone {
        Some(reason) => Some(reason),
        None if asked.prompt_tokens < live.setup.local_below => Some("short prompt"),
        None if !live.fleet.has_pair(model) => Some("no prefill instance"),
        None => None,
    }
}

/// Serves a completion, disaggregated if one transfer is enough for it.
pub(crate) async fn completion(mut job: Job, asked: CompletionRequest) -> JobResult {
    let live = Arc::clone(&job.live);
    let fleet = &live.fleet;
    let model = asked.model.as_deref().map(|model| fleet.names.named(model));
    if let Some(reason) = reason_to_go_alone(&live, &asked, model) {
        return decode_only::completion(job, &asked, reason).await;
    }
    job.record.route("disaggregated", "");
    job.streamed = asked.stream;
    let mut avoid_prefill: Vec<Arc<Instance>> = Vec::new();
    let mut avoid_decode: Vec<Arc<Instance>> = Vec::new();
    let mut last: Option<(Arc<Instance>, Fault)> = None;
    let mut body = asked.body.clone();
    let mut turn = ConversationTurn::of(&job, &asked, &mut body);
    'attempts: loop {
        let wanted = job.requirements(asked.prompt_tokens, &asked.prompt, model, &avoid_prefill);
        let Some(prefill) = fleet.choose_prefill(&wanted) else {
            if live.setup.fallback == Fallback::Decode {
                return decode_only::fallback(job, &asked).await;
            }
            let model = asked.model.as_deref();
            return job.give_up(last, |fleet| fleet.why_unserved(model, &BOTH));
        };
        let prefill_instance = Arc::clone(&prefill.instance);
        job.record.prefill(&prefill_instance, None);
        let error = 'handover: {
            let Handover { sent, mut beside, mut kept } =
                match hand_over(&mut job, prefill, &body, &mut turn).await {
                    Ok(handover) => handover,
                    Err(error) => break 'handover error,
                };
            // Try decode instances one after the other until one accepts.
            loop {
                let tokens = asked.prompt_tokens + asked.new_tokens;
                let wanted = job.requirements(tokens, &asked.prompt, model, &avoid_decode);
                let Some(decode) = turn.choose_decode(&job, &prefill_instance, &wanted) else {
                    let model = asked.model.as_deref();
                    return job.give_up(last, |fleet| fleet.why_unserved(model, &BOTH));
                };
                let delivery = Delivery::default();
                kept.iter_mut().for_each(|kept| kept.offer(&delivery));
                let sent = sent.watched(&delivery);
                let fault = match race(&job, &decode, sent, &mut beside).await {
                    // No part of an answer has arrived: treat it as a failure before the first
                    // byte.
                    RaceWinner::Answer(opened) if opened.is_error => {
                        prefill_instance.state.forget_ranks();
                        if !job.may_retry("decode") {
                            return Ok(job.pass(
                                opened,
                                decode,
                                beside.map(|(task, _)| task),
                                None,
                            ));
                        }
                        let fault = Fault::failed_stream(&opened.first);
                        job.core.blame(&live, &decode.instance, &fault);
                        fault
                    }
                    RaceWinner::Answer(opened) => {
                        if was_turned_away(opened.parts.status) {
                            kept.iter_mut().for_each(OrphanGuard::take_back);
                        }
                        let capture = turn.capture(&job, &asked);
                        return Ok(job.pass(opened, decode, beside.map(|(task, _)| task), capture));
                    }
                    RaceWinner::Decode(fault) => {
                        match fault.not_accepted() {
                            true => kept.iter_mut().for_each(OrphanGuard::take_back),
                            false => prefill_instance.state.forget_ranks(),
                        }
                        if job.is_out_of_time(&fault) || !job.may_retry("decode") {
                            return job.fail(&decode.instance, fault);
                        }
                        fault
                    }
                    RaceWinner::Prefill(error) => {
                        if let HandoverError::Failed(_) = error {
                            prefill_instance.state.forget_ranks();
                        }
                        break 'handover error;
                    }
                };
                avoid_decode.push(Arc::clone(&decode.instance));
                // If the instance has not accepted the leg, another one can use the same
                // parameters.
                let same_parameters = fault.not_accepted();
                last = Some((Arc::clone(&decode.instance), fault));
                if !same_parameters {
                    continue 'attempts;
                }
            }
        };
        match error {
            HandoverError::Rejected(response) => {
                return Ok(job.pass_whole(&prefill_instance, *response, false));
            }
            HandoverError::Refused(error) => return Err(job.refused(error)),
            HandoverError::Stopped => {
                return decode_only::completion(job, &asked, "prefill stopped").await;
            }
            HandoverError::Failed(fault) => {
                avoid_prefill.push(Arc::clone(&prefill_instance));
                // Not up, although no check has noticed it yet.
                let is_gone = matches!(fault, Fault::Refused(_) | Fault::Unreached(_));
                let wanted =
                    job.requirements(asked.prompt_tokens, &asked.prompt, model, &avoid_prefill);
                if live.setup.fallback == Fallback::Decode
                    && is_gone
                    && !fleet.has_other_prefill(&wanted)
                {
                    return decode_only::fallback(job, &asked).await;
                }
                if !job.may_retry("prefill") {
                    return job.fail(&prefill_instance, fault);
                }
                last = Some((prefill_instance, fault));
            }
        }
    }
}

/// Prepares a decode leg: waits for the prefill leg, or starts it concurrently.
async fn hand_over(
    job: &mut Job,
    prefill: InFlight,
    body: &JsonObject,
    turn: &mut ConversationTurn,
) -> Result<Handover, HandoverError> {
    let instance = Arc::clone(&prefill.instance);
    let connector = job.live.fleet.pools[instance.pool].connector;
    let kind = match instance.state.kind() {
        PrefillKind::Unknown => match watch::learn_kind(&job.live, &instance).await {
            Ok(kind) => kind,
            Err(fault) => {
                job.core.blame(&job.live, &instance, &fault);
                return Err(HandoverError::Failed(fault));
            }
        },
        kind => kind,
    };
    // Mooncake's targets are ranks already, and take turns by the same counter.
    let rank = if matches!(kind, PrefillKind::Mooncake(_)) { None } else { instance.next_rank() };
    match kind {
        PrefillKind::Mooncake(targets) => {
            let target = &targets[instance.state.next_rank(targets.len())];
            job.named.push(target.engine_id.clone());
            let id = MooncakeTransferId::from_random(random_id()?);
            let sketch = Value::Object(body.sketch());
            let mut legs = concurrent::mooncake_legs(&sketch, &id, target)?;
            ignore_stops(&mut legs.prefill);
            Ok(concurrent_handover(
                job,
                prefill,
                LegBodies::new(body, &sketch, &legs),
                Some(target.dp_rank as usize),
                ExpectedSource::Rank,
            ))
        }
        PrefillKind::Push(targets) => match targets.get(rank.unwrap_or(0)).cloned().flatten() {
            Some(target) => push(job, prefill, body, rank, target),
            None => sequential_handover(job, prefill, body, turn, rank, connector).await,
        },
        PrefillKind::Nixl | PrefillKind::Unknown => {
            sequential_handover(job, prefill, body, turn, rank, connector).await
        }
    }
}

/// Removes stop conditions from a prefill leg. Mooncake's prefill side keeps blocks only for
/// requests that end by their length; the decode side would wait minutes for others.
fn ignore_stops(prefill: &mut Value) {
    if let Value::Object(body) = prefill {
        body.remove("stop");
        body.remove("stop_token_ids");
        body.insert("ignore_eos".to_owned(), true.into());
    }
}

fn push(
    job: &mut Job,
    prefill: InFlight,
    body: &JsonObject,
    rank: Option<usize>,
    target: PushTarget,
) -> Result<Handover, HandoverError> {
    job.named.extend([target.engine_id.clone(), target.host.clone()]);
    let id = own_id(&job.id)?;
    let value = id.as_str().parse().expect("an id fits a header");
    job.headers.insert(crate::request::headers::REQUEST_ID, value);
    let sketch = Value::Object(body.sketch());
    let legs = LegBodies::new(body, &sketch, &concurrent::push_legs(&sketch, &id, &target)?);
    Ok(concurrent_handover(job, prefill, legs, rank, ExpectedSource::Engine(target.engine_id)))
}

/// Returns a unique id for a push. Both sides match transfers by it, so an earlier attempt, or
/// another request of the same client id, must not share it. Any client that knows the id can
/// ask the prefill for the blocks, so the id must be hard to guess. vLLM strips a suffix of eight
/// hexadecimal digits; this suffix has a different form.
fn own_id(id: &XRequestId) -> Result<XRequestId, ApiError> {
    let bytes = random_id()?;
    let random: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(XRequestId::new(format!("{id}-k{random}"))
        .unwrap_or_else(|_| XRequestId::from_random(bytes)))
}

/// The bodies of two concurrent legs.
struct LegBodies {
    prefill: Bytes,
    decode: Bytes,
}

impl LegBodies {
    /// Applies what a recipe made of a body's sketch to the body.
    fn new(body: &JsonObject, sketch: &Value, legs: &Legs) -> Self {
        LegBodies {
            prefill: body.with_changes(sketch, &legs.prefill),
            decode: body.with_changes(sketch, &legs.decode),
        }
    }
}

fn concurrent_handover(
    job: &Job,
    prefill: InFlight,
    legs: LegBodies,
    rank: Option<usize>,
    told: ExpectedSource,
) -> Handover {
    let sent = LegRequest::json(&job.path, &job.headers, legs.prefill).for_rank(rank);
    let log = job.record.legs();
    let task = PrefillTask::start(&job.core, &job.live, log, prefill, sent, job.until);
    Handover {
        sent: LegRequest::json(&job.path, &job.headers, legs.decode),
        beside: Some((task, told)),
        kept: None,
    }
}

async fn sequential_handover(
    job: &mut Job,
    prefill: InFlight,
    body: &JsonObject,
    turn: &mut ConversationTurn,
    rank: Option<usize>,
    connector: PoolConnector,
) -> Result<Handover, HandoverError> {
    let bidirectional = job.live.fleet.pools[prefill.instance.pool].bidirectional;
    let sketch = Value::Object(body.sketch());
    let leg = match turn.earlier.take().filter(|_| bidirectional) {
        Some((earlier, version)) => {
            sequential::prefill_leg_of_later_turn(&sketch, &earlier, version)?
        }
        None => sequential::prefill_leg(&sketch)?,
    };
    let leg = body.with_changes(&sketch, &leg);
    let sent = LegRequest::json(&job.path, &job.headers, leg).for_rank(rank);
    let ended = legs::prefill(job.legs(), &prefill, sent, job.until).await;
    let prefilled = ended.map_err(handover_error)?;
    let params = prefilled.answer.params.as_ref();
    let kept = OrphanGuard::new(&job.core.releases, prefill.instance.name(), params);
    job.record.prefill(&prefill.instance, Some(prefilled.time));
    if let Some(params) = &prefilled.answer.params {
        job.named
            .extend([&params.remote_engine_id, &params.remote_host].into_iter().flatten().cloned());
    }
    if let (Some(params), true) = (&prefilled.answer.params, connector != PoolConnector::NixlPull) {
        let setup = &prefill.instance.setup;
        prefill.instance.state.learn_push(params, rank.unwrap_or(0), setup.ranks as usize);
    }
    let leg = match sequential::decode_leg(&sketch, &prefilled.answer, prefilled.version) {
        Ok(leg) => leg,
        Err(error) => {
            let fault = Fault::Broken(error.to_string());
            job.core.blame(&job.live, &prefill.instance, &fault);
            return Err(HandoverError::Failed(fault));
        }
    };
    if !leg.transfers {
        job.core.metrics.without_transfer.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
    turn.version = prefilled.version;
    let leg = body.with_changes(&sketch, &leg.body);
    Ok(Handover { sent: LegRequest::json(&job.path, &job.headers, leg), beside: None, kept })
}

fn handover_error(end: PrefillEnd) -> HandoverError {
    match end {
        PrefillEnd::Rejected(response) => HandoverError::Rejected(response),
        PrefillEnd::Failed(fault) => HandoverError::Failed(fault),
    }
}

/// The first result of a decode leg and its concurrent prefill leg.
enum RaceWinner {
    Answer(AnswerHead),
    Decode(Fault),
    Prefill(HandoverError),
}

async fn race(
    job: &Job,
    decode: &InFlight,
    mut sent: LegRequest,
    beside: &mut Option<(PrefillTask, ExpectedSource)>,
) -> RaceWinner {
    // A decode leg that runs concurrently with its prefill waits for both.
    let extra = if beside.is_some() { job.live.setup.timeouts.prefill } else { Duration::ZERO };
    let until = (job.first_byte() + extra).min(job.until);
    let kind = match job.live.fleet.pools[decode.instance.pool].bidirectional {
        true => AnswerKind::Turn,
        false => AnswerKind::Completion,
    };
    if kind == AnswerKind::Turn {
        crate::request::headers::readable(&mut sent.headers);
    }
    let answer = job.answer(decode, sent, kind, until);
    tokio::pin!(answer);
    if let Some((task, told)) = beside {
        tokio::select! {
            opened = &mut answer => return opened.map_or_else(RaceWinner::Decode, RaceWinner::Answer),
            ended = task.ended() => if let Err(missed) =
                ended.map_err(handover_error).and_then(|prefilled| told.check(&prefilled.answer))
            {
                return RaceWinner::Prefill(missed);
            }
        }
    }
    answer.await.map_or_else(RaceWinner::Decode, RaceWinner::Answer)
}

impl ExpectedSource {
    /// Checks that the decode instance waits for the instance that sends the blocks.
    fn check(&self, answer: &Answer) -> Result<(), HandoverError> {
        match self {
            ExpectedSource::Rank if answer.finish_reason.as_deref() == Some("length") => Ok(()),
            ExpectedSource::Rank => Err(HandoverError::Stopped),
            ExpectedSource::Engine(told) => {
                let engine =
                    answer.params.as_ref().and_then(|params| params.remote_engine_id.as_deref());
                match engine {
                    Some(engine) if engine != told => Err(HandoverError::Failed(Fault::Broken(
                        format!("its engine is {engine}, but the decode leg named {told}"),
                    ))),
                    Some(_) => Ok(()),
                    None => {
                        Err(HandoverError::Failed(Fault::Broken("it kept no blocks".to_owned())))
                    }
                }
            }
        }
    }
}

/// The request's position in a conversation, if its pool transfers both ways.
struct ConversationTurn {
    key: Option<Key>,
    /// The blocks that the previous turn's decode instance holds; they serve one prefill.
    earlier: Option<(Answer, Version)>,
    /// The name of the previous turn's decode instance.
    decode: Option<String>,
    version: Version,
}

impl ConversationTurn {
    fn of(job: &Job, asked: &CompletionRequest, body: &mut JsonObject) -> Self {
        let mut turn = ConversationTurn {
            key: None,
            earlier: None,
            decode: None,
            version: Version::default(),
        };
        let Some(id) = &asked.conversation else { return turn };
        if !job.live.fleet.pools.iter().any(|pool| pool.bidirectional) {
            return turn;
        }
        body.remove("conversation_id");
        let key = Key::new(id, job.authorization.as_ref());
        if let Some((answer, decode)) =
            job.core.conversations.take(&key, body, std::time::Instant::now())
        {
            turn.earlier = Some((answer, Version::default()));
            turn.decode = Some(decode);
        }
        turn.key = Some(key);
        turn
    }

    /// Chooses the previous turn's decode instance, which has the prompt in its cache, or any
    /// other.
    fn choose_decode(
        &mut self,
        job: &Job,
        prefill: &Instance,
        wanted: &crate::fleet::choice::Requirements<'_>,
    ) -> Option<InFlight> {
        let before = self.decode.take().and_then(|name| job.live.fleet.take_decode(&name, wanted));
        before
            .filter(|decode| decode.instance.pairs_with(prefill))
            .or_else(|| job.live.fleet.choose_partner(prefill, wanted))
    }

    fn capture(&self, job: &Job, asked: &CompletionRequest) -> Option<Capture> {
        let key = self.key.clone()?;
        Capture::new(&job.core.conversations, key, &asked.body, asked.stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mooncake_prefill_ends_by_its_length() {
        let mut body = serde_json::json!({"prompt": "a", "stop": ["b"], "stop_token_ids": [1], "max_tokens": 1});
        ignore_stops(&mut body);
        assert_eq!(body, serde_json::json!({"prompt": "a", "max_tokens": 1, "ignore_eos": true}));
        let stopped = Answer { finish_reason: Some("stop".to_owned()), ..Answer::default() };
        assert!(matches!(ExpectedSource::Rank.check(&stopped), Err(HandoverError::Stopped)));
    }

    #[test]
    fn repeated_client_ids_become_distinct_ids() {
        let asked = XRequestId::new("again").unwrap();
        let (one, other) = (own_id(&asked).unwrap(), own_id(&asked).unwrap());
        assert_ne!(one, other);
        assert!(one.as_str().starts_with("again-k"), "{one}");
        assert_ne!(one.as_str().rsplit('-').next().unwrap().len(), 8, "vLLM would strip it");
    }

    #[test]
    fn a_decode_leg_that_names_another_engine_is_abandoned() {
        let params = serde_json::json!({"remote_engine_id": "new"});
        let params = kvx_vllm::params::TransferParams::from_value(&params).unwrap();
        let answer = Answer { params: Some(params), finish_reason: None };
        assert!(ExpectedSource::Engine("new".to_owned()).check(&answer).is_ok());
        let Err(HandoverError::Failed(fault)) =
            ExpectedSource::Engine("old".to_owned()).check(&answer)
        else {
            panic!()
        };
        assert!(fault.to_string().contains("engine is new"), "{fault}");
    }
}
