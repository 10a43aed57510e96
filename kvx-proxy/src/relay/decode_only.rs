//! Requests that one decode instance serves alone.

use std::sync::Arc;

use hyper::Method;
use hyper::header::{CONTENT_LENGTH, HeaderValue};
use serde::de::{Deserialize as _, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::answer_head::AnswerKind;
use super::job::{Job, JobResult};
use super::legs::LegRequest;
use crate::fleet::Fleet;
use crate::fleet::instance::{InFlight, Instance, Role};
use crate::fleet::missing::BOTH;
use crate::request::{CompletionRequest, NO_PROMPT, PassthroughRequest, PromptKey};
use crate::upstream::Fault;

/// Serves a completion on a decode instance alone.
pub(crate) async fn completion(
    mut job: Job,
    asked: &CompletionRequest,
    reason: &'static str,
) -> JobResult {
    job.record.route("decode_alone", reason);
    on_decode(job, asked, false).await
}

/// Serves a completion on a decode instance because no prefill instance is up, within the
/// [share](super::fallback) of such requests.
pub(crate) async fn fallback(mut job: Job, asked: &CompletionRequest) -> JobResult {
    job.record.route("decode_alone", "fallback");
    on_decode(job, asked, true).await
}

async fn on_decode(mut job: Job, asked: &CompletionRequest, is_fallback: bool) -> JobResult {
    job.streamed = asked.stream;
    let sent = LegRequest::json(&job.path, &job.headers, asked.body.text());
    let tokens = asked.prompt_tokens + asked.new_tokens;
    let to = Destination {
        tokens,
        // A fallback counts with all its tokens: one that is refused must not leave its prompt
        // among those that the router takes for cached.
        prompt: if is_fallback { &NO_PROMPT } else { &asked.prompt },
        model: asked.model.as_deref(),
        stored_by: None,
        is_fallback,
    };
    // A completion has no side effects, so it may be retried.
    run(job, sent, AnswerKind::Completion, &to, true).await
}

/// Passes any other request through unchanged.
pub(crate) async fn passthrough(
    mut job: Job,
    asked: PassthroughRequest,
    stored_by: Option<String>,
) -> JobResult {
    job.record.route("passed", "");
    job.streamed = asked.stream;
    let PassthroughRequest { body, model, .. } = asked;
    let mut headers = job.headers.clone();
    if !body.is_empty() || job.method == Method::POST {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    }
    let tokens = (body.len() / 4) as u64 + 1;
    let to = Destination {
        tokens,
        prompt: &NO_PROMPT,
        model: model.as_deref(),
        stored_by: stored_by.as_deref(),
        is_fallback: false,
    };
    let sent = LegRequest::new(&job.path, headers, body);
    run(job, sent, AnswerKind::Any, &to, false).await
}

struct Destination<'a> {
    tokens: u64,
    prompt: &'a PromptKey,
    model: Option<&'a str>,
    stored_by: Option<&'a str>,
    is_fallback: bool,
}

impl Destination<'_> {
    /// Describes the missing instances when none can be chosen.
    fn missing(&self, fleet: &Fleet) -> String {
        match self.stored_by {
            Some(_) => "the decode instance that stored this response is not up".to_owned(),
            None if self.is_fallback => fleet.why_unserved(self.model, &BOTH),
            None => fleet.why_unserved(self.model, &[Role::Decode]),
        }
    }
}

fn choose(job: &Job, to: &Destination<'_>, avoid: &[Arc<Instance>]) -> Option<InFlight> {
    let fleet = &job.live.fleet;
    let model = to.model.map(|model| fleet.names.named(model));
    if let Some(name) = to.stored_by {
        return fleet.take_decode(name, &job.requirements(to.tokens, to.prompt, None, &[]));
    }
    let chosen = fleet.choose_alone(&job.requirements(to.tokens, to.prompt, model, avoid));
    // No instance serves this model: let one of them answer with its own error.
    let unknown =
        model.is_some_and(|model| !fleet.decode.iter().any(|one| one.state.models.serve(model)));
    match chosen {
        None if unknown => fleet.choose_alone(&job.requirements(to.tokens, to.prompt, None, avoid)),
        chosen => chosen,
    }
}

