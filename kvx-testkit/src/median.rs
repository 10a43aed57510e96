//! The usual time of a call, for benchmarks with limits.

use std::time::{Duration, Instant};

/// Calls `call` this many times, and returns the median time of a call.
///
/// # Panics
/// If `times` is 0.
pub fn median_time(times: usize, mut call: impl FnMut()) -> Duration {
    let measure = |_| {
        let start = Instant::now();
        call();
        start.elapsed()
    };
    let mut each: Vec<_> = (0..times).map(measure).collect();
    each.sort_unstable();
    each[times / 2]
}
