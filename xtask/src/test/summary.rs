//! Sums up a run: times, failures, skips and counts.

use std::fmt;
use std::time::Duration;

use crate::harness::{Failure, Tally};

/// The results of all steps so far.
#[derive(Default)]
pub(crate) struct Summary {
    require_all: bool,
    /// The steps: their names, whether they held, and how long they took.
    steps: Vec<(String, bool, Duration)>,
    total: Tally,
    programs: Vec<(String, Duration)>,
    left_to_the_whole: Vec<String>,
    /// Entries to commit to the ledger.
    pub(super) ledger_entries: Vec<String>,
    /// The date and the commit of a whole run, which is printed as a line for `whole.txt`.
    pub(super) date_and_commit: Option<String>,
}

impl Summary {
    /// An empty summary; with `require_all`, skips of tests that could run here are failures.
    pub(crate) fn new(require_all: bool) -> Summary {
        Summary { require_all, ..Summary::default() }
    }

    /// Adds the result of one step and returns whether it held.
    pub(crate) fn add(&mut self, name: &str, took: Duration, mut tally: Tally) -> bool {
        for skip in tally.skips.extract_if(.., |skip| self.require_all && skip.can_run_here()) {
            tally.failures.push(Failure::from(format!("skipped although required: {skip}")));
        }
        tally.failures = tally.failures.into_iter().map(|failure| failure.after(name)).collect();
        let held = tally.failures.is_empty();
        self.total.add(tally);
        self.steps.push((name.to_owned(), held, took));
        held
    }

    /// Adds the run time of a test program, and the parts of it that only `--whole` runs.
    pub(crate) fn add_program(&mut self, title: &str, took: Duration, tally: &Tally) {
        self.programs.push((title.to_owned(), took));
        let left: Vec<_> = tally.left_to_the_whole.iter().cloned().collect();
        self.left_to_the_whole
            .extend((!left.is_empty()).then(|| format!("{} ({title})", left.join(", "))));
    }

    /// Returns whether nothing failed.
    pub(crate) fn held(&self) -> bool {
        self.total.failures.is_empty()
    }
}

impl fmt::Display for Summary {
    /// The last three lines, without a line break at the end, are the counts of known gaps and of
    /// excused tests, and `N passed, N failed, N skipped`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut programs: Vec<_> = self.programs.iter().collect();
        programs.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        for (title, took) in programs {
            writeln!(f, "{:>8.1} s  {title}", took.as_secs_f64())?;
        }
        if !self.left_to_the_whole.is_empty() {
            writeln!(f, "\n`--whole` adds: {}\n", self.left_to_the_whole.join("; "))?;
        }
        for (name, held, took) in &self.steps {
            let verdict = if *held { "ok" } else { "FAILED" };
            writeln!(f, "{name:<20} {verdict:<6} {:>8.1} s", took.as_secs_f64())?;
        }
        let seconds = self.steps.iter().map(|(.., took)| *took).sum::<Duration>().as_secs_f64();
        writeln!(f, "{:<20} {:<6} {seconds:>8.1} s\n", "total", "")?;
        let Tally { passed, failures, excused, gaps, skips, .. } = &self.total;
        list(f, "failed", failures)?;
        list(f, "failed among other tests and passed alone: find the cause of each", excused)?;
        list(f, "known gaps", gaps)?;
        list(f, "skipped", skips)?;
        if !self.ledger_entries.is_empty() {
            writeln!(f, "commit to xtask/flaky.txt:\n\n{}", self.ledger_entries.join("\n"))?;
        }
        let excused: Vec<_> = excused.iter().filter_map(|failure| failure.test.as_ref()).collect();
        let counts = format!("{passed} passed, {} failed, {} skipped", failures.len(), skips.len());
        if let Some(commit) = &self.date_and_commit {
            writeln!(f, "commit to xtask/whole.txt:")?;
            writeln!(f, "{commit} {counts}, {} excused, {seconds:.0} s", excused.len())?;
        }
        writeln!(f, "{} known gaps held", gaps.len())?;
        let names: Vec<_> = excused.iter().map(|test| test.name.as_str()).collect();
        let colon = if names.is_empty() { "" } else { ": " };
        write!(f, "{} excused{colon}{}\n{counts}", names.len(), names.join(", "))
    }
}

fn list(f: &mut fmt::Formatter<'_>, title: &str, entries: &[impl fmt::Display]) -> fmt::Result {
    if entries.is_empty() {
        return Ok(());
    }
    writeln!(f, "{title}:")?;
    for entry in entries {
        writeln!(f, "  {entry}")?;
    }
    writeln!(f)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skips::Skip;
    use crate::test::programs::TestProgram;

    fn tally() -> Tally {
        Tally {
            passed: 7,
            failures: vec![Failure::from("frames (cargo test -p kvx-native)".to_owned())],
            excused: vec![Failure::of_test("keys", &TestProgram::named("-p kvx-native --lib"), "")],
            gaps: vec!["UCX::P11".to_owned()],
            skips: vec![
                Skip::new("namespaces", "no iproute2; cure: --install"),
                Skip::new("gpu", "no GPU [cannot run here]; cure: another machine"),
            ],
            ..Tally::default()
        }
    }

    #[test]
    fn the_last_lines_have_the_counts_of_gaps_excused_tests_and_results() {
        let mut summary = Summary::new(false);
        assert!(summary.add("format", Duration::ZERO, Tally::of_check(None)) && summary.held());
        assert!(
            summary
                .to_string()
                .ends_with("\n0 known gaps held\n0 excused\n1 passed, 0 failed, 0 skipped")
        );
        assert!(!summary.add("tests", Duration::from_millis(1500), tally()) && !summary.held());
        let (text, last) = (
            summary.to_string(),
            "1 known gaps held\n1 excused: keys\n8 passed, 1 failed, 2 skipped",
        );
        for part in [
            "tests: frames (cargo",
            "keys (cargo",
            "namespaces: no iproute2; cure: --install",
            "1.5 s",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
        assert!(text.ends_with(last) && !text.contains("whole.txt"), "{text}");
        summary.date_and_commit = Some("2026-11-29 76e1750".to_owned());
        let line = "2026-11-29 76e1750 8 passed, 1 failed, 2 skipped, 1 excused, 2 s";
        let text = summary.to_string();
        assert!(text.ends_with(&format!("\ncommit to xtask/whole.txt:\n{line}\n{last}")), "{text}");
    }

    #[test]
    fn the_slowest_program_comes_first_and_the_additions_of_the_whole_tier_are_listed() {
        let mut summary = Summary::new(false);
        summary.add_program("-p quick --lib", Duration::from_millis(200), &Tally::default());
        let slow = Tally { left_to_the_whole: ["UCX 1.13".to_owned()].into(), ..Tally::default() };
        summary.add_program("-p slow --lib", Duration::from_secs(70), &slow);
        let text = summary.to_string();
        assert!(
            text.trim_start().starts_with("70.0 s  -p slow --lib\n     0.2 s  -p quick --lib\n"),
            "{text}"
        );
        assert!(text.contains("`--whole` adds: UCX 1.13 (-p slow --lib)\n"), "{text}");
    }

    #[test]
    fn a_required_skip_is_a_failure_unless_it_cannot_run_here() {
        let mut summary = Summary::new(true);
        assert!(!summary.add(
            "tests",
            Duration::ZERO,
            Tally { skips: tally().skips, ..Tally::default() }
        ));
        let text = summary.to_string();
        assert!(text.contains("tests: skipped although required: namespaces"), "{text}");
        assert!(text.ends_with("0 passed, 1 failed, 1 skipped"), "{text}");
    }
}
