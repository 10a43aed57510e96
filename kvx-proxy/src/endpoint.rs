//! Endpoints that commands ask: `kvx replay`, and `--compare` and `--explain` of `kvx proxy`.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Method, Request, Response, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::error::{Error, Result};
use crate::log::shown;
use crate::request::headers;
use crate::tls_files::TlsFiles;
use crate::upstream::{WHOLE, json_headers, whole, words};

#[cfg(feature = "tls")]
use {
    hyper_rustls::{HttpsConnector, HttpsConnectorBuilder},
    std::sync::Arc,
    tokio_rustls::rustls::crypto::ring,
    tokio_rustls::rustls::{ClientConfig, RootCertStore},
};

/// Timeouts of a connection attempt and of an answer.
const CONNECT: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(300);

#[cfg(feature = "tls")]
type UpstreamConnector = HttpsConnector<HttpConnector>;
#[cfg(not(feature = "tls"))]
type UpstreamConnector = HttpConnector;

/// The HTTP client for endpoints.
pub(crate) type EndpointClient = Client<UpstreamConnector, Full<Bytes>>;

/// Builds the HTTP client for these endpoints. The router's own client supports plain HTTP only.
pub(crate) fn client(endpoints: &[Endpoint]) -> Result<EndpointClient> {
    client_with(endpoints, &TlsFiles::default())
}

/// Builds the HTTP client for these endpoints, with these certificates for https.
#[cfg_attr(not(feature = "tls"), expect(unused_variables, reason = "certificates are for https"))]
pub(crate) fn client_with(endpoints: &[Endpoint], files: &TlsFiles) -> Result<EndpointClient> {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(CONNECT));
    connector.set_nodelay(true);
    connector.enforce_http(false);
    #[cfg(feature = "tls")]
    let connector = {
        let config = if endpoints.iter().any(Endpoint::is_https) {
            files.config()?
        } else {
            // No connection uses it, so it needs no system's roots.
            ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|error| Error::new(error.to_string()))?
                .with_root_certificates(RootCertStore::empty())
                .with_no_client_auth()
        };
        let builder = HttpsConnectorBuilder::new().with_tls_config(config);
        builder.https_or_http().enable_http1().wrap_connector(connector)
    };
    Ok(Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector))
}

/// Scheme, host and port of a server, and the path prefix before `/v1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint(String);

/// Why an endpoint gave no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointError {
    /// The HTTP status, if it answered.
    pub status: Option<u16>,
    /// The message of its answer, or the failure of the connection. Of an answer's message, at most
    /// 300 characters, with control characters escaped.
    pub message: String,
}

