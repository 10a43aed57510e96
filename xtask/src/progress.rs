//! The progress of long commands: on a terminal, a line below the output of the child that runs.
//! Elsewhere the commands' own lines show it.

use std::io::{self, IsTerminal as _, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::process::locked;

const WIDTH: usize = 24;
/// The time between two drawings of the line.
const INTERVAL: Duration = Duration::from_millis(250);
/// The time that a child must be silent: a line below quick output would flicker.
const SILENCE: Duration = Duration::from_millis(500);
/// Clears the line.
const CLEAR: &str = "\r\x1b[K";

/// The work whose progress is shown. At most one thread shows its work.
static WORK: Mutex<Option<Work>> = Mutex::new(None);
static LINE: Mutex<Line> = Mutex::new(Line { drawn: None, written: None, is_broken: false });
static HIDDEN: AtomicBool = AtomicBool::new(false);

/// Work of several steps, whose progress is shown until this is dropped.
pub(crate) struct Progress(());

impl Progress {
    /// Starts the work: so many steps, and about how long all take, if that is known. (Otherwise
    /// steps that are alike tell.)
    pub(crate) fn of(steps: usize, expected: Option<Duration>) -> Progress {
        *locked(&WORK) = Some(Work::of(steps, expected, Instant::now()));
        Progress(())
    }

    /// As [`of`](Self::of), if nobody knows how long the steps take: one may take a minute and
    /// another nothing.
    pub(crate) fn unlike(steps: usize) -> Progress {
        *locked(&WORK) = Some(Work { is_alike: false, ..Work::of(steps, None, Instant::now()) });
        Progress(())
    }

    /// Begins the next step. Returns a line for output that is no terminal.
    pub(crate) fn begins(&self, what: &str) -> String {
        let mut work = locked(&WORK);
        work.as_mut().map_or_else(String::new, |work| work.begins(what, Instant::now()))
    }

    /// Corrects the expectation: a step took another time than expected.
    pub(crate) fn took(&self, time: Duration, expected: Duration) {
        if let Some(work) = &mut *locked(&WORK) {
            work.expected = work.expected.map(|all| (all + time).saturating_sub(expected));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        clear();
        *locked(&WORK) = None;
    }
}

/// Hides or shows the line: others write to the terminal at times.
pub(crate) fn hide(hidden: bool) {
    HIDDEN.store(hidden, Ordering::Relaxed);
}

/// Returns whether a line is shown at times.
pub(crate) fn is_shown() -> bool {
    !HIDDEN.load(Ordering::Relaxed) && io::stderr().is_terminal() && locked(&WORK).is_some()
}

/// Draws the line again if it is time.
pub(crate) fn tick() {
    if !is_shown() {
        return;
    }
    let (now, mut line) = (Instant::now(), locked(&LINE));
    let waits = |since: Option<Instant>, limit| since.is_some_and(|since| now - since < limit);
    if line.is_broken || waits(line.drawn, INTERVAL) || waits(line.written, SILENCE) {
        return;
    }
    if let Some(work) = &*locked(&WORK) {
        // The terminal cuts off what does not fit, instead of starting another line.
        eprint!("{CLEAR}\x1b[?7l{}\x1b[?7h", work.line(now));
        line.drawn = Some(now);
    }
}

/// Clears the line for other output, after the last of a child's.
pub(crate) fn clear() {
    let mut line = locked(&LINE);
    line.clear();
    line.is_broken = false;
}

/// The line, and the output above it.
struct Line {
    /// When the line was drawn, if it is there.
    drawn: Option<Instant>,
    /// When output was written.
    written: Option<Instant>,
    /// True if output ended within a line.
    is_broken: bool,
}

impl Line {
    fn clear(&mut self) {
        if self.drawn.take().is_some() {
            eprint!("{CLEAR}");
        }
    }
}

/// A writer of a child's output above the line.
pub(crate) struct Above<W>(pub(crate) W);

impl<W: Write> Write for Above<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut line = locked(&LINE);
        line.clear();
        let len = self.0.write(bytes)?;
        if let Some(last) = bytes[..len].last() {
            (line.written, line.is_broken) = (Some(Instant::now()), *last != b'\n');
        }
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

struct Work {
    started: Instant,
    steps: usize,
    expected: Option<Duration>,
    /// True if each step takes about as long as another.
    is_alike: bool,
    /// The step that runs, from 1, with its name and start.
    step: usize,
    what: String,
    began: Instant,
}

impl Work {
    fn of(steps: usize, expected: Option<Duration>, now: Instant) -> Work {
        let (is_alike, step, what) = (true, 0, String::new());
        Work { started: now, steps, expected, is_alike, step, what, began: now }
    }

    fn begins(&mut self, what: &str, now: Instant) -> String {
        self.step += 1;
        what.clone_into(&mut self.what);
        self.began = now;
        let left =
            self.left(now).map_or_else(String::new, |left| format!(", {} left", about(left)));
        format!("{} of {}{left}: {what}", self.step, self.steps.max(self.step))
    }

    /// Returns the time left, if it can be known.
    fn left(&self, now: Instant) -> Option<Duration> {
        let done = self.step.saturating_sub(1);
        let all = match self.expected {
            Some(expected) => expected,
            None if done == 0 || !self.is_alike => return None,
            None => (self.began - self.started).mul_f64(self.steps as f64 / done as f64),
        };
        Some(all.saturating_sub(now - self.started))
    }

    fn line(&self, now: Instant) -> String {
        let Work { step, what, .. } = self;
        let (steps, elapsed) = (self.steps.max(*step), now - self.started);
        match self.left(now) {
            Some(left) => {
                let all = (elapsed + left).as_secs_f64();
                let share = if all > 0.0 { elapsed.as_secs_f64() / all } else { 0.0 };
                let filled = ((WIDTH as f64 * share) as usize).min(WIDTH);
                let (full, empty) = ("#".repeat(filled), ".".repeat(WIDTH - filled));
                format!("[{full}{empty}] {step} of {steps}, {} left: {what}", about(left))
            }
            None => {
                let sign = ['|', '/', '-', '\\']
                    [(elapsed.as_millis() / INTERVAL.as_millis() % 4) as usize];
                format!("{sign} {step} of {steps}, {} so far: {what}", about(elapsed))
            }
        }
    }
}

fn about(time: Duration) -> String {
    match time.as_secs_f64().ceil() as u64 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds => format!("{} min", seconds.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_shown_where_steps_or_an_expectation_tell_it() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut alike = Work::of(4, None, start);
        assert_eq!(alike.begins("first", start), "1 of 4: first");
        assert_eq!(alike.line(after(5)), "| 1 of 4, 5 s so far: first");
        assert_eq!(alike.begins("second", after(60)), "2 of 4, 3 min left: second");
        let line = alike.line(after(150));
        assert_eq!(line, "[###############.........] 2 of 4, 90 s left: second");

        let mut expected = Work::of(2, Some(Duration::from_secs(100)), start);
        assert_eq!(expected.begins("first", start), "1 of 2, 100 s left: first");
        expected.begins("second", after(10));
        let line = expected.line(after(200));
        assert_eq!(line, "[########################] 2 of 2, 0 s left: second");

        let mut unlike = Work { is_alike: false, ..Work::of(2, None, start) };
        unlike.begins("first", start);
        assert_eq!(unlike.begins("second", after(60)), "2 of 2: second");
        assert_eq!(unlike.line(after(61)), "| 2 of 2, 61 s so far: second");
    }
}
