//! Requests to etcd, each with a time limit and a limit on its answer.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, HeaderValue};
use hyper::{Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::messages::{
    Base64, EmptyAnswer, ErrorAnswer, KeepAliveAnswer, KeyValue, LeaseAnswer, Number, RangeAnswer,
    Streamed, TokenAnswer,
};
use crate::endpoint::{Endpoint, EndpointClient, head_by};
use crate::log::shown;
use crate::setup::Login;
use crate::tls_files::TlsFiles;

/// The time that a member has to answer; a hung one never answers.
pub(super) const CALL: Duration = Duration::from_secs(3);
/// The most bytes of an answer. A value of etcd's largest size takes half of it.
const ANSWER: usize = 4 << 20;
/// The most entries of a page.
const PAGE: usize = 256;

/// gRPC's codes: the request is invalid, also for lack of a user; a lease does not exist; the token
/// is invalid.
const INVALID_ARGUMENT: u32 = 3;
const NOT_FOUND: u32 = 5;
const PERMISSION_DENIED: u32 = 7;
const UNAUTHENTICATED: u32 = 16;

/// The reason why a call has no result.
#[derive(Debug)]
pub(crate) enum CallError {
    /// No endpoint has answered usably.
    Unavailable(String),
    /// etcd has refused the request.
    Refused {
        /// gRPC's code.
        code: Option<u32>,
        /// etcd's message.
        message: String,
    },
    /// The answer has too many bytes.
    TooLong,
    /// There are more entries than these.
    TooMany(usize),
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::Unavailable(why) => write!(f, "etcd does not answer: {why}"),
            CallError::Refused { code, message } => {
                write!(f, "etcd refuses the request: {message}")?;
                match code {
                    Some(INVALID_ARGUMENT | UNAUTHENTICATED) => f.write_str(
                        "; if it has users, set ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD",
                    ),
                    Some(PERMISSION_DENIED) => f.write_str(
                        "; give the user in ETCD_AUTH_USERNAME rights on the prefix \
                         /kvx/v1/instances/FLEET/: engines to write, routers to read",
                    ),
                    _ => Ok(()),
                }
            }
            CallError::TooLong => write!(f, "etcd's answer is longer than {ANSWER} bytes"),
            CallError::TooMany(most) => {
                write!(f, "more than {most} entries are listed; delete those of others")
            }
        }
    }
}

impl CallError {
    fn unavailable(why: impl ToString) -> Self {
        CallError::Unavailable(why.to_string())
    }

    /// Returns true if the request named a lease that does not exist.
    pub(crate) fn is_lost_lease(&self) -> bool {
        matches!(self, CallError::Refused { code: Some(NOT_FOUND), .. })
    }

    /// Returns true if a new token may help: etcd reports most failures of tokens as invalid
    /// requests.
    fn may_need_token(&self) -> bool {
        let CallError::Refused { code, .. } = self else { return false };
        matches!(code, Some(INVALID_ARGUMENT | UNAUTHENTICATED))
    }
}

/// A lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    pub(crate) id: u64,
    pub(crate) ttl: Duration,
}

/// The members of an etcd cluster. Requests go to one of them until it fails.
#[derive(Debug)]
pub(crate) struct Client {
    endpoints: Vec<Endpoint>,
    http: EndpointClient,
    login: Option<Login>,
    token: Mutex<Option<HeaderValue>>,
    current: AtomicUsize,
}

impl Client {
    /// Creates a client of at least one endpoint.
    pub(crate) fn new(
        endpoints: Vec<Endpoint>,
        login: Option<Login>,
        files: &TlsFiles,
    ) -> crate::Result<Self> {
        let http = crate::endpoint::client_with(&endpoints, files)?;
        let (token, current) = (Mutex::default(), AtomicUsize::new(0));
        Ok(Client { endpoints, http, login, token, current })
    }

    /// Creates a lease.
    pub(crate) async fn grant(&self, ttl: Duration) -> Result<Lease, CallError> {
        let body = json!({"TTL": Number(ttl.as_secs().max(1))});
        let LeaseAnswer { id, ttl } = self.call("/v3/lease/grant", &body).await?;
        Ok(Lease { id: id.0, ttl: Duration::from_secs(ttl.0.clamp(1, 3600)) })
    }

    /// Renews a lease. Returns false if the lease does not exist. Each is a request of its own: the
    /// gateway's streams of keepalives lose answers.
    pub(crate) async fn keep_alive(&self, lease: u64) -> Result<bool, CallError> {
        let body = json!({"ID": Number(lease)});
        let answer: Streamed<KeepAliveAnswer> = self.call("/v3/lease/keepalive", &body).await?;
        match (answer.result, answer.error) {
            (Some(answer), None) => Ok(answer.ttl.0 > 0),
            (_, error) => Err(refused(error.unwrap_or_default())),
        }
    }

    /// Ends a lease, and deletes its keys.
    pub(crate) async fn revoke(&self, lease: u64) -> Result<(), CallError> {
        let EmptyAnswer {} = self.call("/v3/lease/revoke", &json!({"ID": Number(lease)})).await?;
        Ok(())
    }

