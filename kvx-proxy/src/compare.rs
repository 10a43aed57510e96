//! Compares the answers of two endpoints.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::HeaderMap;
use hyper::{Method, Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use crate::error::{Error, Result};
use crate::request::headers;
use crate::upstream::{WHOLE, json_headers, whole, words};

#[cfg(feature = "tls")]
use {
    hyper_rustls::{HttpsConnector, HttpsConnectorBuilder},
    std::sync::Arc,
    tokio_rustls::rustls::crypto::ring,
    tokio_rustls::rustls::{ClientConfig, RootCertStore},
};

/// The answers of two endpoints to one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Comparison {
    /// The first characters of the prompt, or the number of its token ids.
    pub prompt: String,
    /// The answer of each endpoint: its text, or an error message.
    pub answers: [std::result::Result<String, String>; 2],
}

impl Comparison {
    /// Returns true if both endpoints returned the same text.
    pub fn is_same(&self) -> bool {
        matches!(&self.answers, [Ok(one), Ok(other)] if one == other)
    }
}

const WORDS: &str = "import os sys def class return yield lambda self args kwargs for while try except finally raise assert \
                     with open as file print range len str int list dict set tuple";

/// Returns the prompts: short and long texts, lengths around block boundaries of 16 and 128 tokens,
/// one to three blocks of 16 plus one token, 2,000 tokens, and prefixes of earlier prompts. Prompts
/// of token ids have the same length under any tokenizer; 2,000 tokens and an answer fit a context
/// of 2,048.
fn prompts() -> Vec<Value> {
    let words: Vec<&str> = WORDS.split_ascii_whitespace().collect();
    let mut prompts: Vec<Value> = vec!["Hello".into(), "def main():".into()];
    let mut seed: u32 = 12345;
    for length in [5, 40, 64, 90, 127, 128, 129, 200, 256, 300, 400] {
        let mut text = vec![format!("# {length}")];
        for _ in 0..length {
            seed = seed.wrapping_mul(1_103_515_245).wrapping_add(12345) & 0x7fff_ffff;
            text.push(words[(seed >> 8) as usize % words.len()].to_owned());
        }
        prompts.push(text.join(" ").into());
    }
    for length in [15, 16, 17, 33, 49, 127, 128, 129, 255, 256, 257, 2000] {
        prompts.push((0..length).map(|at| 3 + at * 7 % 90).collect::<Vec<u32>>().into());
    }
    prompts
}

/// Timeouts of a connection attempt and of an answer.
const CONNECT: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(300);

#[cfg(feature = "tls")]
type UpstreamConnector = HttpsConnector<HttpConnector>;
#[cfg(not(feature = "tls"))]
type UpstreamConnector = HttpConnector;

/// Builds the HTTP client for both endpoints. The router's own client supports plain HTTP only.
#[cfg_attr(not(feature = "tls"), expect(unused_variables, reason = "certificates are for https"))]
fn client(endpoints: &[Endpoint]) -> Result<Client<UpstreamConnector, Full<Bytes>>> {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(CONNECT));
    connector.set_nodelay(true);
    connector.enforce_http(false);
    #[cfg(feature = "tls")]
    let connector = {
        let provider = ring::default_provider();
        let builder = HttpsConnectorBuilder::new();
        // The system's trusted roots, or the certificates in the file that SSL_CERT_FILE names.
        let builder = if endpoints.iter().any(|endpoint| endpoint.0.starts_with("https")) {
            builder.with_provider_and_native_roots(provider).map_err(|error| {
                Error::new(format!("this system's trusted certificates: {error}"))
            })?
        } else {
            let config = ClientConfig::builder_with_provider(Arc::new(provider))
                .with_safe_default_protocol_versions()
                .map_err(|error| Error::new(error.to_string()))?;
            let no_roots = config.with_root_certificates(RootCertStore::empty());
            builder.with_tls_config(no_roots.with_no_client_auth())
        };
        builder.https_or_http().enable_http1().wrap_connector(connector)
    };
    Ok(Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector))
}

/// Scheme, host and port of a server, and the path prefix before `/v1`.
#[derive(Debug)]
struct Endpoint(String);

