//! A pause of questions to an instance's `/tokenize`.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time without questions after a failure.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// The time without questions after [`REFUSALS`], or if there is no `/tokenize`: the instance has no
/// tokens for such requests.
const WITHOUT_TOKENS: Duration = Duration::from_secs(300);
/// The number of refused questions in a row after which a pause begins.
const REFUSALS: u32 = 8;

/// Pauses the questions after a failure, and after many refusals.
#[derive(Debug, Default)]
pub(crate) struct TokenizerPause(Mutex<PauseState>);

#[derive(Debug, Default)]
struct PauseState {
    until: Option<Instant>,
    refusals: u32,
}

impl TokenizerPause {
    fn state(&self) -> std::sync::MutexGuard<'_, PauseState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if no question may be asked now.
    pub(crate) fn is_on(&self, now: Instant) -> bool {
        self.state().until.is_some_and(|until| now < until)
    }

    /// Records an answer with tokens.
    pub(crate) fn answered(&self) {
        self.state().refusals = 0;
    }

    /// Records that the instance refused a question. Returns true if a pause begins.
    pub(crate) fn refused(&self, now: Instant) -> bool {
        let mut state = self.state();
        state.refusals += 1;
        if state.refusals < REFUSALS {
            return false;
        }
        state.refusals = 0;
        state.begin(now, WITHOUT_TOKENS)
    }

    /// Records that the instance has no `/tokenize`. Returns true if a pause begins.
    pub(crate) fn missing(&self, now: Instant) -> bool {
        self.state().begin(now, WITHOUT_TOKENS)
    }

    /// Records that a question failed. Returns true if a pause begins.
    pub(crate) fn failed(&self, now: Instant) -> bool {
        self.state().begin(now, AFTER_FAILURE)
    }
}

impl PauseState {
    /// Returns false if there is a pause already, as after concurrent questions.
    fn begin(&mut self, now: Instant, time: Duration) -> bool {
        let is_new = self.until.is_none_or(|until| until <= now);
        self.until = self.until.max(Some(now + time));
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_pause_at_once_and_refusals_after_many_in_a_row() {
        let (pause, now) = (TokenizerPause::default(), Instant::now());
        assert!(!pause.is_on(now));
        assert!(pause.failed(now));
        assert!(!pause.failed(now), "this one was asked before the first failed");
        assert!(pause.is_on(now));
        let now = now + AFTER_FAILURE;
        assert!(!pause.is_on(now));
        for _ in 0..REFUSALS - 1 {
            assert!(!pause.refused(now));
        }
        pause.answered();
        let begun = (0..REFUSALS).filter(|_| pause.refused(now)).count();
        assert_eq!((begun, pause.is_on(now)), (1, true));
        let now = now + WITHOUT_TOKENS;
        assert!(!pause.is_on(now));
        assert!(pause.missing(now) && !pause.failed(now));
        assert!(pause.is_on(now + WITHOUT_TOKENS - AFTER_FAILURE), "without the endpoint at once");
    }
}