    /// Sets a key that is deleted when the lease ends.
    pub(crate) async fn put(&self, key: &str, value: &str, lease: u64) -> Result<(), CallError> {
        let body = json!({
            "key": Base64(key.into()),
            "value": Base64(value.into()),
            "lease": Number(lease),
        });
        let EmptyAnswer {} = self.call("/v3/kv/put", &body).await?;
        Ok(())
    }

    /// Deletes a key.
    pub(crate) async fn delete(&self, key: &str) -> Result<(), CallError> {
        let body = json!({"key": Base64(key.into())});
        let EmptyAnswer {} = self.call("/v3/kv/deleterange", &body).await?;
        Ok(())
    }

    /// Calls `each` with every entry of a prefix. All are of one revision, which this returns. Fails
    /// if there are many more than `most`.
    pub(crate) async fn list(
        &self,
        prefix: &str,
        most: usize,
        mut each: impl FnMut(KeyValue),
    ) -> Result<u64, CallError> {
        let (mut from, end) = (Base64(prefix.into()), prefix_end(prefix));
        let (mut revision, mut limit, mut count) = (0, PAGE, 0);
        loop {
            let body = json!({
                "key": from,
                "range_end": end,
                "limit": Number(limit as u64),
                "revision": Number(revision),
            });
            let page: RangeAnswer = match self.call("/v3/kv/range", &body).await {
                // Someone has written large values. One of them always fits.
                Err(CallError::TooLong) if limit > 1 => {
                    limit = (limit / 8).max(1);
                    continue;
                }
                page => page?,
            };
            if revision == 0 {
                revision = page.header.revision.0;
            }
            let last = page.kvs.last().map(|entry| entry.key.clone());
            count += page.kvs.len();
            page.kvs.into_iter().map(KeyValue::from).for_each(&mut each);
            match last.filter(|_| page.more) {
                Some(_) if count >= most => return Err(CallError::TooMany(most)),
                Some(last) => {
                    from = last;
                    from.0.push(0);
                }
                None => return Ok(revision),
            }
        }
    }

    /// Checks that a member can answer from the majority's data, as a hung one cannot, or one that
    /// has lost its leader.
    pub(super) async fn check(&self, endpoint: usize, prefix: &str) -> Result<(), CallError> {
        let body = json!({
            "key": Base64(prefix.into()),
            "range_end": prefix_end(prefix),
            "count_only": true,
        });
        let RangeAnswer { .. } = self.call_at(endpoint, "/v3/kv/range", &body).await?;
        Ok(())
    }

    /// Returns the endpoint that requests go to.
    pub(super) fn endpoint(&self) -> usize {
        self.current.load(Relaxed)
    }

    /// Makes requests go to another endpoint than this one, if there is another.
    pub(super) fn avoid(&self, endpoint: usize) {
        let next = (endpoint + 1) % self.endpoints.len();
        // An error: it is another one already.
        let _ = self.current.compare_exchange(endpoint, next, Relaxed, Relaxed);
    }

    /// Sends a request to the endpoints, one after the other, until one answers.
    async fn call<A: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<A, CallError> {
        let first = self.endpoint();
        let mut failures = Vec::new();
        for step in 0..self.endpoints.len() {
            let endpoint = (first + step) % self.endpoints.len();
            match self.call_at(endpoint, path, body).await {
                Err(CallError::Unavailable(why)) => failures.push(why),
                answer => {
                    self.current.store(endpoint, Relaxed);
                    return answer;
                }
            }
        }
        Err(CallError::Unavailable(failures.join("; ")))
    }

    /// Sends a request to an endpoint, and once again with a new token if that may help.
    async fn call_at<A: DeserializeOwned>(
        &self,
        endpoint: usize,
        path: &str,
        body: &Value,
    ) -> Result<A, CallError> {
        let token = self.token(endpoint).await?;
        match self.ask(endpoint, path, body, token).await {
            Err(error) if self.login.is_some() && error.may_need_token() => {
                *self.kept_token() = None;
                let token = self.token(endpoint).await?;
                self.ask(endpoint, path, body, token).await
            }
            answer => answer,
        }
    }

    fn kept_token(&self) -> MutexGuard<'_, Option<HeaderValue>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the user's token, if there is a user. Gets one if there is none yet.
    async fn token(&self, endpoint: usize) -> Result<Option<HeaderValue>, CallError> {
        let Some(login) = &self.login else { return Ok(None) };
        if let Some(token) = self.kept_token().clone() {
            return Ok(Some(token));
        }
        let body = json!({"name": login.user, "password": login.password.text()});
        let TokenAnswer { token } =
            self.ask(endpoint, "/v3/auth/authenticate", &body, None).await?;
        let mut token = HeaderValue::from_str(&token)
            .map_err(|_| CallError::unavailable("its token is not a header"))?;
        token.set_sensitive(true);
        *self.kept_token() = Some(token.clone());
        Ok(Some(token))
    }

