//! Lines for the operator, on standard error beside NIXL's own, which `NIXL_LOG_LEVEL` holds back
//! alike.

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

/// Something to know once.
pub(crate) fn info(line: impl Display) {
    if level() <= Level::Info {
        always(line);
    }
}

/// Something that went wrong.
pub(crate) fn warn(line: impl Display) {
    if level() <= Level::Warning {
        always(line);
    }
}

/// Logs an event that is reported in no other way. A line that cannot be written is lost: standard
/// error has no reader then.
pub(crate) fn always(line: impl Display) {
    // At once: other processes write there, too.
    let _ = std::io::stderr().write_all(format!("KVX: {line}\n").as_bytes());
}
