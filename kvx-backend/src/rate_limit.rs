//! A rate limit for log lines that unauthenticated peers can cause at will.

use std::time::{Duration, Instant};

/// The shortest time between two lines.
const APART: Duration = Duration::from_secs(10);

/// Passes one log line in ten seconds and counts the others.
#[derive(Debug, Default)]
pub struct RateLimited {
    last: Option<Instant>,
    /// The number of lines suppressed since the last one.
    held_back: u64,
}

impl RateLimited {
    /// Calls `log` unless it has done so in the last ten seconds.
    pub fn log(&mut self, log: impl FnOnce()) {
        let now = Instant::now();
        if self.last.is_some_and(|last| now < last + APART) {
            self.held_back += 1;
            return;
        }
        if self.held_back > 0 {
            tracing::warn!(
                count = self.held_back,
                "suppressed similar warnings in the last seconds"
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
    fn a_flood_is_logged_once() {
        let (mut warnings, mut told) = (RateLimited::default(), 0);
        for _ in 0..1000 {
            warnings.log(|| told += 1);
        }
        assert_eq!((told, warnings.held_back), (1, 999));
    }
}
