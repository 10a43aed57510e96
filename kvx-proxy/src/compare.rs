//! Whether two endpoints give the same answers.

use std::time::Duration;

use hyper::header::HeaderMap;
use hyper::http::uri::PathAndQuery;
use hyper::{Method, Uri};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::request::headers;
use crate::setup::{InstanceSetup, Setup};
use crate::upstream::{Upstream, WHOLE, json_headers, whole};

/// What two endpoints answered to one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compared {
    /// The first characters of the prompt, or what its token ids are.
    pub prompt: String,
    /// What each answered: the text, or an error in words.
    pub answers: [std::result::Result<String, String>; 2],
}

impl Compared {
    /// Whether both answered, and the same.
    pub fn is_same(&self) -> bool {
        matches!(&self.answers, [Ok(one), Ok(other)] if one == other)
    }
}

const WORDS: &str = "import os sys def class return yield lambda self args kwargs for while try except finally raise assert \
                     with open as file print range len str int list dict set tuple";

/// The prompts: short and long texts, lengths around the edges of blocks of 16 and 128 tokens, one to three blocks of
/// 16 and a token, 2,000 tokens, and beginnings that others have had before. Token ids have a length that no tokenizer
/// changes; 2,000 and an answer's are within a context of 2,048.
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

/// A server, and what stands before `/v1` in its paths.
struct Endpoint {
    server: InstanceSetup,
    base: String,
}

impl Endpoint {
    /// Takes `http://HOST:PORT` or `http://HOST:PORT/BASE`, also with the `/v1` of OpenAI's clients at its end.
    fn new(url: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::new(format!(
                "endpoint {url:?} {why}; write http://HOST:PORT, or http://HOST:PORT/BASE if it answers at BASE/v1"
            ))
        };
        let uri: Uri = url.parse().map_err(|_| wrong("is no URL"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(wrong("is https, which this command does not speak")),
            _ => return Err(wrong("has another scheme than http")),
        }
        if uri.query().is_some() {
            return Err(wrong("has a query"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("has no host"))?;
        let path = uri.path().trim_end_matches('/');
        let base = path.strip_suffix("/v1").unwrap_or(path).trim_end_matches('/').to_owned();
        Ok(Endpoint { server: InstanceSetup::new(&format!("http://{authority}"))?, base })
    }
}

async fn ask(
    upstream: &Upstream,
    endpoint: &Endpoint,
    key: Option<&str>,
    method: Method,
    path: &str,
    body: Option<&Value>,
) -> std::result::Result<Value, String> {
    let until = Instant::now() + Duration::from_secs(300);
    let mut sent = headers::for_instances(HeaderMap::new(), key.and_then(headers::bearer).as_ref(), false);
    let body = body.map(Value::to_string).unwrap_or_default();
    if !body.is_empty() {
        json_headers(&mut sent, body.len());
    }
    let path: PathAndQuery = format!("{}{path}", endpoint.base).parse().map_err(|_| "its path is none")?;
    let response = upstream.send(&endpoint.server, method, &path, sent, body.into(), until).await;
    let response = response.map_err(|fault| fault.to_string())?;
    let status = response.status();
    let bytes = whole(response.into_body(), WHOLE, until).await.map_err(|fault| fault.to_string())?;
    let value: Option<Value> = serde_json::from_slice(&bytes).ok();
    match value {
        Some(value) if status.is_success() => Ok(value),
        Some(value) => {
            let words = value.pointer("/error/message").and_then(Value::as_str).unwrap_or_default();
            Err(format!("status {}: {words}", status.as_u16()))
        }
        None => Err(format!("status {} without JSON", status.as_u16())),
    }
}

/// Sends the same prompts to two endpoints, at temperature 0, and hands each pair of answers to `each`. A URL is
/// `http://HOST:PORT`, or `http://HOST:PORT/BASE` of a server that answers at `BASE/v1`. `model` is the first one's
/// first if none is named.
///
/// # Errors
///
/// A URL that is none, or https, and a first endpoint that names no model.
pub async fn compare(
    urls: [&str; 2],
    model: Option<&str>,
    tokens: u32,
    key: Option<&str>,
    mut each: impl FnMut(&Compared),
) -> Result<()> {
    let upstream = Upstream::new(&Setup::default());
    let endpoints = [Endpoint::new(urls[0])?, Endpoint::new(urls[1])?];
    let model = match model {
        Some(model) => model.to_owned(),
        None => {
            let models = ask(&upstream, &endpoints[0], key, Method::GET, "/v1/models", None).await;
            let models = models.map_err(|why| Error::new(format!("{}: GET /v1/models: {why}", urls[0])))?;
            let first = models.pointer("/data/0/id").and_then(Value::as_str);
            first
                .map(str::to_owned)
                .ok_or_else(|| Error::new(format!("{} names no model; give one with --model", urls[0])))?
        }
    };
    for prompt in prompts() {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 0,
        });
        let one = async |endpoint| {
            let answer = ask(&upstream, endpoint, key, Method::POST, "/v1/completions", Some(&body)).await?;
            let text = answer.pointer("/choices/0/text").and_then(Value::as_str);
            text.map(str::to_owned).ok_or_else(|| "an answer without choices".to_owned())
        };
        let (first, second) = tokio::join!(one(&endpoints[0]), one(&endpoints[1]));
        let prompt = match &prompt {
            Value::String(text) => text.chars().take(40).collect(),
            Value::Array(ids) => format!("{} token ids", ids.len()),
            _ => String::new(),
        };
        each(&Compared { prompt, answers: [first, second] });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_may_have_a_base_path() {
        for (url, base) in [
            ("http://a:1", ""),
            ("http://a:1/", ""),
            ("http://a:1/v1", ""),
            ("http://a:1/v1/", ""),
            ("http://a:1/llm/v1", "/llm"),
            ("http://a:1/some/where/", "/some/where"),
            ("http://a:1/mv1", "/mv1"),
        ] {
            let endpoint = Endpoint::new(url).unwrap();
            assert_eq!((endpoint.base.as_str(), endpoint.server.name()), (base, "a:1"), "{url}");
        }
        for (url, why) in [
            ("https://a:1/v1", "https"),
            ("ftp://a:1", "scheme"),
            ("a:1", "scheme"),
            ("http://a:1/?x=1", "query"),
            ("http://me@a:1/", "user"),
            ("no URL", "no URL"),
        ] {
            let error = Endpoint::new(url).err().unwrap().to_string();
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
        let same = |one: &str, other: &str| Compared {
            prompt: String::new(),
            answers: [Ok(one.to_owned()), Ok(other.to_owned())],
        };
        assert!(same("a", "a").is_same() && !same("a", "b").is_same());
        let failed = Compared { prompt: String::new(), answers: [Err("x".to_owned()), Err("x".to_owned())] };
        assert!(!failed.is_same(), "two failures are no answer");
    }
}
