//! `/requests`: the timelines of past requests, for clients with `ADMIN_API_KEY`. They have the ids
//! of others' requests.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use hyper::header::{CACHE_CONTROL, HeaderMap, HeaderValue};
use hyper::{Response, StatusCode, Uri};
use serde_json::{Value, json};

use super::admin;
use crate::relay::api_error::{ApiError, json_response};
use crate::relay::core::Core;
use crate::timeline::{LAST, RequestView, SLOWEST, Timeline, trace};

/// The parameters of a query.
#[derive(Debug, PartialEq)]
struct Query {
    limit: usize,
    is_trace: bool,
}

impl Query {
    fn read(query: &str) -> Result<Self, ApiError> {
        let mut read = Query { limit: LAST, is_trace: false };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("format", "json")) => read.is_trace = false,
                Some(("format", "trace")) => read.is_trace = true,
                Some(("limit", count)) if count.parse::<usize>().is_ok() => {
                    read.limit = count.parse().unwrap_or(LAST).min(LAST);
                }
                _ => {
                    let words = "the query may have format=json, format=trace and limit=COUNT";
                    return Err(ApiError::bad_request(words));
                }
            }
        }
        Ok(read)
    }
}

pub(super) async fn requests(
    State(core): State<Arc<Core>>,
    uri: Uri,
    headers: HeaderMap,
) -> Response<Body> {
    let query =
        admin::admitted(&core, &headers).and_then(|()| Query::read(uri.query().unwrap_or("")));
    let query = match query {
        Ok(query) => query,
        Err(refusal) => return refusal.response(),
    };
    // A thousand timelines take milliseconds: other requests do not wait for them.
    let written = tokio::task::spawn_blocking(move || {
        let value =
            if query.is_trace { traced(&core, query.limit) } else { listed(&core, query.limit) };
        json_response(StatusCode::OK, &value)
    });
    match written.await {
        Ok(mut response) => {
            let headers = response.headers_mut();
            headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response
        }
        Err(error) => ApiError::unavailable(format!("no timelines: {error}")).response(),
    }
}

fn listed(core: &Core, limit: usize) -> Value {
    let history = &core.history;
    let views = |requests: &[Arc<Timeline>]| {
        let view = |one: &Arc<Timeline>| serde_json::to_value(RequestView::new(history, one));
        requests.iter().filter_map(|one| view(one).ok()).collect::<Vec<_>>()
    };
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "kept": {"last": LAST, "slowest": SLOWEST},
        "last": views(&history.last(limit)),
        "slowest": views(&history.slowest(limit)),
    })
}

/// Returns the last requests, and the slowest ones that are not among them, as a trace.
fn traced(core: &Core, limit: usize) -> Value {
    let mut requests = core.history.last(limit);
    let known: std::collections::HashSet<_> = requests.iter().map(Arc::as_ptr).collect();
    let slowest = core.history.slowest(limit);
    requests.extend(slowest.into_iter().filter(|one| !known.contains(&Arc::as_ptr(one))));
    trace(&core.history, &requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_is_read() {
        let read = |query| Query::read(query).map_err(|error| error.message);
        assert_eq!(read(""), Ok(Query { limit: 1000, is_trace: false }));
        assert_eq!(read("limit=7&format=trace"), Ok(Query { limit: 7, is_trace: true }));
        assert_eq!(read("limit=99999&format=json"), Ok(Query { limit: 1000, is_trace: false }));
        for wrong in ["limit=-1", "limit=", "format=xml", "more", "limit=1&x=2"] {
            assert!(read(wrong).unwrap_err().contains("format=trace"), "{wrong}");
        }
    }
}