    async fn ask<A: DeserializeOwned>(
        &self,
        endpoint: usize,
        path: &str,
        body: &Value,
        token: Option<HeaderValue>,
    ) -> Result<A, CallError> {
        let until = Instant::now() + CALL;
        let named = |error| match error {
            CallError::Unavailable(why) => {
                CallError::Unavailable(format!("{}: {why}", self.endpoints[endpoint].url()))
            }
            other => other,
        };
        let answer = async {
            let response = self.head(endpoint, path, body, token, until).await?;
            let status = response.status();
            read(status, &whole(response.into_body(), until).await?)
        };
        answer.await.map_err(named)
    }

    async fn head(
        &self,
        endpoint: usize,
        path: &str,
        body: &Value,
        token: Option<HeaderValue>,
        until: Instant,
    ) -> Result<Response<Incoming>, CallError> {
        let request = self.endpoints[endpoint].request(None, path, Some(body.to_string()));
        let mut request = request.map_err(CallError::unavailable)?;
        if let Some(token) = token {
            request.headers_mut().insert(AUTHORIZATION, token);
        }
        head_by(&self.http, request, until).await.map_err(CallError::unavailable)
    }

    /// Sends a request, and returns the body of a successful answer, to be read as a stream.
    pub(super) async fn stream(
        &self,
        endpoint: usize,
        path: &str,
        body: &Value,
    ) -> Result<Incoming, CallError> {
        let token = self.token(endpoint).await?;
        let until = Instant::now() + CALL;
        let response = self.head(endpoint, path, body, token, until).await?;
        match response.status() {
            StatusCode::OK => Ok(response.into_body()),
            status => Err(read::<EmptyAnswer>(status, &whole(response.into_body(), until).await?)
                .err()
                .unwrap_or_else(|| CallError::unavailable(format!("status {status}")))),
        }
    }
}

/// Returns the first key after all keys with a prefix that ends with a slash.
pub(super) fn prefix_end(prefix: &str) -> Base64 {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    Base64(end)
}

async fn whole(body: Incoming, until: Instant) -> Result<Bytes, CallError> {
    match timeout_at(until, Limited::new(body, ANSWER).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(CallError::TooLong),
        Ok(Err(error)) => Err(CallError::unavailable(error)),
        Err(_) => Err(CallError::unavailable("its answer did not end in time")),
    }
}

/// Reads an answer. Another member may answer better if this one has failed, is overloaded, or is
/// no etcd.
fn read<A: DeserializeOwned>(status: StatusCode, body: &[u8]) -> Result<A, CallError> {
    if status.is_success() {
        return serde_json::from_slice(body).map_err(|error| {
            CallError::unavailable(format!(
                "its answer is not one of etcd's gateway: {}",
                shown(&error.to_string())
            ))
        });
    }
    let status = status.as_u16();
    let Ok(error) = serde_json::from_slice::<ErrorAnswer>(body) else {
        return Err(CallError::unavailable(format!(
            "status {status} without etcd's JSON: is it the port for clients, and etcd 3.4 or \
             later?"
        )));
    };
    match refused(error) {
        CallError::Refused { message, .. } if status >= 500 || matches!(status, 408 | 429) => {
            Err(CallError::unavailable(format!("status {status}: {message}")))
        }
        error => Err(error),
    }
}

pub(super) fn refused(error: ErrorAnswer) -> CallError {
    let code = error.code;
    let message = error.text().map_or_else(|| "without a reason".to_owned(), |text| shown(&text));
    CallError::Refused { code, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_before_the_names_that_it_begins() {
        let end = prefix_end("/kvx/v1/instances/a/").0;
        assert_eq!(end, b"/kvx/v1/instances/a0");
        assert!(b"/kvx/v1/instances/a/x".as_slice() < &end[..]);
        assert!(b"/kvx/v1/instances/ab/x".as_slice() > &end[..]);
    }

    #[test]
    fn answers_of_failed_members_and_refusals_differ() {
        let read = |status, body: &str| {
            read::<EmptyAnswer>(StatusCode::from_u16(status).unwrap(), body.as_bytes())
        };
        assert!(read(200, "{\"header\":{}}").is_ok());
        for (status, body) in [
            (200, "<html>"),
            (404, "404 page not found"),
            (503, r#"{"message":"etcdserver: no leader","code":14}"#),
            (504, r#"{"message":"context deadline exceeded","code":4}"#),
        ] {
            let error = read(status, body).unwrap_err();
            assert!(matches!(error, CallError::Unavailable(_)), "{status} {body}: {error}");
        }
        let lost = read(404, r#"{"error":"lease not found","code":5}"#).unwrap_err();
        assert!(lost.is_lost_lease() && !lost.may_need_token());
        let user = read(400, r#"{"message":"user name is empty","code":3}"#).unwrap_err();
        assert!(user.may_need_token() && user.to_string().contains("ETCD_AUTH_USERNAME"), "{user}");
    }
}
