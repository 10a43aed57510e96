//! Warnings for the operator: returned as data, logged once.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// The subject of a [`Warning`], for programs to branch on. More may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Concern {
    /// A value was given more than once; the last one counts.
    Duplicate,
    /// vLLM reads these arguments differently; kvx follows vLLM's documentation.
    Differs,
    /// The chosen vLLM version does not have this field, key, role or variable, or deprecates it.
    Version,
    /// kvx does not use this key.
    Unknown,
    /// `kv_load_failure_policy` is `recompute`.
    Recompute,
    /// `kv_buffer_device` names a device that is not present: host memory is used.
    HostMemory,
    /// NCCL_* variables are set; KV transfer does not read them.
    Nccl,
    /// A value was read as text although it looks like a number.
    Text,
}

impl Concern {
    /// Returns the subject as one word, for JSON output.
    pub fn as_str(self) -> &'static str {
        match self {
            Concern::Duplicate => "duplicate",
            Concern::Differs => "differs",
            Concern::Version => "version",
            Concern::Unknown => "unknown",
            Concern::Recompute => "recompute",
            Concern::HostMemory => "host_memory",
            Concern::Nccl => "nccl",
            Concern::Text => "text",
        }
    }
}

/// One message for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    concern: Concern,
    sentence: String,
}

impl Warning {
    pub(super) fn new(concern: Concern, sentence: impl Into<String>) -> Self {
        Warning { concern, sentence: sentence.into() }
    }

    /// Prefixes the message with the part of the configuration that it is about.
    pub(super) fn within(mut self, prefix: &str) -> Self {
        self.sentence = format!("{prefix}: {}", self.sentence);
        self
    }

    /// Returns the subject of the warning.
    pub fn concern(&self) -> Concern {
        self.concern
    }

    /// Returns the message: the problem, and what to write instead.
    pub fn sentence(&self) -> &str {
        &self.sentence
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

static LOGGED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Logs each warning that this process has not logged before. Returns their number.
pub(super) fn log_once(warnings: &[Warning]) -> usize {
    let fresh: Vec<&Warning> = {
        let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
        warnings.iter().filter(|warning| logged.insert(warning.sentence.clone())).collect()
    };
    for warning in &fresh {
        tracing::warn!(target: "kvx::config", concern = warning.concern.as_str(), "{}", warning.sentence);
    }
    fresh.len()
}
