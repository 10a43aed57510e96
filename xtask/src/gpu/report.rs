//! The results of a run, in a folder: `summary.md`, `log.txt` with all output, and `figures.jsonl`
//! with the lines of the bench. They are written as they arrive, so that a run that is cut off
//! leaves everything up to then, and the name of the part that ran.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::parts::Part;
use crate::Result;
use crate::bars::{show, table};

/// The files in the folder.
pub(crate) const SUMMARY: &str = "summary.md";
const LOG: &str = "log.txt";
const FIGURES: &str = "figures.jsonl";

/// The heads of the tables.
const PARTS: &str = "part | result | seconds | details";
const POINTS: &str = "what | blocks | memory | GB/s | limit | GB/s | ratio | from | to";
const BARS: &str = "bar | asked | is | | |";

/// How a part ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Verdict {
    Passed,
    Failed,
    /// It needs something that this machine or the kit lacks.
    Skipped,
    /// The budget is spent.
    LeftOut,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Passed => "passed",
            Verdict::Failed => "FAILED",
            Verdict::Skipped => "skipped",
            Verdict::LeftOut => "left out",
        }
    }
}

/// The result of a part.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    /// A line for the table.
    pub(crate) details: String,
    /// Descriptions of what failed: missed bars, too.
    pub(crate) failures: Vec<String>,
}

impl Outcome {
    /// A part that passed or did not run.
    pub(crate) fn without_failures(verdict: Verdict, details: impl Into<String>) -> Outcome {
        Outcome { verdict, details: details.into(), failures: Vec::new() }
    }

    /// A part that failed for one reason.
    pub(crate) fn failed(why: String) -> Outcome {
        Outcome { verdict: Verdict::Failed, details: why.clone(), failures: vec![why] }
    }
}

/// The results so far.
pub(crate) struct Report {
    folder: PathBuf,
    log: File,
    figures: File,
    /// Lines about the machine and what it lacks.
    about: String,
    parts: Vec<String>,
    points: Vec<String>,
    bars: Vec<String>,
    pub(crate) failures: Vec<String>,
}

impl Report {
    /// Begins a report in a folder, and replaces an earlier one.
    pub(crate) fn begin(folder: &Path) -> Result<Report> {
        let error = |error| format!("{}: {error}; name a folder by --results", folder.display());
        fs::create_dir_all(folder).map_err(error)?;
        let [log, figures] = [LOG, FIGURES].map(|name| File::create(folder.join(name)));
        Ok(Report {
            folder: folder.to_owned(),
            log: log?,
            figures: figures?,
            about: String::new(),
            parts: Vec::new(),
            points: Vec::new(),
            bars: Vec::new(),
            failures: Vec::new(),
        })
    }

    /// Prints a line, and writes it to the log.
    pub(crate) fn say(&mut self, line: &str) -> Result<()> {
        println!("{line}");
        Ok(writeln!(self.log, "{line}")?)
    }

    /// Adds a line about the machine.
    pub(crate) fn about(&mut self, line: &str) -> Result<()> {
        self.say(line)?;
        writeln!(self.about, "{line}\n")?;
        self.write(None)
    }

    /// Notes that a part begins, and returns the file for its output.
    pub(crate) fn part_begins(&mut self, part: &Part) -> Result<File> {
        self.say(&format!("==> {}: {}", part.name, part.what))?;
        self.write(Some(&part.name))?;
        Ok(self.log.try_clone()?)
    }

    /// Adds the result of a part.
    pub(crate) fn part_ended(
        &mut self,
        part: &Part,
        took: Duration,
        outcome: Outcome,
    ) -> Result<()> {
        let Outcome { verdict, details, failures } = outcome;
        self.say(&format!("<== {}: {}, {details}\n", part.name, verdict.word()))?;
        let seconds = took.as_secs_f64();
        let (name, word) = (&part.name, verdict.word());
        self.parts.push(format!("| {name} | {word} | {seconds:.1} | {} |", cell(&details)));
        self.failures.extend(failures.iter().map(|failure| format!("{}: {failure}", part.name)));
        self.write(None)
    }

