//! Writes lines for the operator to standard error, where NIXL writes its own. `NIXL_LOG_LEVEL`
//! applies to both.

use std::fmt::Display;
use std::io::Write as _;
use std::sync::OnceLock;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Info,
    Warning,
    Nothing,
}

fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let named = std::env::var("NIXL_LOG_LEVEL").unwrap_or_default();
        match named.to_ascii_uppercase().as_str() {
            "WARN" | "ERROR" => Level::Warning,
            "FATAL" => Level::Nothing,
            _ => Level::Info,
        }
    })
}

/// Logs information that is relevant once.
pub(crate) fn info(line: impl Display) {
    if level() <= Level::Info {
        always(line);
    }
}

/// Logs a problem.
pub(crate) fn warn(line: impl Display) {
    if level() <= Level::Warning {
        always(line);
    }
}

/// Logs an event that is reported in no other way. If the line cannot be written, it is lost:
/// standard error has no reader then.
pub(crate) fn always(line: impl Display) {
    // In a single write: other processes write there, too.
    let _ = std::io::stderr().write_all(format!("KVX: {line}\n").as_bytes());
}
