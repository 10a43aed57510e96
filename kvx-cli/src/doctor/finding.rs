//! Findings, and how they are shown.

use std::io::Write;

use serde::Serialize;

use crate::backends::{words, wrap};
use crate::printable::printable;

/// How serious a finding is. Serious ones are shown first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// Something does not work.
    Problem,
    /// Something works, but not as it should, or not for everybody.
    Warning,
    /// Something to know.
    Note,
    Ok,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Level::Problem => "PROBLEM",
            Level::Warning => "WARNING",
            Level::Note => "note",
            Level::Ok => "ok",
        }
    }
}

/// A statement about one topic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) level: Level,
    pub(super) topic: &'static str,
    pub(super) what: String,
    /// The reason that it matters.
    pub(super) why: Option<String>,
    /// The next step of the operator.
    pub(super) cure: Option<String>,
}

impl Finding {
    fn new(level: Level, topic: &'static str, what: impl Into<String>) -> Self {
        Finding { level, topic, what: what.into(), why: None, cure: None }
    }

    pub(super) fn problem(topic: &'static str, what: impl Into<String>) -> Self {
        Finding::new(Level::Problem, topic, what)
    }

    pub(super) fn warning(topic: &'static str, what: impl Into<String>) -> Self {
        Finding::new(Level::Warning, topic, what)
    }

    pub(super) fn note(topic: &'static str, what: impl Into<String>) -> Self {
        Finding::new(Level::Note, topic, what)
    }

    pub(super) fn ok(topic: &'static str, what: impl Into<String>) -> Self {
        Finding::new(Level::Ok, topic, what)
    }

    pub(super) fn because(mut self, why: impl Into<String>) -> Self {
        self.why = Some(why.into());
        self
    }

    pub(super) fn cure(mut self, cure: impl Into<String>) -> Self {
        self.cure = Some(cure.into());
        self
    }
}

/// Numbers of findings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) problems: usize,
    pub(super) warnings: usize,
}

impl Tally {
    pub(super) fn of<'a>(findings: impl IntoIterator<Item = &'a Finding>) -> Self {
        let mut tally = Tally::default();
        for finding in findings {
            match finding.level {
                Level::Problem => tally.problems += 1,
                Level::Warning => tally.warnings += 1,
                Level::Note | Level::Ok => {}
            }
        }
        tally
    }

    /// Returns `2 problems, 1 warning`, or `no problem`.
    pub(super) fn in_words(self) -> String {
        let counted = |count, one: &str| match count {
            0 => None,
            1 => Some(format!("1 {one}")),
            _ => Some(format!("{count} {one}s")),
        };
        let parts = [counted(self.problems, "problem"), counted(self.warnings, "warning")];
        match parts.into_iter().flatten().collect::<Vec<_>>() {
            none if none.is_empty() => "no problem".to_owned(),
            parts => parts.join(", "),
        }
    }
}

/// The most columns of a line.
pub(super) const WIDTH: usize = 100;
/// The columns before a text.
const INDENT: usize = 9;

/// Writes findings, serious ones first.
pub(super) fn show(findings: &[Finding], out: &mut dyn Write) -> std::io::Result<()> {
    let mut sorted: Vec<&Finding> = findings.iter().collect();
    sorted.sort_by_key(|finding| finding.level);
    for finding in sorted {
        let head = format!("{}: {}", finding.topic, finding.what);
        let parts =
            [("", Some(&head)), ("why: ", finding.why.as_ref()), ("do:  ", finding.cure.as_ref())];
        let mut label = finding.level.word();
        for (mark, text) in parts {
            let Some(text) = text.map(|text| printable(text)) else { continue };
            let hanging = " ".repeat(mark.len());
            let mut lines = wrap(words(&text), WIDTH - INDENT - mark.len(), "").into_iter();
            let first = lines.next().unwrap_or_default();
            writeln!(out, "{label:<7}  {mark}{first}")?;
            label = "";
            for line in lines {
                writeln!(out, "{label:<7}  {hanging}{line}")?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serious_findings_come_first_and_say_why_and_what_to_do() {
        let findings = [
            Finding::ok("files", "1024 descriptors"),
            Finding::problem("/dev/shm", "has 64 MiB")
                .because("pools live there ".repeat(8))
                .cure("type `mount -o remount,size=16g /dev/shm`"),
            Finding::note("numa", "one node"),
        ];
        let mut out = Vec::new();
        show(&findings, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "PROBLEM  /dev/shm: has 64 MiB\n         \
             why: pools live there pools live there pools live there pools live there pools live there\n              \
             pools live there pools live there pools live there\n         \
             do:  type `mount -o remount,size=16g /dev/shm`\n\
             note     numa: one node\n\
             ok       files: 1024 descriptors\n"
        );
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH));
    }

    #[test]
    fn problems_and_warnings_are_counted() {
        let findings = [Finding::problem("a", ""), Finding::warning("b", ""), Finding::ok("c", "")];
        assert_eq!(Tally::of(&findings).in_words(), "1 problem, 1 warning");
        assert_eq!(Tally { problems: 0, warnings: 2 }.in_words(), "2 warnings");
        assert_eq!(Tally::default().in_words(), "no problem");
    }
}