    /// Adds the lines of a bench.
    pub(crate) fn figures(&mut self, lines: &[Value]) -> Result<()> {
        for line in lines {
            writeln!(self.figures, "{line}")?;
            self.points.push(row(line));
        }
        Ok(())
    }

    /// Adds a row about a bar.
    pub(crate) fn bar(&mut self, row: String) {
        self.bars.push(row);
    }

    /// Returns the whole summary; `running` is the part that has begun.
    fn summary(&self, running: Option<&str>) -> String {
        let mut parts = self.parts.clone();
        parts.extend(running.map(|name| {
            format!("| {name} | RUNNING | | the run was cut off here, unless it is still running |")
        }));
        let mut text = format!("{}\n{}", self.about.trim_end(), table(PARTS, &parts));
        for (head, rows) in [(POINTS, &self.points), (BARS, &self.bars)] {
            text += &table(head, rows);
        }
        for failure in &self.failures {
            text += &format!("\nfailed: {failure}\n");
        }
        text
    }

    /// Replaces the summary, so that no moment sees half of it.
    fn write(&self, running: Option<&str>) -> Result<()> {
        let unfinished = self.folder.join("summary.new");
        fs::write(&unfinished, self.summary(running))?;
        Ok(fs::rename(unfinished, self.folder.join(SUMMARY))?)
    }

    /// Prints the summary.
    pub(crate) fn end(self) -> bool {
        println!("{}", self.summary(None));
        println!("{} failed; results in {}", self.failures.len(), self.folder.display());
        self.failures.is_empty()
    }
}

/// Formats a text for a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// Formats a line of the bench as a row of a table.
fn row(line: &Value) -> String {
    let word = |field: &str| line[field].as_str().unwrap_or("").to_owned();
    let number = |field: &str| line[field].as_f64().map_or_else(|| "-".to_owned(), show);
    let what = match line["kernel"].as_str() {
        Some(kernel) => kernel.to_owned(),
        None => format!("{} {}", word("backend"), word("op")),
    };
    let blocks = format!("{} KiB x{}", line["block"].as_u64().unwrap_or(0) >> 10, line["count"]);
    let figures = [number("gbps"), word("limit_name"), number("limit_gbps"), number("ratio")];
    let range = [number("ratio_min"), number("ratio_max")];
    format!(
        "| {what} | {blocks} | {} | {} | {} |",
        word("memory"),
        figures.join(" | "),
        range.join(" | ")
    )
}

#[cfg(test)]
mod tests {
    use super::super::parts;
    use super::*;

    #[test]
    fn a_run_that_is_cut_off_leaves_its_results_and_the_name_of_the_part() {
        let folder = std::env::temp_dir().join(format!("kvx-gpu-report-{}", std::process::id()));
        let mut report = Report::begin(&folder).unwrap();
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap();
        report.about("a device").unwrap();
        let parts = parts::table().unwrap();
        let [first, second] = [&parts[0], &parts[1]];
        let mut log = report.part_begins(first).unwrap();
        writeln!(log, "some output").unwrap();
        report
            .figures(&[serde_json::json!({"backend": "SHM", "op": "read", "gbps": 1.5})])
            .unwrap();
        let outcome = Outcome {
            verdict: Verdict::Failed,
            details: "3 passed".to_owned(),
            failures: vec!["P1".to_owned()],
        };
        report.part_ended(first, Duration::from_secs(2), outcome).unwrap();
        report.part_begins(second).unwrap();
        let summary = read(SUMMARY);
        assert!(summary.starts_with("a device\n"), "{summary}");
        assert!(summary.contains(&format!("| {} | FAILED | 2.0 | 3 passed |", first.name)));
        assert!(summary.contains(&format!("| {} | RUNNING |", second.name)), "{summary}");
        assert!(summary.contains(&format!("failed: {}: P1", first.name)), "{summary}");
        assert!(summary.contains("| SHM read |"), "{summary}");
        let log = read(LOG);
        assert!(log.contains("some output\n<=="), "{log}");
        assert!(read(FIGURES).contains("1.5"));
        fs::remove_dir_all(folder).unwrap();
    }
}
