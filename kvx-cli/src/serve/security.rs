//! vLLM's settings with security meaning: clients' API keys, and what this server refuses because
//! it cannot do it.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use kvx_paged_llama::http::Keys;

use crate::Result;

/// The variable with a key of clients, which `--api-key` overrides.
pub(super) const API_KEY: &str = "VLLM_API_KEY";

const NO_TLS: &str = "this server has no TLS; put a proxy with TLS in front, such as kvx proxy";
const NO_CORS: &str =
    "this server sends no CORS headers, so browsers let no page of another origin read answers";
const NO_MEDIA: &str = "requests with media are rejected here";
const NOT_LOGGED: &str = "requests and answers are not logged here";

/// Flags of vLLM with security meaning that this server does not have, without their dashes, and
/// why. They are errors.
const REFUSED_FLAGS: &[(&str, &str)] = &[
    ("ssl-keyfile", NO_TLS),
    ("ssl-certfile", NO_TLS),
    ("ssl-ca-certs", NO_TLS),
    ("ssl-cert-reqs", NO_TLS),
    ("ssl-ciphers", NO_TLS),
    ("enable-ssl-refresh", NO_TLS),
    ("allowed-origins", NO_CORS),
    ("allowed-methods", NO_CORS),
    ("allowed-headers", NO_CORS),
    ("allow-credentials", NO_CORS),
    ("allowed-local-media-path", NO_MEDIA),
    ("allowed-media-domains", NO_MEDIA),
    ("enable-log-requests", NOT_LOGGED),
    ("enable-log-outputs", NOT_LOGGED),
    ("uds", "this server listens on TCP only; see --host and --port"),
    ("root-path", "paths have no prefix here; let the proxy in front remove it"),
    ("middleware", "this server runs no Python; check requests in a proxy in front"),
    ("h11-max-incomplete-event-size", "the limit of headers is fixed here"),
    ("h11-max-header-count", "the limit of headers is fixed here"),
    ("trust-request-chat-template", "requests with a chat_template are rejected here"),
    ("enable-tokenizer-info-endpoint", "there is no /tokenizer_info here"),
];

/// Variables of vLLM that restrict clients in a way that this server does not support, and why.
/// They are errors: the operator would rely on them.
const REFUSED_VARIABLES: &[(&str, &str)] = &[
    ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "the timeout of idle connections is fixed here"),
    ("VLLM_MAX_N_SEQUENCES", "a request has at most 256 answers here"),
];

/// Variables of vLLM that permit what this server never does, and why they have no effect.
pub(super) const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("VLLM_SERVER_DEV_MODE", "there are no paths for developers here"),
    ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "adapters are not supported"),
    ("VLLM_ALLOW_INSECURE_SERIALIZATION", "this server unpickles no data"),
    ("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "answers are not logged here"),
    ("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "this server downloads no media"),
    ("VLLM_PLUGINS", "no plug-in of vLLM is loaded here"),
];

/// Returns why a flag of vLLM is refused, if it is one of those with security meaning.
pub(super) fn refused_flag(flag: &str) -> Option<String> {
    let name = flag.split('=').next()?.strip_prefix("--")?;
    let (_, reason) = REFUSED_FLAGS.iter().find(|(refused, _)| *refused == name)?;
    Some(format!("--{name} is not supported: {reason}; leave the flag out"))
}

/// Checks the variables, given which of them are set.
///
/// # Errors
///
/// Fails if one is set that this server would have to follow and cannot.
pub(super) fn check_variables(is_set: impl Fn(&str) -> bool) -> Result<()> {
    match REFUSED_VARIABLES.iter().find(|(name, _)| is_set(name)) {
        Some((name, reason)) => {
            Err(format!("{name} is not supported: {reason}; unset the variable").into())
        }
        None => Ok(()),
    }
}

/// Returns the keys of clients: those of `--api-key`, or else that of `VLLM_API_KEY`.
///
/// # Errors
///
/// Fails if a key is empty, or if no client could send it. The message does not contain the key.
pub(super) fn keys(flags: &[String], variable: Option<&OsStr>) -> Result<Option<Keys>> {
    let (keys, origin): (Vec<&[u8]>, _) = match variable {
        Some(key) if flags.is_empty() => (vec![key.as_bytes()], API_KEY),
        _ => (flags.iter().map(String::as_bytes).collect(), "--api-key"),
    };
    for key in &keys {
        if key.is_empty() {
            return Err(format!(
                "{origin} is empty, which would let every client in: set a key, or leave it out"
            )
            .into());
        }
        if key.trim_ascii() != *key || key.iter().any(u8::is_ascii_control) {
            return Err(format!(
                "{origin} has white space at an end, or a control character: no client can send \
                 such a key"
            )
            .into());
        }
    }
    Ok((!keys.is_empty()).then(|| Keys::new(keys)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_override_the_variable_and_useless_keys_are_rejected() {
        let keys = |flags: &[&str], variable: Option<&str>| {
            let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
            super::keys(&flags, variable.map(OsStr::new))
        };
        let shown = |flags: &[&str], variable| format!("{:?}", keys(flags, variable).unwrap());
        assert_eq!(shown(&[], None), "None");
        assert_eq!(shown(&[], Some("a")), "Some(1 keys)");
        assert_eq!(shown(&["b", "c"], Some("a")), "Some(2 keys)");
        assert_eq!(shown(&["b"], Some("")), "Some(1 keys)");
        for (flags, variable, words) in [
            (&[][..], Some(""), "VLLM_API_KEY is empty"),
            (&[], Some("hush\n"), "VLLM_API_KEY has white space"),
            (&["a", ""], None, "--api-key is empty"),
            (&[" hush"], Some("a"), "--api-key has white space"),
            (&["hu\tsh"], None, "a control character"),
        ] {
            let error = keys(flags, variable).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn unsupported_settings_with_security_meaning_are_rejected_by_name() {
        let error = check_variables(|name| name == "VLLM_HTTP_TIMEOUT_KEEP_ALIVE").unwrap_err();
        assert!(error.to_string().starts_with("VLLM_HTTP_TIMEOUT_KEEP_ALIVE is not"), "{error}");
        assert!(check_variables(|name| name == API_KEY).is_ok());
        assert!(refused_flag("--ssl-certfile=a").unwrap().contains("no TLS"));
        assert_eq!(refused_flag("--port"), None);
    }
}
