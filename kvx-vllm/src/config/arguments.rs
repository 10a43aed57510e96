//! Reads `--kv-transfer-config` and its dotted arguments from a command line, and writes them.

use serde_json::{Map, Value};

use super::human::{self, Misfit};
use super::warning::{Concern, Warning};
use kvx_core::{Error, ErrorKind, Result};

const OPTION: &str = "--kv-transfer-config";

/// The most keys in a dotted argument. Longer paths are a mistake, and deep objects would cost
/// stack.
const DEEPEST: usize = 32;

pub(super) enum ArgumentPiece {
    Object(Map<String, Value>),
    Dotted { written: String, keys: Vec<String>, value: Value },
}

pub(super) struct Taken {
    pub pieces: Vec<ArgumentPiece>,
    pub rest: Vec<String>,
    pub warnings: Vec<Warning>,
}

/// Separates the arguments for KV transfer from all others.
pub(super) fn take(arguments: Vec<String>) -> Result<Taken> {
    let mut taken = Taken { pieces: Vec::new(), rest: Vec::new(), warnings: Vec::new() };
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            taken.rest.push(argument);
            taken.rest.extend(arguments);
            break;
        }
        let (name, inline) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument.as_str(), None),
        };
        let (option, path) = match name.split_once('.') {
            Some((option, path)) => (option, Some(path)),
            None => (name, None),
        };
        // Underscores count as dashes up to the first dot, and only there.
        if option.replace('_', "-") != OPTION {
            taken.rest.push(argument);
            continue;
        }
        let value = match inline {
            Some(value) => value,
            None => arguments
                .next()
                .filter(|value| !value.starts_with("--"))
                .ok_or_else(|| missing(name))?,
        };
        let written = name.to_owned();
        let piece = match path {
            None => ArgumentPiece::Object(
                human::object(&value).map_err(|error| about(&written, &error))?,
            ),
            Some(path) => dotted(written, path, &value, &mut taken.warnings)?,
        };
        taken.pieces.push(piece);
    }
    Ok(taken)
}

fn missing(name: &str) -> Error {
    ErrorKind::Invalid.because(format!(
        "{name} has no value; write {name}=VALUE (a value that begins with -- needs the =)"
    ))
}

fn about(written: &str, error: &Error) -> Error {
    ErrorKind::Invalid.because(format!("{written}: {}", error.sentence()))
}

fn dotted(
    written: String,
    path: &str,
    text: &str,
    warnings: &mut Vec<Warning>,
) -> Result<ArgumentPiece> {
    let (path, append) = match path.strip_suffix('+') {
        Some(path) => (path, true),
        None => (path, false),
    };
    let keys: Vec<String> = path.split('.').map(str::to_owned).collect();
    if keys.iter().any(String::is_empty) {
        return Err(ErrorKind::Invalid.because(format!(
            "{written} has an empty key; write {OPTION}.KEY or {OPTION}.KEY.KEY"
        )));
    }
    if keys.len() > DEEPEST {
        return Err(ErrorKind::Invalid.because(format!(
            "{OPTION}.{}… has {} keys; at most {DEEPEST} are allowed, write the rest as JSON",
            keys[0],
            keys.len()
        )));
    }
    let value = if append {
        Value::Array(text.split(',').map(|item| Value::String(item.to_owned())).collect())
    } else {
        value(&written, text, warnings)?
    };
    Ok(ArgumentPiece::Dotted { written, keys, value })
}

/// Reads text as JSON, then as a human-readable number, then as plain text.
fn value(written: &str, text: &str, warnings: &mut Vec<Warning>) -> Result<Value> {
    if let Ok(value) = serde_json::from_str(text) {
        return Ok(value);
    }
    let mut as_text = |reason: &str| {
        let sentence = format!("{written} is taken as text: {reason}");
        warnings.push(Warning::new(Concern::Text, sentence));
        Ok(Value::String(text.to_owned()))
    };
    if text.trim_start().starts_with(['{', '[']) {
        return match human::json(text) {
            Ok(value) => Ok(value),
            Err(error) => as_text(error.sentence()),
        };
    }
    match human::number(text) {
        Some(Ok(number)) => Ok(Value::Number(number)),
        Some(Err(misfit @ Misfit::BinaryFraction)) => as_text(&human::explain(text, &misfit)),
        Some(Err(misfit)) => {
            Err(ErrorKind::Invalid.because(format!("{written}: {}", human::explain(text, &misfit))))
        }
        None => Ok(Value::String(text.to_owned())),
    }
}

/// Returns dotted arguments from which [`Given::from_arguments`](super::Given::from_arguments)
/// rebuilds `object`. Objects with a key that a dotted argument cannot express (empty, with a dot
/// or an equals sign, or ending in a plus) stay JSON.
///
/// ```
/// # use kvx_vllm as kvx;
/// use kvx::config::{Given, dotted_arguments};
/// let given = Given::from_json(r#"{"kv_role": "kv_both", "kv_connector_extra_config": {"backends": ["UCX"]}}"#)?;
/// let arguments = dotted_arguments(given.object());
/// assert_eq!(arguments, [
///     r#"--kv-transfer-config.kv_connector_extra_config.backends=["UCX"]"#,
///     r#"--kv-transfer-config.kv_role="kv_both""#,
/// ]);
/// assert_eq!(Given::from_arguments(arguments)?.0.object(), given.object());
/// # Ok::<(), kvx_core::Error>(())
/// ```
pub fn dotted_arguments(object: &Map<String, Value>) -> Vec<String> {
    let mut out = Vec::new();
    spell(OPTION.to_owned(), object, DEEPEST, &mut out);
    out
}

fn spell(name: String, object: &Map<String, Value>, depth: usize, out: &mut Vec<String>) {
    let speakable =
        |key: &String| !key.is_empty() && !key.contains(['.', '=']) && !key.ends_with('+');
    if depth == 0 || object.is_empty() || !object.keys().all(speakable) {
        out.push(format!("{name}={}", Value::Object(object.clone())));
        return;
    }
    for (key, value) in object {
        let name = format!("{name}.{key}");
        match value {
            Value::Object(object) => spell(name, object, depth - 1, out),
            value => out.push(format!("{name}={value}")),
        }
    }
}
