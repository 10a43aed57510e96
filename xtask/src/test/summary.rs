//! Sums up a run: the times, the failures, the skips and the last line.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use crate::harness::{Failure, Tally};
use crate::skips::Skip;

/// The results of all steps so far.
#[derive(Default)]
pub(crate) struct Summary {
    require_all: bool,
    steps: Vec<StepResult>,
    passed: usize,
    failures: Vec<Failure>,
    excused: Vec<Failure>,
    gaps: Vec<String>,
    skips: Vec<Skip>,
    ledger_entries: Vec<String>,
    programs: Vec<(String, Duration)>,
    left_to_the_whole: Vec<String>,
}

struct StepResult {
    name: &'static str,
    held: bool,
    took: Duration,
}

impl Summary {
    /// An empty summary; with `require_all` a skip of what can run here will be a failure.
    pub(crate) fn new(require_all: bool) -> Summary {
        Summary { require_all, ..Summary::default() }
    }

    /// Adds the result of one step and says whether it held.
    pub(crate) fn add(&mut self, name: &'static str, took: Duration, tally: Tally) -> bool {
        let (failed, skipped): (Vec<_>, Vec<_>) =
            tally.skips.into_iter().partition(|skip| self.require_all && skip.can_run_here());
        let held = tally.failures.is_empty() && failed.is_empty();
        self.passed += tally.passed;
        self.failures.extend(tally.failures.into_iter().map(|failure| failure.after(name)));
        self.excused.extend(tally.excused);
        self.gaps.extend(tally.gaps);
        self.failures.extend(
            failed
                .into_iter()
                .map(|skip| Failure::from(format!("{name}: skipped although required: {skip}"))),
        );
        self.skips.extend(skipped);
        self.steps.push(StepResult { name, held, took });
        held
    }

    /// Adds how long a test program took, and what of it only the whole run has.
    pub(crate) fn add_program(&mut self, title: &str, took: Duration, left_to_the_whole: BTreeSet<String>) {
        self.programs.push((title.to_owned(), took));
        if !left_to_the_whole.is_empty() {
            self.left_to_the_whole
                .push(format!("{} ({title})", Vec::from_iter(left_to_the_whole).join(", ")));
        }
    }

    /// Adds entries of the ledger that are to be committed.
    pub(crate) fn add_ledger_entries(&mut self, entries: Vec<String>) {
        self.ledger_entries.extend(entries);
    }

    /// Whether nothing failed.
    pub(crate) fn held(&self) -> bool {
        self.failures.is_empty()
    }
}

impl fmt::Display for Summary {
    /// Its last line is `N passed, N failed, N skipped`, without a line break. Excused tests stand before it, and known
    /// gaps before those: neither has passed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut programs: Vec<_> = self.programs.iter().collect();
        programs.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        for (title, took) in programs {
            writeln!(f, "{:>8.1} s  {title}", took.as_secs_f64())?;
        }
        if !self.left_to_the_whole.is_empty() {
            writeln!(f, "\n`--whole` adds: {}\n", self.left_to_the_whole.join("; "))?;
        }
        for step in &self.steps {
            let verdict = if step.held { "ok" } else { "FAILED" };
            writeln!(f, "{:<20} {verdict:<6} {:>8.1} s", step.name, step.took.as_secs_f64())?;
        }
        let total: Duration = self.steps.iter().map(|step| step.took).sum();
        writeln!(f, "{:<20} {:<6} {:>8.1} s\n", "total", "", total.as_secs_f64())?;
        list(f, "failed", &self.failures)?;
        list(
            f,
            "failed beside other tests and passed alone: each is a defect whose cause is to be found",
            &self.excused,
        )?;
        list(f, "known gaps", &self.gaps)?;
        list(f, "skipped", &self.skips)?;
        if !self.ledger_entries.is_empty() {
            writeln!(f, "commit to xtask/flaky.txt:\n\n{}", self.ledger_entries.join("\n"))?;
        }
        writeln!(f, "{} known gaps held", self.gaps.len())?;
        let names: Vec<_> = self.excused.iter().filter_map(|failure| failure.test.as_ref()).collect();
        let names: Vec<_> = names.iter().map(|test| test.name.as_str()).collect();
        let colon = if names.is_empty() { "" } else { ": " };
        writeln!(f, "{} excused{colon}{}", self.excused.len(), names.join(", "))?;
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failures.len(), self.skips.len())
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
    use crate::test::programs::TestProgram;

    fn tally() -> Tally {
        Tally {
            passed: 7,
            failures: vec![Failure::from("frames (cargo test -p kvx-native)".to_owned())],
            excused: vec![Failure::of_test("keys", &TestProgram::of_nothing("-p kvx-native --lib"), "")],
            gaps: vec!["UCX::P11".to_owned()],
            skips: vec![
                Skip::new("namespaces", "no iproute2; cure: --install"),
                Skip::new("gpu", "no GPU [cannot run here]; cure: another machine"),
            ],
        }
    }

    fn last_line(summary: &Summary) -> String {
        summary.to_string().lines().last().unwrap().to_owned()
    }

    #[test]
    fn the_last_line_has_the_three_counts() {
        let mut summary = Summary::new(false);
        assert!(summary.add("format", Duration::ZERO, Tally { passed: 1, ..Tally::default() }));
        assert!(summary.held());
        assert_eq!(last_line(&summary), "1 passed, 0 failed, 0 skipped");
        assert!(!summary.add("tests", Duration::from_millis(1500), tally()));
        assert!(!summary.held());
        assert_eq!(last_line(&summary), "8 passed, 1 failed, 2 skipped");
        let text = summary.to_string();
        for part in [
            "tests: frames (cargo test -p kvx-native)",
            "keys (cargo test -p kvx-native --lib)",
            "\n1 known gaps held\n1 excused: keys\n8 passed",
            "namespaces: no iproute2; cure: --install",
            "1.5 s",
        ] {
            assert!(text.contains(part), "{part} is not in:\n{text}");
        }
    }

    #[test]
    fn programs_stand_slowest_first_with_what_the_whole_run_adds() {
        let mut summary = Summary::new(false);
        summary.add_program("-p quick --lib", Duration::from_millis(200), BTreeSet::new());
        summary.add_program("-p slow --lib", Duration::from_secs(70), ["UCX 1.13".to_owned()].into());
        let text = summary.to_string();
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part} is not in:\n{text}"));
        assert!(at("70.0 s  -p slow --lib\n") < at("0.2 s  -p quick --lib\n"));
        at("`--whole` adds: UCX 1.13 (-p slow --lib)\n");
    }

    #[test]
    fn a_required_skip_is_a_failure_unless_it_cannot_run_here() {
        let mut summary = Summary::new(true);
        let skips = tally().skips;
        assert!(!summary.add("tests", Duration::ZERO, Tally { skips, ..Tally::default() }));
        assert_eq!(last_line(&summary), "0 passed, 1 failed, 1 skipped");
        assert!(summary.to_string().contains("skipped although required: namespaces"));
    }
}
