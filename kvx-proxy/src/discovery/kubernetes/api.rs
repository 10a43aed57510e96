//! Requests to the API server, each with a time limit and a limit on its answer.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::{Response, StatusCode};
use tokio::time::{Instant, timeout_at};

use super::access::Access;
use super::pods::{Page, Pod, Status};
use crate::endpoint::{EndpointClient, client_with, head_by};
use crate::lines::Lines;
use crate::log::shown;

/// The time for an answer's head and, of a list, for a page.
const CALL: Duration = Duration::from_secs(10);
/// The time for a complete list.
const LIST: Duration = Duration::from_secs(60);
/// The pods of a page.
const PAGE: usize = 500;
/// The most bytes of a page, and of an error.
const ANSWER: usize = 32 << 20;
const ERROR: usize = 64 << 10;
/// The most bytes of a line of a watch, which has one pod. etcd's largest value has 1.5 MiB.
const LINE: usize = 4 << 20;
/// The most bytes of the text at which the next page begins.
const CONTINUE: usize = 16 << 10;
/// The seconds after which the server ends a watch.
const WATCH: u32 = 290;

/// The reason why a request has no result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ApiError {
    /// The version, or the list that was being read, is not kept any more (410).
    Expired,
    /// The answer has too many bytes.
    TooLong,
    Failed(String),
}

impl From<String> for ApiError {
    fn from(why: String) -> Self {
        ApiError::Failed(why)
    }
}

impl ApiError {
    pub(super) fn text(self) -> String {
        match self {
            ApiError::Expired => "the API server does not keep its list long enough".to_owned(),
            ApiError::TooLong => format!("a pod has more than {ANSWER} bytes"),
            ApiError::Failed(why) => why,
        }
    }
}

/// A client of the API server.
#[derive(Debug)]
pub(super) struct Api<'a> {
    access: &'a Access,
    http: EndpointClient,
    selector: &'a str,
}

impl<'a> Api<'a> {
    /// Creates a client for pods with these labels. Reads the certificates.
    pub(super) fn new(access: &'a Access, selector: &'a str) -> Result<Self, String> {
        let endpoints = std::slice::from_ref(&access.endpoint);
        let http = client_with(endpoints, &access.files).map_err(|error| error.to_string())?;
        Ok(Api { access, http, selector })
    }

    /// Calls `each` with every pod. Returns the version of the list.
    pub(super) async fn list(
        &self,
        mut each: impl FnMut(&Pod) -> Result<(), String>,
    ) -> Result<String, ApiError> {
        let until = Instant::now() + LIST;
        let (mut limit, mut next) = (PAGE, String::new());
        loop {
            let from = if next.is_empty() { String::new() } else { format!("&continue={next}") };
            let page = match self.page(&format!("limit={limit}{from}"), until).await {
                Err(ApiError::TooLong) if limit > 1 => {
                    limit = (limit / 8).max(1);
                    continue;
                }
                page => page?,
            };
            page.pods.iter().try_for_each(&mut each)?;
            match page.next {
                Some(text) if text.len() <= CONTINUE => next = encoded(&text),
                Some(_) => return Err("the text of the next page is too long".to_owned().into()),
                None => return Ok(page.version),
            }
        }
    }

    async fn page(&self, query: &str, until: Instant) -> Result<Page, ApiError> {
        let until = until.min(Instant::now() + CALL);
        let body = whole(self.get(query, until).await?, ANSWER, until).await?;
        Ok(Page::parse(&body).map_err(|why| self.named(why))?)
    }

    /// Opens a watch of the changes after a version.
    pub(super) async fn watch(&self, version: &str) -> Result<Lines, ApiError> {
        let version = encoded(version);
        let query = format!(
            "watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH}&resourceVersion={version}"
        );
        let body = self.get(&query, Instant::now() + CALL).await?;
        Ok(Lines::new(body, LINE))
    }

    /// Returns the body of a successful answer.
    async fn get(&self, query: &str, until: Instant) -> Result<Incoming, ApiError> {
        let token = self.access.token()?;
        let (namespace, selector) = (&self.access.namespace, encoded(self.selector));
        let and = if selector.is_empty() { "" } else { "&labelSelector=" };
        let path = format!("/api/v1/namespaces/{namespace}/pods?{query}{and}{selector}");
        let request = self.access.endpoint.request(token.as_deref(), &path, None);
        let request = request.map_err(|error| self.named(error))?;
        let response = head_by(&self.http, request, until).await;
        let response = response.map_err(|error| self.named(error))?;
        match response.status() {
            StatusCode::OK => Ok(response.into_body()),
            StatusCode::GONE => Err(ApiError::Expired),
            status => Err(self.refused(status, response, until).await),
        }
    }

    async fn refused(
        &self,
        status: StatusCode,
        response: Response<Incoming>,
        until: Instant,
    ) -> ApiError {
        let body = whole(response.into_body(), ERROR, until).await.unwrap_or_default();
        let said: Status = serde_json::from_slice(&body).unwrap_or_default();
        let cure = match status.as_u16() {
            401 => "; set a token or a certificate that the API server accepts",
            403 => "; give the router's service account get, list and watch of pods",
            404 => "; is it the URL of an API server?",
            _ => "",
        };
        let said = shown(&said.message);
        ApiError::Failed(self.named(format!("status {}: {said}{cure}", status.as_u16())))
    }

    fn named(&self, why: impl std::fmt::Display) -> String {
        format!("{}: {why}", self.access.endpoint.url())
    }
}

async fn whole(body: Incoming, most: usize, until: Instant) -> Result<Bytes, ApiError> {
    match timeout_at(until, Limited::new(body, most).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::TooLong),
        Ok(Err(error)) => Err(ApiError::Failed(format!("the answer of the API server: {error}"))),
        Err(_) => Err(ApiError::Failed("the answer of the API server did not end in time".into())),
    }
}

/// Escapes a text for a query.
fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}
