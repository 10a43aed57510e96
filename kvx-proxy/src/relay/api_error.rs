//! Errors that the proxy returns itself, and its JSON responses.

use axum::body::Body;
use hyper::header::{CONNECTION, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};

use crate::fleet::instance::Instance;
use crate::metrics::RequestOutcome;
use crate::upstream::{Fault, json_headers};

/// An error in OpenAI's format.
#[derive(Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    pub(crate) outcome: RequestOutcome,
    later: bool,
    close: bool,
}

impl ApiError {
    fn new(
        status: StatusCode,
        kind: &'static str,
        outcome: RequestOutcome,
        message: impl Into<String>,
    ) -> Self {
        ApiError { status, kind, message: message.into(), outcome, later: false, close: false }
    }

    /// Returns a 400 for an invalid request.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            "invalid_request_error",
            RequestOutcome::ClientError,
            message,
        )
    }

    /// Returns a client error with another status.
    pub(crate) fn client(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", RequestOutcome::ClientError, message)
    }

    /// Returns a 401: the client sent no key, or a wrong one.
    pub(crate) fn unauthorized() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            "authentication_error",
            RequestOutcome::Refused,
            "this proxy needs a key: send one as Authorization: Bearer KEY",
        )
    }

    /// Returns a 503 that asks the client to retry later.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        let refusal = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "service_unavailable",
            RequestOutcome::Refused,
            message,
        );
        ApiError { later: true, ..refusal }
    }

    /// Returns a 503 that also closes the connection.
    pub(crate) fn draining() -> Self {
        ApiError {
            close: true,
            ..Self::unavailable("this proxy is shutting down and takes no more requests")
        }
    }

    /// Returns a 504.
    pub(crate) fn timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "upstream_timeout", RequestOutcome::Timeout, message)
    }

    /// Returns the error for an instance's fault, if there is no answer of the instance to forward.
    /// It names no address: the log does.
    pub(crate) fn upstream(instance: &Instance, fault: &Fault) -> Self {
        let (role, pool) = (instance.role.as_str(), &instance.pool_name);
        let message = format!(
            "the {role} instance in pool {pool} {}; this router's log says more about this \
             X-Request-Id",
            fault.summary()
        );
        match fault {
            Fault::Late(_) | Fault::Unreached(_) => Self::timeout(message),
            _ => Self::new(
                StatusCode::BAD_GATEWAY,
                "upstream_error",
                RequestOutcome::UpstreamError,
                message,
            ),
        }
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::json!({"error": {
            "message": self.message, "type": self.kind, "param": null, "code": self.status.as_u16(),
        }})
    }

    pub(crate) fn response(&self) -> Response<Body> {
        let mut response = json_response(self.status, &self.json());
        if self.later {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.close {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// Returns a response with a JSON body.
pub(crate) fn json_response(status: StatusCode, value: &serde_json::Value) -> Response<Body> {
    let body = value.to_string();
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    json_headers(response.headers_mut(), body.len());
    *response.body_mut() = Body::from(body);
    response
}
