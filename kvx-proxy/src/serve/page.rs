//! The status page `/` and its data, `/status`. The page has no data of its own: it asks for a key
//! where clients need one.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use axum::body::Body;
use axum::extract::State;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Response, StatusCode};
use serde_json::json;

use super::admin;
use crate::fleet::missing::{self, BOTH};
use crate::relay::api_error::{ApiError, json_response};
use crate::relay::core::Core;

const PAGE: &str = include_str!("page.html");
/// Allows only the page's own style and script, and requests to this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn closed() -> Response<Body> {
    ApiError::client(StatusCode::NOT_FOUND, "the page is switched off").response()
}

pub(super) async fn page(State(core): State<Arc<Core>>) -> Response<Body> {
    if !core.live().setup.page {
        return closed();
    }
    let mut response = Response::new(Body::from(PAGE));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

pub(super) async fn status(State(core): State<Arc<Core>>) -> Response<Body> {
    let live = core.live();
    if !live.setup.page {
        return closed();
    }
    let metrics = &core.metrics;
    let status = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "up_for": metrics.started.elapsed().as_secs_f64(),
        "ready": !core.is_draining() && live.fleet.is_ready(),
        "draining": core.is_draining(),
        "missing": missing::words(&live.fleet.missing(None, &BOTH)),
        "in_flight": metrics.in_flight.load(Relaxed),
        "queued": metrics.queued.load(Relaxed),
        "connections": metrics.connections.load(Relaxed),
        "requests": metrics.outcomes(),
        "instances": live.fleet.all().map(|one| admin::describe(one)).collect::<Vec<_>>(),
        "discovery": metrics.discovery.json(),
        "releases": core.releases.status(),
        "errors": core.errors.list(),
    });
    let mut response = json_response(StatusCode::OK, &status);
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
