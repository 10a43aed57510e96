//! Log lines that unauthenticated peers can cause as often as they like.

use std::time::{Duration, Instant};

/// The least time between two lines.
const APART: Duration = Duration::from_secs(10);

/// Lets one log line through in ten seconds, and counts the others.
#[derive(Debug, Default)]
pub struct RateLimited {
    last: Option<Instant>,
    /// The lines that were held back since.
    held_back: u64,
}

impl RateLimited {
    /// Calls `log`, unless it has just done so.
    pub fn log(&mut self, log: impl FnOnce()) {
        let now = Instant::now();
        if self.last.is_some_and(|last| now < last + APART) {
            self.held_back += 1;
            return;
        }
        if self.held_back > 0 {
            tracing::warn!(
                count = self.held_back,
                "such warnings were held back in the last seconds"
            );
        }
        (self.last, self.held_back) = (Some(now), 0);
        log();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_told_of_once() {
        let (mut warnings, mut told) = (RateLimited::default(), 0);
        for _ in 0..1000 {
            warnings.log(|| told += 1);
        }
        assert_eq!((told, warnings.held_back), (1, 999));
    }
}