async fn run(
    mut job: Job,
    sent: LegRequest,
    kind: AnswerKind,
    to: &Destination<'_>,
    may_repeat: bool,
) -> JobResult {
    let mut avoid = Vec::new();
    let mut last: Option<(Arc<Instance>, Fault)> = None;
    loop {
        let Some(decode) = choose(&job, to, &avoid) else {
            return job.give_up(last, |fleet| to.missing(fleet));
        };
        if to.is_fallback
            && let Err(refusal) = job.enter_fallback(&decode, to.model, avoid.is_empty())
        {
            return Err(job.refused(refusal));
        }
        let opened = job.answer(&decode, sent.clone(), kind, job.first_byte()).await;
        let fault = match opened {
            Ok(opened) if opened.is_error && may_repeat => {
                if !job.may_retry("decode") {
                    return Ok(job.pass(opened, decode, None, None));
                }
                let fault = Fault::failed_stream(&opened.first);
                job.core.blame(&job.live, &decode.instance, &fault);
                avoid.push(Arc::clone(&decode.instance));
                continue;
            }
            Ok(opened) => {
                if job.method == Method::POST
                    && job.path.path() == "/v1/responses"
                    && opened.parts.status.is_success()
                    && let Some(id) = response_id(&opened.first, opened.events.is_some())
                {
                    job.core.store(id, decode.instance.name());
                }
                return Ok(job.pass(opened, decode, None, None));
            }
            Err(fault) => fault,
        };
        let instance = Arc::clone(&decode.instance);
        avoid.push(Arc::clone(&instance));
        drop(decode);
        let may_repeat = may_repeat && !job.is_out_of_time(&fault);
        if !(fault.not_accepted() || may_repeat) || !job.may_retry("decode") {
            return job.fail(&instance, fault);
        }
        last = Some((instance, fault));
    }
}

/// Returns the id of a stored response, from the beginning of its answer: an object, or an event
/// with one. Clients choose other texts in it.
fn response_id(first: &[u8], is_stream: bool) -> Option<String> {
    let (json, path) = match is_stream {
        false => (first, &["id"][..]),
        true => {
            let mut lines = first.split(|byte| matches!(byte, b'\n' | b'\r'));
            (lines.find_map(|line| line.strip_prefix(b"data:"))?, &["response", "id"][..])
        }
    };
    let mut id = None;
    // Expected: an error at the end of the beginning.
    let _ = TextAt { path, found: &mut id }
        .deserialize(&mut serde_json::Deserializer::from_slice(json));
    id.filter(|id| id.len() <= 128)
}

/// A reader of the text at a path of keys in a JSON object, which may end early.
struct TextAt<'a> {
    path: &'a [&'static str],
    found: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for TextAt<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        if self.path.is_empty() {
            *self.found = Some(String::deserialize(from)?);
            return Ok(());
        }
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TextAt<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let TextAt { path, found } = self;
        while let Some(key) = map.next_key::<String>()? {
            match path {
                [first, rest @ ..] if key == *first => {
                    return map.next_value_seed(TextAt { path: rest, found });
                }
                _ => map.next_value::<IgnoredAny>()?,
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::response_id;

    #[test]
    fn the_id_of_a_response_is_found() {
        let found = |first: &[u8], is_stream| response_id(first, is_stream);
        let object = br#"{"object": "response", "id": "resp_0a", "x": 1}"#;
        assert_eq!(found(object, false).as_deref(), Some("resp_0a"));
        let beginning = br#"{"id": "resp_0a", "output": [{"te"#;
        assert_eq!(found(beginning, false).as_deref(), Some("resp_0a"));
        let event = b"event: response.created\ndata: {\"response\":{\"id\":\"resp_1\"}}\n\n";
        assert_eq!(found(event, true).as_deref(), Some("resp_1"));
        for none in
            [&b"{}"[..], b"\"resp_", b"\"resp_without end", br#"{"id": 5}"#, br#"{"id": "resp_"#]
        {
            assert_eq!(found(none, false), None, "{}", none.escape_ascii());
        }
        assert_eq!(found(format!("{{\"id\": \"{}\"}}", "x".repeat(129)).as_bytes(), false), None);
    }

    #[test]
    fn texts_of_clients_are_no_ids() {
        let object = br#"{"instructions": "resp_other", "metadata": {"id": "resp_other"}, "id": "resp_own"}"#;
        assert_eq!(response_id(object, false).as_deref(), Some("resp_own"));
        let beginning = br#"{"instructions": "resp_other", "input": [{"id": "resp_other"}], "te"#;
        assert_eq!(response_id(beginning, false), None);
        let event =
            [&b"data: {\"id\": \"resp_other\", \"response\": "[..], object, b"}\n\n"].concat();
        assert_eq!(response_id(&event, true).as_deref(), Some("resp_own"));
    }
}
