//! Checks clients' API keys, as vLLM does with `--api-key`.

use axum::extract::{Request, State};
use axum::http::header::WWW_AUTHENTICATE;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use kvx_proxy::server::Keys;
use serde_json::json;

use super::error::answer;

/// The paths that need no key, as in vLLM. All others need one, even if they do not exist.
const PUBLIC: [&str; 4] = ["/health", "/ping", "/version", "/metrics"];

/// Rejects a request without one of the keys, before its body is read.
pub(super) async fn check(State(keys): State<Keys>, request: Request, next: Next) -> Response {
    if PUBLIC.contains(&request.uri().path()) || keys.admit(request.headers()) {
        return next.run(request).await;
    }
    // vLLM's words.
    let mut refusal = answer(StatusCode::UNAUTHORIZED, &json!({"error": "Unauthorized"}));
    refusal.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    refusal
}