impl Endpoint {
    /// Parses `http://HOST:PORT` or `http://HOST:PORT/BASE`, with or without a trailing `/v1`.
    /// Accepts `https` if TLS is built in.
    fn new(url: &str) -> Result<Self> {
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

    async fn ask(
        &self,
        client: &Client<UpstreamConnector, Full<Bytes>>,
        key: Option<&str>,
        path: &str,
        body: Option<&Value>,
    ) -> std::result::Result<Value, String> {
        let until = Instant::now() + ANSWER;
        let mut request = Request::new(Full::default());
        *request.uri_mut() =
            format!("{}{path}", self.0).parse().map_err(|_| "the URL is invalid")?;
        let key = key.and_then(headers::bearer);
        *request.headers_mut() = headers::for_instances(HeaderMap::new(), key.as_ref(), false);
        if let Some(body) = body.map(Value::to_string) {
            *request.method_mut() = Method::POST;
            json_headers(request.headers_mut(), body.len());
            *request.body_mut() = Full::new(body.into());
        }
        let response = timeout_at(until, client.request(request)).await;
        let response = response.map_err(|_| "no answer in time")?.map_err(|error| words(&error))?;
        let status = response.status();
        let bytes =
            whole(response.into_body(), WHOLE, until).await.map_err(|fault| fault.to_string())?;
        let value: Option<Value> = serde_json::from_slice(&bytes).ok();
        match value {
            Some(value) if status.is_success() => Ok(value),
            Some(value) => {
                let words =
                    value.pointer("/error/message").and_then(Value::as_str).unwrap_or_default();
                Err(format!("status {}: {words}", status.as_u16()))
            }
            None => Err(format!("status {} without JSON", status.as_u16())),
        }
    }
}

/// Sends the same prompts to two endpoints at temperature 0, and calls `each` with each pair of
/// answers.
///
/// A URL is `http://HOST:PORT`, or `http://HOST:PORT/BASE` for a server that answers at `BASE/v1`.
/// With the feature `tls` it may also be `https`; the trusted roots are the system's, or the
/// certificates in the file that `SSL_CERT_FILE` names. Without `model`, the first model that the
/// first endpoint lists is used.
///
/// # Errors
///
/// Fails if a URL is invalid, if it is `https` without that feature, or if `model` is `None` and
/// the first endpoint lists no model.
pub async fn compare(
    urls: [&str; 2],
    model: Option<&str>,
    tokens: u32,
    key: Option<&str>,
    mut each: impl FnMut(&Comparison),
) -> Result<()> {
    let endpoints = [Endpoint::new(urls[0])?, Endpoint::new(urls[1])?];
    let client = client(&endpoints)?;
    let model = match model {
        Some(model) => model.to_owned(),
        None => {
            let models = endpoints[0].ask(&client, key, "/v1/models", None).await;
            let models =
                models.map_err(|why| Error::new(format!("{}: GET /v1/models: {why}", urls[0])))?;
            let first = models.pointer("/data/0/id").and_then(Value::as_str);
            first.map(str::to_owned).ok_or_else(|| {
                Error::new(format!("{} lists no model; name one with --model", urls[0]))
            })?
        }
    };
    for prompt in prompts() {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 0,
        });
        let one = async |endpoint: &Endpoint| {
            let answer = endpoint.ask(&client, key, "/v1/completions", Some(&body)).await?;
            let text = answer.pointer("/choices/0/text").and_then(Value::as_str);
            text.map(str::to_owned).ok_or_else(|| "the answer has no choices".to_owned())
        };
        let (first, second) = tokio::join!(one(&endpoints[0]), one(&endpoints[1]));
        let prompt = match &prompt {
            Value::String(text) => text.chars().take(40).collect(),
            Value::Array(ids) => format!("{} token ids", ids.len()),
            _ => String::new(),
        };
        each(&Comparison { prompt, answers: [first, second] });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn prompts_are_many_and_always_the_same() {
        let one = prompts();
        assert_eq!(one, prompts());
        let lengths: Vec<usize> = one.iter().filter_map(Value::as_array).map(Vec::len).collect();
        for length in [17, 33, 49, 2000] {
            assert!(lengths.contains(&length), "{length} tokens: {lengths:?}");
        }
        let same = |one: &str, other: &str| Comparison {
            prompt: String::new(),
            answers: [Ok(one.to_owned()), Ok(other.to_owned())],
        };
        assert!(same("a", "a").is_same() && !same("a", "b").is_same());
        let failed = Comparison {
            prompt: String::new(),
            answers: [Err("x".to_owned()), Err("x".to_owned())],
        };
        assert!(!failed.is_same(), "two failures are not equal answers");
    }
}
