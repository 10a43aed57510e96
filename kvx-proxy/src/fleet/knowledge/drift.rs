//! Compares predicted cached tokens with those that an instance reports.

use super::KnowledgeLevel;

/// The answers that are compared.
const WINDOW: u32 = 16;
/// The wrong predictions among them that count as drift.
const WRONG: u32 = 8;
/// A prediction is wrong if it is too high by more than this part of the prompt, and by more than
/// this many tokens.
const PART: u64 = 8;
const TOKENS: u64 = 64;
/// Longer prompts count as this long.
const MAX_PROMPT: u64 = 1 << 32;

/// The part of a prompt that the router expects an instance to have cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Prediction {
    /// The cached tokens.
    pub(crate) tokens: u64,
    /// The cached tokens if prompts that were sent lately count as cached.
    pub(crate) with_pending: u64,
    /// The source of the prediction.
    pub(crate) by: KnowledgeLevel,
    /// The number of restarts before it; see [`Drift::restart`].
    pub(crate) epoch: u64,
}

/// The latest comparisons, and sums of all.
#[derive(Debug, Default)]
pub(crate) struct Drift {
    /// One bit for each of the latest comparisons: 1 is wrong.
    latest: u32,
    count: u32,
    epoch: u64,
    pub(crate) predicted: u64,
    pub(crate) reported: u64,
}

impl Drift {
    /// Returns the number of restarts.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Records that the instance or its cache may have begun anew. Predictions from events before
    /// that are not compared any more.
    pub(crate) fn restart(&mut self) {
        self.epoch += 1;
        (self.latest, self.count) = (0, 0);
    }

    /// Compares a prediction with a report about a prompt of this length. Returns true if the
    /// predictions of exact knowledge have drifted.
    pub(crate) fn compare(&mut self, predicted: Prediction, reported: u64, prompt: u64) -> bool {
        if predicted.by != KnowledgeLevel::History && predicted.epoch != self.epoch {
            return false;
        }
        // Both numbers are a peer's.
        let (reported, prompt) = (reported.min(prompt), prompt.min(MAX_PROMPT));
        self.predicted = self.predicted.saturating_add(predicted.tokens);
        self.reported = self.reported.saturating_add(reported.min(prompt));
        if predicted.by != KnowledgeLevel::Exact {
            return false;
        }
        // Reports above the prediction are no drift: they contain blocks of other tiers.
        let over = predicted.tokens.saturating_sub(reported);
        let wrong = over > (prompt / PART).max(TOKENS);
        self.latest = (self.latest << 1 | u32::from(wrong)) & ((1 << WINDOW) - 1);
        self.count = (self.count + 1).min(WINDOW);
        let has_drifted = self.count == WINDOW && self.latest.count_ones() >= WRONG;
        if has_drifted {
            self.restart();
        }
        has_drifted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(tokens: u64) -> Prediction {
        Prediction { tokens, with_pending: tokens, by: KnowledgeLevel::Exact, epoch: 0 }
    }

    #[test]
    fn half_of_the_latest_predictions_must_be_wrong() {
        let mut drift = Drift::default();
        for _ in 0..100 {
            assert!(!drift.compare(exact(1000), 1000, 2000));
            assert!(!drift.compare(exact(1000), 1500, 2000), "blocks from the CPU's memory");
            assert!(!drift.compare(exact(1000), 0, 2000));
        }
        let drifts = (0..16).filter(|_| drift.compare(exact(1000), 0, 2000)).count();
        assert_eq!((drifts, drift.epoch()), (1, 1), "later reports are about earlier predictions");
    }

    #[test]
    fn small_differences_and_guesses_are_no_drift_but_are_counted() {
        let mut drift = Drift::default();
        for _ in 0..100 {
            let guess = Prediction { by: KnowledgeLevel::Degraded, ..exact(1000) };
            assert!(!drift.compare(guess, 0, 2000));
            assert!(!drift.compare(exact(64), 0, 100));
        }
        assert_eq!((drift.predicted, drift.reported), (106_400, 0));
    }
}
