//! Progress of long work, on standard error: a bar on a terminal, and a plain line now and then
//! elsewhere.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

const WIDTH: usize = 24;
/// Shorter work gets no plain line.
const FIRST_LINE: Duration = Duration::from_secs(2);
/// The least time between plain lines.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// The progress of work that has a known number of steps.
pub(crate) struct Progress {
    started: Instant,
    state: State,
}

impl Progress {
    /// Starts the work: so many steps, which are expected to take this long in total.
    pub(crate) fn new(steps: usize, expected: Duration) -> Self {
        let style =
            if std::io::stderr().is_terminal() { Style::Bar } else { Style::Lines { last: None } };
        Progress { started: Instant::now(), state: State { style, steps, done: 0, expected } }
    }

    /// Shows the name of the current step, without counting it.
    pub(crate) fn show(&mut self, what: &str) {
        if let Some(text) = self.state.text(self.started.elapsed(), what) {
            let mut stderr = std::io::stderr().lock();
            // Progress that cannot be written is not worth a failure.
            let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
        }
    }

    /// Counts a completed step, and shows its name.
    pub(crate) fn step(&mut self, what: &str) {
        self.state.done += 1;
        self.show(what);
    }

    /// Clears the line for other output. The next step draws the bar again.
    pub(crate) fn clear(&self) {
        if matches!(self.state.style, Style::Bar) {
            // Progress that cannot be cleared is not worth a failure.
            let _ = std::io::stderr().write_all(b"\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

enum Style {
    /// A line that is drawn again in place.
    Bar,
    /// Plain lines, the last of which was printed after this time.
    Lines { last: Option<Duration> },
}

struct State {
    style: Style,
    steps: usize,
    done: usize,
    expected: Duration,
}

impl State {
    /// Returns the text to write after this time, if it is time for one.
    fn text(&mut self, elapsed: Duration, what: &str) -> Option<String> {
        let left = self.left(elapsed);
        let (done, steps) = (self.done, self.steps.max(self.done));
        match &mut self.style {
            Style::Bar => {
                let filled = WIDTH * done / steps.max(1);
                let (full, empty) = ("#".repeat(filled), ".".repeat(WIDTH - filled));
                // The terminal cuts off what does not fit, instead of starting another line.
                Some(format!("\r\x1b[?7l\x1b[K[{full}{empty}] {left} left: {what}\x1b[?7h"))
            }
            Style::Lines { last } => {
                if last.map_or(FIRST_LINE, |last| last + BETWEEN_LINES) > elapsed || done == steps {
                    return None;
                }
                *last = Some(elapsed);
                Some(format!("{} % done, {left} left: {what}\n", 100 * done / steps.max(1)))
            }
        }
    }

    /// Returns the time left. The more steps are completed, the more their time counts, and the
    /// less the expectation.
    fn left(&self, elapsed: Duration) -> String {
        let part = self.done as f64 / self.steps.max(self.done).max(1) as f64;
        let left = match self.done {
            0 => self.expected.saturating_sub(elapsed),
            _ => (self.expected.mul_f64(1.0 - part) + elapsed).mul_f64(1.0 - part),
        };
        match left.as_secs_f64().ceil() as u64 {
            seconds @ 0..120 => format!("{seconds} s"),
            seconds => format!("{} min", seconds.div_ceil(60)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_terminal_shows_a_bar_in_place_that_fits_into_its_line() {
        let mut state = State { style: Style::Bar, steps: 4, done: 0, expected: seconds(300) };
        let text = state.text(Duration::ZERO, "TCP read").unwrap();
        assert_eq!(text, "\r\x1b[?7l\x1b[K[........................] 5 min left: TCP read\x1b[?7h");
        state.done = 1;
        let text = state.text(seconds(20), "TCP write").unwrap();
        assert!(text.contains("[######..................] 4 min left: TCP write"), "{text}");
        state.done = 5;
        let text = state.text(seconds(100), "more than planned").unwrap();
        assert!(text.contains("[########################] 0 s left"), "{text}");
    }

    #[test]
    fn elsewhere_a_line_appears_after_two_seconds_and_then_every_ten() {
        let style = Style::Lines { last: None };
        let mut state = State { style, steps: 100, done: 0, expected: seconds(50) };
        let mut lines = Vec::new();
        for second in 0..=50 {
            state.done = second * 2;
            let text = state.text(seconds(second as u64), &format!("round {second}"));
            lines.extend(text);
        }
        assert_eq!(
            lines,
            [
                "4 % done, 48 s left: round 2\n",
                "24 % done, 38 s left: round 12\n",
                "44 % done, 28 s left: round 22\n",
                "64 % done, 18 s left: round 32\n",
                "84 % done, 8 s left: round 42\n",
            ]
        );
    }

    #[test]
    fn work_without_steps_divides_by_nothing() {
        for style in [Style::Bar, Style::Lines { last: None }] {
            let mut state = State { style, steps: 0, done: 0, expected: Duration::ZERO };
            let _ = state.text(seconds(3), "nothing");
        }
    }
}
