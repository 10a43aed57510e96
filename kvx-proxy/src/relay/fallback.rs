//! The share of requests whose prompts decode instances compute because no prefill instance is up.
//!
//! Prompts delay the tokens of all other requests at a decode instance, so they may take only a
//! part of its pool's load.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The part of the tokens outstanding at a pool's decode instances that fallbacks may hold: one
/// divided by this.
const PART: u64 = 10;
/// The time between two warnings.
const APART: Duration = Duration::from_secs(10);

/// The fallbacks in progress, by pool.
#[derive(Debug, Default)]
pub(crate) struct Fallbacks {
    tokens: Arc<Mutex<HashMap<String, u64>>>,
    warnings: Mutex<Warnings>,
}

/// A fallback in progress, until this is dropped.
#[derive(Debug)]
pub(crate) struct FallbackPermit {
    all: Arc<Mutex<HashMap<String, u64>>>,
    pool: String,
    tokens: u64,
}

/// The last warning, and the fallbacks since then.
#[derive(Debug, Default)]
struct Warnings {
    last: Option<Instant>,
    served: u64,
    refused: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn admits(held: u64, tokens: u64, load: u64) -> bool {
    held == 0 || held + tokens <= load / PART
}

impl Fallbacks {
    /// Admits a request of `tokens` to a pool whose decode instances have `load` tokens
    /// outstanding, the request included. One request at a time is always admitted.
    pub(crate) fn enter(&self, pool: &str, tokens: u64, load: u64) -> Option<FallbackPermit> {
        let mut all = lock(&self.tokens);
        let held = all.get(pool).copied().unwrap_or(0);
        if !admits(held, tokens, load) {
            return None;
        }
        // An instance may count a cached prompt as nothing.
        let tokens = tokens.max(1);
        all.insert(pool.to_owned(), held + tokens);
        Some(FallbackPermit { all: Arc::clone(&self.tokens), pool: pool.to_owned(), tokens })
    }

    /// Returns true if such a request would be admitted now.
    pub(crate) fn admits(&self, pool: &str, tokens: u64, load: u64) -> bool {
        admits(lock(&self.tokens).get(pool).copied().unwrap_or(0), tokens, load)
    }

    /// Warns about a fallback that was `served` or refused, unless it has warned a moment ago.
    pub(crate) fn warn(&self, served: bool, why: impl FnOnce() -> String) {
        let now = Instant::now();
        let mut warnings = lock(&self.warnings);
        if served {
            warnings.served += 1;
        } else {
            warnings.refused += 1;
        }
        if warnings.last.is_some_and(|last| now < last + APART) {
            return;
        }
        let Warnings { served, refused, .. } =
            std::mem::replace(&mut *warnings, Warnings { last: Some(now), served: 0, refused: 0 });
        drop(warnings);
        tracing::warn!(
            served,
            refused,
            why = why(),
            "decode instances compute prompts in the place of prefill instances"
        );
    }
}

impl Drop for FallbackPermit {
    fn drop(&mut self) {
        let mut all = lock(&self.all);
        if let Some(held) = all.get_mut(&self.pool) {
            *held = held.saturating_sub(self.tokens);
            if *held == 0 {
                all.remove(&self.pool);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fallbacks_hold_a_tenth_of_the_load_and_one_is_always_admitted() {
        let fallbacks = Fallbacks::default();
        let enter = |load| fallbacks.enter("a", 100, load);
        let first = enter(100).unwrap();
        assert!(enter(200).is_none(), "the decode instances do nothing else");
        let second = enter(2000).unwrap();
        assert!(enter(2999).is_none());
        let third = enter(3000).unwrap();
        assert!(fallbacks.enter("b", 100, 100).is_some(), "another pool has its own share");
        drop((second, third));
        assert!(enter(1000).is_none() && enter(2000).is_some());
        drop(first);
        assert!(enter(100).is_some());
        assert!(lock(&fallbacks.tokens).is_empty(), "requests that ended hold no tokens");
    }
}
