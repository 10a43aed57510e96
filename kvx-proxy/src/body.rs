//! Reads the bodies of requests within their limits.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, Limited};
use hyper::StatusCode;
use hyper::header::{CONTENT_LENGTH, HeaderMap};

use crate::admission::{BodyMemory, BodyPermit};
use crate::setup::ClientLimits;

/// Why a body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyError {
    /// The body is longer than this limit.
    TooLong(usize),
    /// The client disconnected, or sent something else than HTTP.
    EndedEarly,
    /// The body did not arrive within this time.
    Late(Duration),
    /// Other bodies use all the memory for bodies.
    NoMemory,
}

impl BodyError {
    /// Returns the status of the answer.
    pub fn status(&self) -> StatusCode {
        match self {
            BodyError::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::EndedEarly => StatusCode::BAD_REQUEST,
            BodyError::Late(_) => StatusCode::REQUEST_TIMEOUT,
            BodyError::NoMemory => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl std::fmt::Display for BodyError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BodyError::TooLong(limit) => {
                write!(f, "the body is longer than {limit} bytes, which is the limit here")
            }
            BodyError::EndedEarly => f.write_str("the body ended early"),
            BodyError::Late(time) => write!(f, "the body did not arrive within {time:?}"),
            BodyError::NoMemory => {
                f.write_str("too many long requests are in progress: try again later")
            }
        }
    }
}

/// Reads a client's body within the limits of length and time. Also returns its share of the memory
/// for all bodies.
///
/// # Errors
///
/// Fails if a limit is exceeded, or the client disconnects.
pub async fn read_body(
    memory: &BodyMemory,
    limits: &ClientLimits,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Bytes, BodyPermit), BodyError> {
    let too_long = BodyError::TooLong(limits.body);
    let announced =
        headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|announced| announced > limits.body as u64) {
        return Err(too_long);
    }
    let read = async {
        let (mut body, mut read, mut permit) =
            (Limited::new(body, limits.body), BytesMut::new(), BodyPermit::default());
        while let Some(frame) = body.frame().await {
            let data = match frame {
                Ok(frame) => frame.into_data().unwrap_or_default(),
                Err(error) if error.is::<http_body_util::LengthLimitError>() => {
                    return Err(too_long);
                }
                Err(_) => return Err(BodyError::EndedEarly),
            };
            if !memory.widen(&mut permit, read.len() + data.len()) {
                return Err(BodyError::NoMemory);
            }
            read.extend_from_slice(&data);
        }
        Ok((read.freeze(), permit))
    };
    match tokio::time::timeout(limits.body_time, read).await {
        Ok(read) => read,
        Err(_) => Err(BodyError::Late(limits.body_time)),
    }
}
