//! The pauses between attempts, and the log of failures that repeat.

use std::time::Duration;

use crate::random::random_bytes;

const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(5);

/// Pauses that double from 250 ms to 5 s, each shortened by a random part of up to a half.
#[derive(Debug)]
pub(crate) struct Backoff(Duration);

impl Backoff {
    pub(crate) fn new() -> Self {
        Backoff(FIRST)
    }

    /// Returns the next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let whole = self.0;
        self.0 = (whole * 2).min(LONGEST);
        // Without random bytes there is no jitter, which is no reason to fail.
        let part = random_bytes().map_or(0, u16::from_ne_bytes);
        whole - whole / 2 * u32::from(part) / (1 << 16)
    }

    /// Starts again with the shortest pause.
    pub(crate) fn reset(&mut self) {
        *self = Backoff::new();
    }
}

/// Logs the first of equal failures, and their end.
#[derive(Debug)]
pub(crate) struct Reporter {
    what: &'static str,
    failure: Option<String>,
}

impl Reporter {
    pub(crate) fn new(what: &'static str) -> Self {
        Reporter { what, failure: None }
    }

    pub(crate) fn failed(&mut self, why: impl ToString) {
        let why = why.to_string();
        if self.failure.as_ref() != Some(&why) {
            tracing::warn!("{}: {why}; trying again", self.what);
            self.failure = Some(why);
        }
    }

    pub(crate) fn works(&mut self) {
        if self.failure.take().is_some() {
            tracing::info!("{}: works again", self.what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_to_five_seconds_with_jitter() {
        let mut backoff = Backoff::new();
        let mut longest = FIRST;
        for _ in 0..20 {
            let pause = backoff.next();
            assert!(pause <= longest && pause * 2 >= longest, "{pause:?} of {longest:?}");
            longest = (longest * 2).min(LONGEST);
        }
        let differ = (0..50).any(|_| backoff.next() != backoff.next());
        assert!(longest == LONGEST && differ);
        backoff.reset();
        assert!(backoff.next() <= FIRST);
    }
}
