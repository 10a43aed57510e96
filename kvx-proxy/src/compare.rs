//! Compares the answers of two endpoints.

use serde_json::{Value, json};

use crate::endpoint::{Endpoint, EndpointClient, EndpointError, client};
use crate::error::Result;

/// The answers of two endpoints to one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Comparison {
    /// The first characters of the prompt, or the number of its token ids.
    pub prompt: String,
    /// The answer of each endpoint, or its error.
    pub answers: [std::result::Result<ComparedAnswer, EndpointError>; 2],
}

/// The answer of an endpoint to a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ComparedAnswer {
    /// The generated text.
    pub text: String,
    /// The ids of the generated tokens, if the endpoint returned them.
    pub token_ids: Option<Vec<u64>>,
}

impl Comparison {
    /// Returns true if both endpoints returned the same text, by the same tokens if both named
    /// them, or the [same error](Self::is_same_error).
    pub fn is_same(&self) -> bool {
        match &self.answers {
            [Ok(one), Ok(other)] => {
                one.text == other.text && self.token_ids().is_none_or(|[one, other]| one == other)
            }
            _ => self.is_same_error(),
        }
    }

    /// Returns true if both endpoints answered with the same status and message of an error. Two
    /// endpoints that do not answer at all have no error in common.
    pub fn is_same_error(&self) -> bool {
        matches!(&self.answers, [Err(one), Err(other)] if one.status.is_some() && one == other)
    }

    /// Returns the token ids of both answers, if both endpoints returned them.
    pub fn token_ids(&self) -> Option<[&[u64]; 2]> {
        let [Ok(one), Ok(other)] = &self.answers else { return None };
        Some([one.token_ids.as_deref()?, other.token_ids.as_deref()?])
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

/// Asks an endpoint for the answer to a prompt, with token ids if it can return them.
async fn answer(
    endpoint: &Endpoint,
    client: &EndpointClient,
    key: Option<&str>,
    body: &Value,
) -> std::result::Result<ComparedAnswer, EndpointError> {
    let mut asked = body.clone();
    asked["return_token_ids"] = true.into();
    let ask = async |body: &Value| {
        endpoint.ask(client, key, "/v1/completions", Some(body.to_string())).await
    };
    let answer = match ask(&asked).await {
        // It may not know the key.
        Err(error) if error.status.is_some_and(|status| (400..500).contains(&status)) => {
            ask(body).await?
        }
        answer => answer?,
    };
    let choice = answer.pointer("/choices/0");
    let field = |key| choice.and_then(|choice| choice.get(key));
    let text = field("text").and_then(Value::as_str);
    let ids = field("token_ids").and_then(Value::as_array);
    Ok(ComparedAnswer {
        text: text.ok_or_else(|| "the answer has no choices".to_owned())?.to_owned(),
        token_ids: ids.and_then(|ids| ids.iter().map(Value::as_u64).collect()),
    })
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
        None => endpoints[0].first_model(&client, key).await?,
    };
    for prompt in prompts() {
        let body = json!({
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 0,
        });
        let (first, second) = tokio::join!(
            answer(&endpoints[0], &client, key, &body),
            answer(&endpoints[1], &client, key, &body)
        );
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
    fn prompts_are_many_and_always_the_same() {
        let one = prompts();
        assert_eq!(one, prompts());
        let lengths: Vec<usize> = one.iter().filter_map(Value::as_array).map(Vec::len).collect();
        for length in [17, 33, 49, 2000] {
            assert!(lengths.contains(&length), "{length} tokens: {lengths:?}");
        }
    }

    #[test]
    fn answers_are_compared_by_token_ids_and_errors_by_status_and_message() {
        let of = |text: &str, ids: Option<&[u64]>| {
            Ok(ComparedAnswer { text: text.to_owned(), token_ids: ids.map(<[u64]>::to_vec) })
        };
        let error =
            |status, message: &str| Err(EndpointError { status, message: message.to_owned() });
        let compared = |one, other| Comparison { prompt: String::new(), answers: [one, other] };
        for (one, other, same) in [
            (of("a", None), of("a", None), true),
            (of("a", None), of("b", None), false),
            (of("a", Some(&[1])), of("a", Some(&[1])), true),
            // Two tokens may have one text.
            (of("a", Some(&[1])), of("a", Some(&[2])), false),
            (of("a", Some(&[1])), of("a", None), true),
            (of("a", None), error(Some(400), "x"), false),
            (error(Some(400), "x"), error(Some(400), "x"), true),
            (error(Some(400), "x"), error(Some(400), "y"), false),
            (error(Some(400), "x"), error(Some(500), "x"), false),
            (error(None, "refused"), error(None, "refused"), false),
        ] {
            let both_failed = one.is_err() && other.is_err();
            let compared = compared(one, other);
            assert_eq!(compared.is_same(), same, "{compared:?}");
            assert_eq!(compared.is_same_error(), same && both_failed, "{compared:?}");
        }
    }
}
