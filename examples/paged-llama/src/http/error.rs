//! Errors in vLLM's form.

use axum::body::Body;
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse;
use serde_json::{Value, json};

/// The result of a request.
pub(crate) type Result<T> = std::result::Result<T, ApiError>;

/// An error in vLLM's form.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) words: String,
    pub(crate) field: Option<&'static str>,
}

impl ApiError {
    /// Returns an error for an invalid request.
    pub(crate) fn bad(words: impl Into<String>) -> Self {
        ApiError { status: StatusCode::BAD_REQUEST, words: words.into(), field: None }
    }

    /// Returns an error for an invalid field of the request.
    pub(crate) fn of(field: &'static str, words: impl Into<String>) -> Self {
        ApiError { field: Some(field), ..ApiError::bad(words) }
    }

    pub(crate) fn new(status: StatusCode, words: impl Into<String>) -> Self {
        ApiError { status, words: words.into(), field: None }
    }

    /// Returns an error for a failure of the engine.
    pub(crate) fn internal(words: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, words)
    }

    pub(crate) fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            400 => "BadRequestError",
            403 => "PermissionDeniedError",
            404 => "NotFoundError",
            405 => "MethodNotAllowedError",
            408 => "RequestTimeoutError",
            413 => "RequestEntityTooLargeError",
            415 => "UnsupportedMediaTypeError",
            501 => "NotImplementedError",
            503 => "ServiceUnavailableError",
            _ => "InternalServerError",
        };
        json!({"error": {"message": self.words, "type": kind, "param": self.field, "code": self.status.as_u16()}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        answer(self.status, &self.body())
    }
}

/// Returns a response with a JSON body.
pub(crate) fn answer(status: StatusCode, body: &Value) -> Response<Body> {
    let kind = [(axum::http::header::CONTENT_TYPE, "application/json")];
    (status, kind, body.to_string()).into_response()
}
