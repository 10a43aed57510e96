//! The demo's output: text with progress for a terminal, plain lines for a file, or JSON.

use std::fmt::Arguments;
use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Result;
use crate::printable::printable;

/// The width of generated text in characters, which only a piece without a space exceeds.
const WIDTH: usize = 98;
/// The width of the bar in characters.
const BAR: usize = 16;
/// The time without output after which a terminal shows what the demo waits for.
pub(super) const QUIET: Duration = Duration::from_millis(250);

/// The format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Lines of text. A terminal also shows progress, on a line that later output replaces.
    Text { terminal: bool },
    /// One JSON object per line.
    Json,
}

/// The writer of the demo's output.
pub(super) struct Screen<'a> {
    out: &'a mut dyn Write,
    format: Format,
    /// The beginning of the line that is being written.
    label: String,
    /// The number of characters in this line so far.
    column: usize,
    steps: Steps,
}

/// The steps of the demo over one backend.
struct Steps {
    /// The step that runs, from 1.
    step: usize,
    all: usize,
    begun: Instant,
    /// The expected time: that of the backend before.
    expected: Option<Duration>,
    backends_left: u32,
}

impl Steps {
    fn text(&self, what: &str, elapsed: Duration) -> String {
        let all = self.all.max(self.step).max(1);
        let filled = BAR * self.step.saturating_sub(1) / all;
        let (full, empty) = ("#".repeat(filled), ".".repeat(BAR - filled));
        let left = self.expected.map_or_else(String::new, |expected| {
            let left = (expected * (1 + self.backends_left)).saturating_sub(elapsed);
            format!(", {:.0} s left", left.as_secs_f64().ceil())
        });
        format!("[{full}{empty}] {} of {all}{left}: {what}", self.step)
    }
}

impl<'a> Screen<'a> {
    pub(super) fn new(out: &'a mut dyn Write, format: Format) -> Self {
        let (begun, expected) = (Instant::now(), None);
        let steps = Steps { step: 0, all: 0, begun, expected, backends_left: 0 };
        Screen { out, format, label: String::new(), column: 0, steps }
    }

    /// Begins the demo over one backend, in so many steps, with other backends to follow.
    pub(super) fn expect(&mut self, steps: usize, backends_left: usize) {
        let before = (self.steps.all > 0).then(|| self.steps.begun.elapsed());
        let (begun, backends_left) = (Instant::now(), backends_left as u32);
        self.steps = Steps { step: 0, all: steps, begun, expected: before, backends_left };
    }

    /// Begins the next step.
    pub(super) fn step(&mut self) {
        self.steps.step += 1;
    }

    /// Writes a line of text.
    pub(super) fn line(&mut self, text: Arguments<'_>) -> Result<()> {
        if self.format == Format::Json {
            return Ok(());
        }
        self.clear()?;
        writeln!(self.out, "{text}")?;
        Ok(self.out.flush()?)
    }

    /// Writes a JSON object.
    pub(super) fn event(&mut self, event: &Value) -> Result<()> {
        if self.format == Format::Json {
            writeln!(self.out, "{event}")?;
        }
        Ok(self.out.flush()?)
    }

    /// Shows on a terminal what the demo waits for, since when, and how much is left.
    pub(super) fn progress(&mut self, what: &str, since: Instant) -> Result<()> {
        if self.is_terminal() {
            let what = format!("{what}, {:.1} s", since.elapsed().as_secs_f64());
            let text = self.steps.text(&what, self.steps.begun.elapsed());
            // The terminal cuts off what does not fit, instead of starting another line.
            write!(self.out, "\r\x1b[K\x1b[?7l{}{text}\x1b[?7h", self.label)?;
            self.out.flush()?;
        }
        Ok(())
    }

    /// Does the next step in another thread, and shows meanwhile what the demo waits for.
    pub(super) fn wait_for<T: Send>(
        &mut self,
        what: &str,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        self.step();
        let since = Instant::now();
        std::thread::scope(|scope| {
            let (end, ended) = mpsc::channel::<()>();
            let work = scope.spawn(move || {
                let _end = end; // dropped when the work ends
                work().map_err(|error| error.to_string())
            });
            while ended.recv_timeout(QUIET) == Err(RecvTimeoutError::Timeout) {
                self.progress(what, since)?;
            }
            Ok(work.join().map_err(|_| "the thread of a step has panicked")??)
        })
    }

    /// Begins a line that [`piece`](Self::piece) continues.
    pub(super) fn begin(&mut self, label: &str) -> Result<()> {
        label.clone_into(&mut self.label);
        self.column = label.chars().count();
        if self.format != Format::Json {
            write!(self.out, "{label}")?;
            self.out.flush()?;
        }
        Ok(())
    }