impl fmt::Display for EndpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            Some(status) => write!(f, "status {status}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for EndpointError {}

impl From<String> for EndpointError {
    fn from(message: String) -> Self {
        EndpointError { status: None, message }
    }
}

impl Endpoint {
    /// Parses `http://HOST:PORT` or `http://HOST:PORT/BASE`, with or without a trailing `/v1`.
    /// Accepts `https` if TLS is built in.
    pub(crate) fn new(url: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::new(format!(
                "endpoint {url:?} {why}; write http://HOST:PORT, or http://HOST:PORT/BASE if it answers at BASE/v1"
            ))
        };
        let uri: Uri = url.parse().map_err(|_| wrong("is not a URL"))?;
        let scheme = match uri.scheme_str() {
            Some("http") => "http",
            Some("https") if cfg!(feature = "tls") => "https",
            Some("https") => {
                return Err(wrong(
                    "is https, and this build has no TLS: build with the feature `tls` (it needs a C compiler)",
                ));
            }
            _ => return Err(wrong("has a scheme other than http and https")),
        };
        if uri.query().is_some() {
            return Err(wrong("has a query"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("has no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("names a user; pass the key in OPENAI_API_KEY"));
        }
        let path = uri.path().trim_end_matches('/');
        let base = path.strip_suffix("/v1").unwrap_or(path).trim_end_matches('/');
        Ok(Endpoint(format!("{scheme}://{authority}{base}")))
    }

    /// Returns true if connections to it use TLS.
    pub(crate) fn is_https(&self) -> bool {
        self.0.starts_with("https:")
    }

    /// Returns its URL without a path.
    pub(crate) fn url(&self) -> &str {
        &self.0
    }

    /// Builds a `GET`, or a `POST` with a JSON body.
    pub(crate) fn request(
        &self,
        key: Option<&str>,
        path: &str,
        body: Option<String>,
    ) -> std::result::Result<Request<Full<Bytes>>, EndpointError> {
        let mut request = Request::new(Full::default());
        *request.uri_mut() =
            format!("{}{path}", self.0).parse().map_err(|_| "the URL is invalid".to_owned())?;
        let key = key.and_then(headers::bearer);
        *request.headers_mut() = headers::for_instances(HeaderMap::new(), key.as_ref(), false);
        if let Some(body) = body {
            *request.method_mut() = Method::POST;
            json_headers(request.headers_mut(), body.len());
            *request.body_mut() = Full::new(body.into());
        }
        Ok(request)
    }

    /// Returns the first model that the endpoint lists.
    pub(crate) async fn first_model(
        &self,
        client: &EndpointClient,
        key: Option<&str>,
    ) -> Result<String> {
        let models = self.ask(client, key, "/v1/models", None).await;
        let models =
            models.map_err(|why| Error::new(format!("{}: GET /v1/models: {why}", self.0)))?;
        let first = models.pointer("/data/0/id").and_then(Value::as_str);
        first
            .map(str::to_owned)
            .ok_or_else(|| Error::new(format!("{} lists no model; name one with --model", self.0)))
    }

    /// Sends a `GET`, or a `POST` with a JSON body, and returns the JSON of a successful answer.
    pub(crate) async fn ask(
        &self,
        client: &EndpointClient,
        key: Option<&str>,
        path: &str,
        body: Option<String>,
    ) -> std::result::Result<Value, EndpointError> {
        let until = Instant::now() + ANSWER;
        let response = head_by(client, self.request(key, path, body)?, until).await?;
        let status = response.status();
        let bytes =
            whole(response.into_body(), WHOLE, until).await.map_err(|fault| fault.to_string())?;
        let value: Option<Value> = serde_json::from_slice(&bytes).ok();
        match value {
            Some(value) if status.is_success() => Ok(value),
            value => Err(EndpointError { status: Some(status.as_u16()), message: message(value) }),
        }
    }
}

/// Sends a request, and waits for the head of the answer.
pub(crate) async fn head_by(
    client: &EndpointClient,
    request: Request<Full<Bytes>>,
    until: Instant,
) -> std::result::Result<Response<Incoming>, EndpointError> {
    let response = timeout_at(until, client.request(request)).await;
    Ok(response.map_err(|_| "no answer in time".to_owned())?.map_err(|error| words(&error))?)
}

/// Returns the message of an answer that is an error, as far as it is [`shown`].
pub(crate) fn message(answer: Option<Value>) -> String {
    match answer {
        Some(value) => {
            let words = value.pointer("/error/message").and_then(Value::as_str);
            words.map_or_else(|| shown(&value.to_string()), shown)
        }
        None => "the answer is not JSON".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_an_answer_is_escaped_and_cut() {
        let answer = |text: &str| Some(serde_json::json!({"error": {"message": text}}));
        assert_eq!(message(answer("no\u{1b}[31m\nmodel ä")), "no\\u{1b}[31m\\nmodel ä");
        assert_eq!(message(answer(&"ä".repeat(1000))), "ä".repeat(300));
        let other = serde_json::json!({"detail": "x".repeat(1000)});
        assert_eq!(message(Some(other)).len(), 300);
    }

    #[test]
    fn an_endpoint_may_have_a_base_path() {
        for (url, root) in [
            ("http://a:1", "http://a:1"),
            ("http://a:1/", "http://a:1"),
            ("http://a:1/v1", "http://a:1"),
            ("http://a:1/v1/", "http://a:1"),
            ("http://a:1/llm/v1", "http://a:1/llm"),
            ("http://a:1/some/where/", "http://a:1/some/where"),
            ("http://a/mv1", "http://a/mv1"),
        ] {
            assert_eq!(Endpoint::new(url).unwrap().0, root, "{url}");
        }
        let https = Endpoint::new("https://a/v1")
            .map(|endpoint| endpoint.0)
            .map_err(|error| error.to_string());
        match cfg!(feature = "tls") {
            true => assert_eq!(https.unwrap(), "https://a"),
            false => assert!(https.unwrap_err().contains("no TLS: build with")),
        }
        for (url, why) in [
            ("ftp://a:1", "scheme"),
            ("a:1", "scheme"),
            ("http://a:1/?x=1", "query"),
            ("http://me@a:1/", "user"),
            ("no URL", "not a URL"),
        ] {
            let error = Endpoint::new(url).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("http://HOST:PORT"), "{url}: {error}");
        }
    }
}
