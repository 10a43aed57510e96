//! A rate limit for log lines about peers, so that no peer can fill the log.

use std::time::{Duration, Instant};

use kvx_core::backend::sync::Mutex;

/// The minimum time between two log lines.
const QUIET: Duration = Duration::from_secs(1);

/// A rate limit for log lines, with a count of the lines that it suppressed.
#[derive(Debug, Default)]
pub(super) struct RefusalLog(Mutex<(Option<Instant>, u64)>);

impl RefusalLog {
    /// Counts a refusal. Returns `Some` if a line may be written now, with the number of lines
    /// suppressed since the last one.
    pub(super) fn count(&self) -> Option<u64> {
        let mut guard = self.0.lock();
        let (last, left_out) = &mut *guard;
        if last.is_some_and(|last| last.elapsed() < QUIET) {
            *left_out += 1;
            return None;
        }
        *last = Some(Instant::now());
        Some(std::mem::take(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_counts_the_suppressed_ones() {
        let log = RefusalLog::default();
        assert_eq!(log.count(), Some(0));
        assert_eq!((log.count(), log.count()), (None, None));
        log.0.lock().0 = Instant::now().checked_sub(QUIET);
        assert_eq!((log.count(), log.count()), (Some(2), None));
    }
}
