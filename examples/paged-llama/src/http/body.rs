//! The bodies of requests, read within the limits.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use kvx_proxy::server::{BodyPermit, read_body};

use super::error::{ApiError, Result};
use super::service::Service;

/// A request's body, with its share of the memory for all bodies.
#[derive(Debug)]
pub(super) struct RequestBody {
    bytes: Bytes,
    _permit: BodyPermit,
}

impl RequestBody {
    pub(super) fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

impl FromRequest<Arc<Service>> for RequestBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, service: &Arc<Service>) -> Result<Self> {
        let (parts, body) = request.into_parts();
        let limits = &service.request_limits;
        match read_body(&limits.bodies, &limits.clients, &parts.headers, body).await {
            Ok((bytes, permit)) => Ok(RequestBody { bytes, _permit: permit }),
            Err(error) => Err(ApiError::new(error.status(), error.to_string())),
        }
    }
}
