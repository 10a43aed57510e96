//! `/explain`: where a request would go, and why, for clients with `ADMIN_API_KEY`. The answer says
//! which prompts are cached, and so which prompts others have sent.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use hyper::{Request, Response, StatusCode};

use super::admin;
use crate::body::read_body;
use crate::explain::Explanation;
use crate::fleet::choice::Requirements;
use crate::fleet::missing::BOTH;
use crate::relay::api_error::{ApiError, json_response};
use crate::relay::core::{Core, LiveSetup};
use crate::relay::disaggregated::reason_to_go_alone;
use crate::relay::tokens;
use crate::request::CompletionRequest;
use crate::setup::Fallback;

pub(super) async fn explain(
    State(core): State<Arc<Core>>,
    request: Request<Body>,
) -> Response<Body> {
    explained(&core, request).await.unwrap_or_else(|refusal| refusal.response())
}

async fn explained(core: &Core, request: Request<Body>) -> Result<Response<Body>, ApiError> {
    let (parts, body) = request.into_parts();
    admin::admitted(core, &parts.headers)?;
    let live = core.live();
    let read = read_body(live.admission.bodies(), &live.setup.limits, &parts.headers, body).await;
    let (body, permit) =
        read.map_err(|error| ApiError::client(error.status(), error.to_string()))?;
    let prefix_tokens = live.setup.prefix_tokens;
    let parse = move || (CompletionRequest::new(body, prefix_tokens), permit);
    let parsed = tokio::task::spawn_blocking(parse).await;
    let (asked, _permit) = parsed
        .map_err(|error| ApiError::unavailable(format!("the body was not parsed: {error}")))?;
    let mut asked = asked.map_err(ApiError::bad_request)?;
    let headers = live.headers_for_instances();
    tokens::find(core, &live, &headers, &mut asked).await;
    let explanation = explanation(core, &live, &asked);
    let value = serde_json::to_value(&explanation)
        .map_err(|error| ApiError::unavailable(error.to_string()))?;
    Ok(json_response(StatusCode::OK, &value))
}

fn explanation(core: &Core, live: &LiveSetup, asked: &CompletionRequest) -> Explanation {
    let fleet = &live.fleet;
    let model = asked.model.as_deref().map(|model| fleet.names.named(model));
    let wanted = |tokens| Requirements {
        tokens,
        prefix: asked.prompt.prefix,
        chunks: &asked.prompt.chunks,
        token_ids: asked.prompt.tokens.as_deref(),
        model,
        avoid: &[],
        now: Instant::now(),
    };
    let of_decode = wanted(asked.prompt_tokens + asked.new_tokens);
    let mut explained = Explanation {
        route: "none".to_owned(),
        model: asked.model.clone(),
        prompt_tokens: asked.prompt_tokens,
        new_tokens: asked.new_tokens,
        prefill: None,
        decode: None,
        notes: Vec::new(),
    };
    if core.is_draining() {
        explained.notes.push("this proxy is shutting down: it refuses new requests".to_owned());
    }
    let mut alone = reason_to_go_alone(live, asked, model);
    if alone.is_none() {
        let (winner, side) = fleet.rank_prefill(&wanted(asked.prompt_tokens));
        explained.prefill = Some(side);
        match winner {
            Some(prefill) => {
                let (winner, side) = fleet.rank_partner(&prefill, &of_decode);
                explained.decode = Some(side);
                if winner.is_some() {
                    explained.route = "disaggregated".to_owned();
                }
            }
            None if live.setup.fallback == Fallback::Decode => alone = Some("fallback"),
            None => {}
        }
    }
    if let Some(reason) = alone {
        let (winner, side) = fleet.rank_alone(&of_decode);
        let tokens = winner.as_ref().and_then(|winner| side.tokens_at(winner.name()));
        explained.decode = Some(side);
        if let Some(decode) = winner {
            explained.route = format!("decode-alone; {reason}");
            let tokens = tokens.unwrap_or(of_decode.tokens);
            let load = fleet.decode_load(decode.pool) + tokens;
            if reason == "fallback" && !core.fallbacks.admits(&decode.pool_name, tokens, load) {
                explained.route = "none".to_owned();
                let note = "other requests take the whole share of fallbacks: this one gets 503";
                explained.notes.push(note.to_owned());
            }
        }
    }
    if explained.route == "none" && explained.notes.is_empty() {
        explained.notes.push(fleet.why_unserved(asked.model.as_deref(), &BOTH));
    }
    if asked.conversation.is_some() && fleet.pools.iter().any(|pool| pool.bidirectional) {
        let note = "a later turn of a conversation goes to the decode instance of the turn before \
                    it, if that is up";
        explained.notes.push(note.to_owned());
    }
    explained
}
