//! Entries that are no valid registrations.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The reason why an entry of a fleet is no registration.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Its key has no role or no id.
    Key,
    /// Its value is too long.
    Size,
    /// Its value is not JSON of an instance, for this reason.
    Malformed(String),
    /// It has no MAC, and the fleet has a secret.
    Unsigned,
    /// Its MAC is wrong: it was altered, or the secrets differ.
    Forged,
    /// It expired this many seconds ago.
    Expired(u64),
    /// It expires this many seconds from now, which is later than registrations do.
    Future(u64),
    /// The fleet has too many entries.
    Full,
}

impl Refusal {
    /// The reasons' names, by [`index`](Self::index).
    const NAMES: [&str; 8] =
        ["key", "size", "malformed", "unsigned", "forged", "expired", "future", "full"];

    /// Returns the name of the reason, for metrics.
    pub fn as_str(&self) -> &'static str {
        Self::NAMES[self.index()]
    }

    fn index(&self) -> usize {
        match self {
            Refusal::Key => 0,
            Refusal::Size => 1,
            Refusal::Malformed(_) => 2,
            Refusal::Unsigned => 3,
            Refusal::Forged => 4,
            Refusal::Expired(_) => 5,
            Refusal::Future(_) => 6,
            Refusal::Full => 7,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Key => f.write_str("its key is not ROLE/ID; delete it"),
            Refusal::Size => f.write_str("its value is too long; delete it"),
            Refusal::Malformed(why) => write!(f, "its value is no instance: {why}"),
            Refusal::Unsigned => f.write_str(
                "it has no MAC: give the instance the same KVX_SECRET_FILE as this router",
            ),
            Refusal::Forged => f.write_str(
                "its MAC is wrong: it was altered or copied, or the instance's KVX_SECRET_FILE is \
                 another",
            ),
            Refusal::Expired(seconds) => {
                write!(f, "it expired {seconds} s ago: synchronize the hosts' clocks, or delete it")
            }
            Refusal::Future(seconds) => {
                write!(
                    f,
                    "it is valid for {seconds} s: synchronize the hosts' clocks, or delete it"
                )
            }
            Refusal::Full => f.write_str("the fleet has too many entries; delete those of others"),
        }
    }
}

impl std::error::Error for Refusal {}

/// Counts of refusals by reason.
#[derive(Debug, Default)]
pub(super) struct Refusals([AtomicU64; Refusal::NAMES.len()]);

impl Refusals {
    /// Counts a refusal, and returns how many there have been for its reason.
    pub(super) fn add(&self, refusal: &Refusal) -> u64 {
        self.0[refusal.index()].fetch_add(1, Relaxed) + 1
    }

    pub(super) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Refusal::NAMES.into_iter().zip(&self.0).map(|(name, count)| (name, count.load(Relaxed)))
    }
}