    /// Removes progress from the line, before its first piece.
    pub(super) fn clear(&mut self) -> Result<()> {
        if self.is_terminal() {
            write!(self.out, "\r\x1b[K{}", self.label)?;
        }
        Ok(())
    }

    /// Continues the line with a piece of generated text, or begins a new line for a piece that
    /// exceeds the width and begins with a space. Control characters are escaped.
    pub(super) fn piece(&mut self, text: &str) -> Result<()> {
        if self.format == Format::Json {
            return Ok(());
        }
        let shown = printable(text);
        let mut shown = shown.as_str();
        if self.column + shown.chars().count() > WIDTH && shown.starts_with(' ') {
            let indent = self.label.chars().count() + 1;
            write!(self.out, "\n{:indent$}", "")?;
            self.column = indent;
            shown = shown.trim_start();
        }
        self.column += shown.chars().count();
        write!(self.out, "{shown}")?;
        Ok(self.out.flush()?)
    }

    /// Ends the line.
    pub(super) fn end(&mut self) -> Result<()> {
        self.label.clear();
        if self.format != Format::Json {
            writeln!(self.out)?;
        }
        Ok(())
    }

    /// Returns whether progress is shown.
    pub(super) fn is_terminal(&self) -> bool {
        self.format == Format::Text { terminal: true }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn written(format: Format) -> String {
        let mut out = Vec::new();
        let mut screen = Screen::new(&mut out, format);
        screen.expect(4, 1);
        screen.step();
        screen.progress("starting", Instant::now()).unwrap();
        screen.line(format_args!("started")).unwrap();
        screen.begin("alone  ").unwrap();
        screen.step();
        screen.progress("prefill", Instant::now()).unwrap();
        screen.clear().unwrap();
        screen.piece("a \"b\"\n\x1b[2J").unwrap();
        screen.end().unwrap();
        screen.event(&json!({"event": "end"})).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn generated_text_is_wrapped_before_a_word() {
        let mut out = Vec::new();
        let mut screen = Screen::new(&mut out, Format::Text { terminal: false });
        screen.begin("alone  ").unwrap();
        for piece in [" one", &"o".repeat(WIDTH - 13), " e", " next", "word", "."] {
            screen.piece(piece).unwrap();
        }
        screen.end().unwrap();
        let first = format!("alone   one{} e", "o".repeat(WIDTH - 13));
        assert_eq!(String::from_utf8(out).unwrap(), format!("{first}\n        nextword.\n"));
    }

    #[test]
    fn only_a_terminal_receives_progress_and_control_characters_are_escaped() {
        let plain = "started\nalone  a \"b\"\\n\\u{1b}[2J\n";
        assert_eq!(written(Format::Text { terminal: false }), plain);
        assert_eq!(written(Format::Json), "{\"event\":\"end\"}\n");
        let terminal = written(Format::Text { terminal: true });
        assert_eq!(
            terminal,
            "\r\x1b[K\x1b[?7l[................] 1 of 4: starting, 0.0 s\x1b[?7h\
             \r\x1b[Kstarted\nalone  \
             \r\x1b[K\x1b[?7lalone  [####............] 2 of 4: prefill, 0.0 s\x1b[?7h\
             \r\x1b[Kalone  a \"b\"\\n\\u{1b}[2J\n"
        );
    }

    #[test]
    fn the_backend_before_tells_the_time_left() {
        let (expected, begun) = (Some(Duration::from_secs(20)), Instant::now());
        let steps = Steps { step: 3, all: 4, begun, expected, backends_left: 1 };
        let text = steps.text("a prefill starts", Duration::from_secs(15));
        assert_eq!(text, "[########........] 3 of 4, 25 s left: a prefill starts");
        assert!(steps.text("late", Duration::from_secs(60)).contains(", 0 s left"));
    }

    #[test]
    fn a_step_that_takes_time_is_shown_and_its_error_returned() {
        let mut out = Vec::new();
        let mut screen = Screen::new(&mut out, Format::Text { terminal: true });
        screen.expect(2, 0);
        let done = screen.wait_for("sleeping", || {
            std::thread::sleep(2 * QUIET);
            Ok(7)
        });
        assert_eq!(done.unwrap(), 7);
        let failed = screen.wait_for("failing", || Err::<(), _>("no server".into()));
        assert_eq!(failed.unwrap_err().to_string(), "no server");
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("1 of 2: sleeping, 0.") && !text.contains("failing"), "{text}");
    }
}
