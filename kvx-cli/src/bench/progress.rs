//! A progress bar on standard error, if that is a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const WIDTH: usize = 24;

/// A progress bar that redraws itself in place, until it is cleared.
pub(crate) struct ProgressBar {
    shown: bool,
    started: Instant,
    steps: usize,
    done: usize,
}

impl ProgressBar {
    pub(crate) fn of(steps: usize) -> Self {
        ProgressBar {
            shown: std::io::stderr().is_terminal(),
            started: Instant::now(),
            steps,
            done: 0,
        }
    }

    /// Counts a completed step.
    pub(crate) fn step(&mut self, what: &str) {
        self.done += 1;
        if !self.shown {
            return;
        }
        let part = self.done as f64 / self.steps.max(self.done) as f64;
        let filled = (part * WIDTH as f64) as usize;
        let left =
            Duration::from_secs_f64(self.started.elapsed().as_secs_f64() * (1.0 / part - 1.0))
                .as_secs();
        let (full, empty) = ("#".repeat(filled), ".".repeat(WIDTH - filled));
        eprint!("\r\x1b[K[{full}{empty}] {what}, {left} s left");
        std::io::stderr().flush().ok();
    }

    /// Clears the line for other output.
    pub(crate) fn clear(&self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
