//! The demo's output: text with progress for a terminal, plain lines for a file, or JSON.

use std::fmt::Arguments;
use std::io::Write;

use serde_json::Value;

use crate::Result;

/// The width of generated text in characters, which only a piece without a space exceeds.
const WIDTH: usize = 98;

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
}

impl<'a> Screen<'a> {
    pub(super) fn new(out: &'a mut dyn Write, format: Format) -> Self {
        Screen { out, format, label: String::new(), column: 0 }
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

    /// Shows on a terminal what the demo waits for.
    pub(super) fn progress(&mut self, what: &str) -> Result<()> {
        if self.is_terminal() {
            write!(self.out, "\r\x1b[K{}[{what}]", self.label)?;
            self.out.flush()?;
        }
        Ok(())
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
        let mut shown = String::new();
        for letter in text.chars() {
            match letter.is_control() {
                true => shown.extend(letter.escape_default()),
                false => shown.push(letter),
            }
        }
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
        screen.progress("starting").unwrap();
        screen.line(format_args!("started")).unwrap();
        screen.begin("alone  ").unwrap();
        screen.progress("prefill").unwrap();
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
            "\r\x1b[K[starting]\r\x1b[Kstarted\nalone  \r\x1b[Kalone  [prefill]\r\x1b[Kalone  a \"b\"\\n\\u{1b}[2J\n"
        );
    }
}
