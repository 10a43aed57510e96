//! The entry points of the fuzz targets and the bounded fuzz test: no input panics, and accepted
//! input reads back as the same value.

use super::{ConfigReport, Given, KvTransferConfig, Surroundings, dotted_arguments};

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("config_json", json_text), ("config_dotted", dotted)];

/// Reads JSON text.
pub fn json_text(bytes: &[u8]) {
    if let Ok(given) = Given::from_json(&String::from_utf8_lossy(bytes)) {
        check(given);
    }
}

/// Reads arguments, one per line.
pub fn dotted(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok((given, _)) = Given::from_arguments(text.lines()) {
        check(given);
    }
}

fn check(given: Given) {
    let arguments = dotted_arguments(given.object());
    match Given::from_arguments(arguments) {
        Ok((again, rest)) => {
            assert!(rest.is_empty(), "left over: {rest:?}");
            assert!(
                same(again.object(), given.object()),
                "{:?} became {:?}",
                given.object(),
                again.object()
            );
        }
        Err(error) => panic!("{:?} cannot be written as dotted arguments: {error}", given.object()),
    }
    if let Ok(config) = KvTransferConfig::resolve(given, &Surroundings::default()) {
        let report = ConfigReport::new(&config, &[]);
        let _ = (report.to_string(), report.to_json());
        let again = Given::from_object(config.to_json());
        if let Err(error) = KvTransferConfig::resolve(again, &Surroundings::default()) {
            panic!("{:?} does not read back: {error}", config.to_json());
        }
    }
}

/// Returns whether two objects are equal, except for the last bit of fractions, which the JSON
/// parser may round.
fn same(
    a: &serde_json::Map<String, serde_json::Value>,
    b: &serde_json::Map<String, serde_json::Value>,
) -> bool {
    use serde_json::Value;
    fn values(a: &Value, b: &Value) -> bool {
        match (a, b) {
            (Value::Object(a), Value::Object(b)) => same(a, b),
            (Value::Array(a), Value::Array(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| values(a, b))
            }
            (Value::Number(a), Value::Number(b)) => match (a.as_f64(), b.as_f64()) {
                (Some(a), Some(b)) => (a - b).abs() <= a.abs() * 1e-12,
                _ => false,
            },
            (a, b) => a == b,
        }
    }
    a.len() == b.len()
        && a.iter().all(|(key, value)| b.get(key).is_some_and(|other| values(value, other)))
}
