//! What an operator should know but that stops nothing: returned as data, logged once.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// What a [`Warning`] is about, for a program to branch on. More may be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Concern {
    /// A value was given more than once; the last one counts.
    Duplicate,
    /// vLLM reads these arguments otherwise: kvx does what vLLM's documentation says.
    Differs,
    /// The chosen vLLM version no longer has this field, key, role or variable, or does not have it yet.
    Version,
    /// Nothing in kvx reads this key.
    Unknown,
    /// `kv_load_failure_policy` is `recompute`.
    Recompute,
    /// `kv_buffer_device` names a device that is not there: host memory is used.
    HostMemory,
    /// NCCL_* variables are set; KV transfer does not read them.
    Nccl,
    /// A value was taken as text although it looks like a number.
    Text,
}

impl Concern {
    /// The concern as one word, for JSON output.
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

/// One sentence for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    concern: Concern,
    sentence: String,
}

impl Warning {
    pub(super) fn new(concern: Concern, sentence: impl Into<String>) -> Self {
        Warning { concern, sentence: sentence.into() }
    }

    /// The same warning, about a part of the configuration that `prefix` names.
    pub(super) fn within(mut self, prefix: &str) -> Self {
        self.sentence = format!("{prefix}: {}", self.sentence);
        self
    }

    /// What it is about.
    pub fn concern(&self) -> Concern {
        self.concern
    }

    /// The sentence: what was found, and what to write instead.
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

/// Logs each warning that this process has not logged before; returns how many those were.
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
