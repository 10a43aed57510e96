//! Parses the output of test programs: the lines of libtest, which libtest-mimic prints too.

use std::collections::BTreeSet;
use std::fmt;

use crate::process::{End, Finished};
use crate::skips::{Notes, Skip, is_same_test};
use crate::test::programs::TestProgram;

/// The number of a failed test's last lines that the summary repeats.
const REPEATED_LINES: usize = 12;

/// The results of the tests of a program, or of a step.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// The number of passed tests.
    pub(crate) passed: usize,
    /// One entry per failed test, or for a test program that ended without a result.
    pub(crate) failures: Vec<Failure>,
    /// Tests that failed among others and passed alone. They count as neither passed nor failed.
    pub(crate) excused: Vec<Failure>,
    /// Tests of clauses that a backend violates as its list of gaps declares.
    pub(crate) gaps: Vec<String>,
    /// One entry per skipped test.
    pub(crate) skips: Vec<Skip>,
    /// The parts of a program that only `--whole` runs.
    pub(crate) left_to_the_whole: BTreeSet<String>,
}

impl Tally {
    /// Returns the result of a check that counts as one test: passed, or failed for this reason.
    pub(crate) fn of_check(failure: Option<String>) -> Tally {
        let passed = usize::from(failure.is_none());
        Tally {
            passed,
            failures: failure.into_iter().map(Failure::from).collect(),
            ..Tally::default()
        }
    }

    /// Adds the results of another program.
    pub(crate) fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failures.extend(other.failures);
        self.excused.extend(other.excused);
        self.gaps.extend(other.gaps);
        self.skips.extend(other.skips);
        self.left_to_the_whole.extend(other.left_to_the_whole);
    }
}

/// A failed test or check.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Failure {
    /// A description of the failure, and the command that repeats it.
    what: String,
    /// The last lines that the test printed.
    pub(crate) printed: String,
    /// The test, if it has a name by which it can run alone.
    pub(crate) test: Option<Test>,
}

/// A test and its program.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Test {
    pub(crate) name: String,
    pub(crate) program: TestProgram,
}

impl From<String> for Failure {
    fn from(what: String) -> Failure {
        Failure { what, ..Failure::default() }
    }
}

impl Failure {
    /// A failed test with what it printed.
    pub(crate) fn of_test(name: &str, program: &TestProgram, printed: &str) -> Failure {
        let test = Test { name: name.to_owned(), program: program.clone() };
        Failure {
            printed: printed.to_owned(),
            test: Some(test),
            ..Failure::of_program(program, name)
        }
    }

    /// A failure of a test program that no named test accounts for.
    pub(crate) fn of_program(program: &TestProgram, what: &str) -> Failure {
        Failure::from(format!("{what} (cargo test {})", program.shown()))
    }

    /// Puts the failed step, or a reason, in front.
    pub(crate) fn after(self, prefix: &str) -> Failure {
        Failure { what: format!("{prefix}: {}", self.what), ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        self.printed.lines().try_for_each(|line| write!(f, "\n    | {line}"))
    }
}

/// Returns how many tests passed and were skipped in the output of one or several test programs.
pub(crate) fn passed_and_skipped(output: &str) -> (usize, usize) {
    let skipped = output.lines().filter(|line| line.starts_with("SKIP ")).count();
    (ParsedOutput::of(output).counts[0], skipped)
}

/// What one or several test programs have printed, also if they were killed before their result.
#[derive(Debug, PartialEq)]
pub(crate) struct Progress {
    pub(crate) passed: usize,
    pub(crate) skipped: usize,
    /// The name of each failed test, above the last lines that it printed.
    pub(crate) failures: Vec<String>,
}

impl Progress {
    pub(crate) fn of(output: &str) -> Progress {
        let ParsedOutput { counts, has_result, passed, failed, .. } = ParsedOutput::of(output);
        let skipped = output.lines().filter(|line| line.starts_with("SKIP ")).count();
        let described = failed.into_iter().map(|(name, lines)| {
            let last = &lines[lines.len().saturating_sub(REPEATED_LINES)..];
            let printed = last.iter().map(|line| format!("\n    | {line}"));
            format!("{name}{}", String::from_iter(printed))
        });
        Progress {
            passed: if has_result { counts[0] } else { passed.len() },
            skipped,
            failures: described.collect(),
        }
    }
}

/// The output of a test program.
#[derive(Default)]
struct ParsedOutput {
    /// The numbers of passed, failed and ignored tests.
    counts: [usize; 3],
    has_result: bool,
    passed: Vec<String>,
    /// Failed tests with the lines that they printed.
    failed: Vec<(String, Vec<String>)>,
    ignored: Vec<Skip>,
}

/// Sums up what a test program printed and what its tests noted.
pub(crate) fn tally(program: &TestProgram, finished: &Finished, notes: Notes) -> Tally {
    let ParsedOutput { counts, has_result, mut passed, mut failed, mut ignored } =
        ParsedOutput::of(&finished.output);
    let [mut passes, fails, ignores] = counts;
    if has_result && fails == 0 {
        failed.clear(); // lines of a passed test that look like verdicts
    }
    let nameless = fails.saturating_sub(failed.len());
    let mut failures = Vec::new();
    for (name, lines) in failed {
        let last = &lines[lines.len().saturating_sub(REPEATED_LINES)..];
        failures.push(Failure::of_test(&name, program, &last.join("\n")));
    }
    let mut fail = |what: &str| failures.push(Failure::of_program(program, what));
    (0..nameless).for_each(|_| fail("a test without a name"));
    match &finished.end {
        End::TimedOut(_) => fail(&finished.end.to_string()),
        End::Exited(status) if !has_result => fail(&format!("ended without a result: {status}")),
        End::Exited(status) if !status.success() && fails == 0 => {
            fail(&format!("crashed after its tests: {status}"));
        }
        End::Exited(_) => {}
    }
    // Tests whose verdict follows output of another process in the same line.
    let mut unnamed = ignores.saturating_sub(ignored.len());
    // The harness has counted a test with a note as ignored or as passed.
    for noted in notes.skips.iter().map(|skip| &skip.name).chain(&notes.gaps) {
        if let Some(at) = ignored.iter().position(|test| is_same_test(&test.name, noted)) {
            ignored.swap_remove(at);
        } else if let Some(at) = passed.iter().position(|test| is_same_test(test, noted)) {
            passed.swap_remove(at);
            passes -= 1;
        } else {
            unnamed = unnamed.saturating_sub(1);
        }
    }
    ignored.extend((0..unnamed).map(|_| Skip::new(&program.title, "ignored")));
    let skips = notes.skips.into_iter().chain(ignored).collect();
    let Notes { gaps, left_to_the_whole, .. } = notes;
    Tally { passed: passes, failures, gaps, skips, left_to_the_whole, ..Tally::default() }
}

impl ParsedOutput {
    fn of(output: &str) -> ParsedOutput {
        let mut parsed = ParsedOutput::default();
        // The failed test whose lines follow: up to its backtrace, the next headline or the list of
        // names.
        let mut printing: Option<usize> = None;
        for line in output.lines() {
            if let Some(name) = headline(line) {
                // If another process printed into the line of the verdict, it is not recognised.
                let known = parsed.failed.iter().position(|(failed, _)| failed == name);
                printing = known.or(Some(parsed.failed.len()));
                if known.is_none() {
                    parsed.failed.push((name.to_owned(), Vec::new()));
                }
            } else if line == "failures:" || line == "stack backtrace:" {
                printing = None;
            } else if let Some(counts) = counts(line) {
                printing = None;
                // rustdoc prints several such lines, and so does a program that runs itself again.
                parsed.has_result = true;
                parsed.counts.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
            } else if let Some((name, verdict)) = verdict(line) {
                match verdict.split_once(", ").unwrap_or((verdict, "ignored")) {
                    ("ok", _) => parsed.passed.push(name.to_owned()),
                    ("FAILED", _) => parsed.failed.push((name.to_owned(), Vec::new())),
                    ("ignored", reason) => parsed.ignored.push(Skip::new(name, reason)),
                    _ => {}
                }
            } else if let Some(test) = printing.filter(|_| !line.trim().is_empty()) {
                parsed.failed[test].1.push(line.to_owned());
            }
        }
        parsed
    }
}

/// Parses `---- name ----` (libtest-mimic) or `---- name stdout ----` (libtest), above the lines of
/// a failed test.
fn headline(line: &str) -> Option<&str> {
    let name = line.strip_prefix("---- ")?.strip_suffix(" ----")?;
    Some(name.strip_suffix(" stdout").unwrap_or(name))
}

/// Parses `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in
/// 0.00s`.
fn counts(line: &str) -> Option<[usize; 3]> {
    let (_, list) = line.trim().strip_prefix("test result: ")?.split_once(". ")?;
    let count = |word: &str| {
        let mut entries = list.split("; ");
        entries.find_map(|entry| entry.trim().strip_suffix(word)?.trim().parse().ok())
    };
    Some([count("passed")?, count("failed")?, count("ignored")?])
}

/// Parses `test name ... ok`, also padded or with `- should panic`.
fn verdict(line: &str) -> Option<(&str, &str)> {
    let (name, verdict) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let name = name.trim();
    let kinds = [" - should panic", " - compile fail", " - compile"];
    let without_kind = kinds.iter().find_map(|kind| name.strip_suffix(kind));
    Some((without_kind.unwrap_or(name), verdict.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;
    use std::time::Duration;

    const GREEN: &str = "
running 5 tests
test grid::merges ... ok
test pool::huge_pages ... ok
test gpu::reads ... ignored, no GPU [cannot run here]; cure: another machine
test grid::refuses - should panic ... ok
test notify_order  ... ignored

test result: ok. 3 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.00s

running 1 test
test read          ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1.25s
";

    fn tally_of(end: End, output: &str, notes: Notes) -> Tally {
        let finished = Finished { end, output: output.to_owned() };
        tally(&TestProgram::named("-p tcp --lib"), &finished, notes)
    }

    fn exited(code: i32, output: &str) -> Tally {
        tally_of(End::Exited(ExitStatus::from_raw(code << 8)), output, Notes::default())
    }

    fn failures(tally: &Tally) -> Vec<String> {
        tally.failures.iter().map(Failure::to_string).collect()
    }

    #[test]
    fn result_lines_are_summed_up_and_skips_have_reasons() {
        let tally = exited(0, GREEN);
        assert_eq!((tally.passed, tally.failures.len()), (4, 0));
        assert_eq!(
            (tally.skips[0].name.as_str(), tally.skips[0].cure.as_str()),
            ("gpu::reads", "another machine")
        );
        assert_eq!(tally.skips[1..], [Skip::new("notify_order", "ignored")]);
        assert_eq!(passed_and_skipped(GREEN), (4, 0));
        assert_eq!(passed_and_skipped("SKIP a: b; cure: c\nall is well\n"), (0, 1));
        for line in [
            "test result: ok",
            "test results: ok. 1 passed; 0 failed; 0 ignored",
            "5 passed; 0 failed",
        ] {
            assert_eq!(counts(line), None, "{line}");
        }
    }

    #[test]
    fn noted_skips_and_gaps_are_not_counted_as_passed_or_twice() {
        let skips = vec![
            Skip::new("huge_pages", "none reserved; cure: reserve some"),
            Skip::new("notify_order", "TCP is ordered; cure: none needed"),
            Skip::new("half_a_test", "no network namespaces; cure: run as root"),
        ];
        let notes =
            Notes { skips: skips.clone(), gaps: vec!["merges".to_owned()], ..Notes::default() };
        let tally = tally_of(End::Exited(ExitStatus::default()), GREEN, notes);
        assert_eq!((tally.passed, tally.gaps.len()), (2, 1));
        assert_eq!(tally.skips[..3], skips);
        assert_eq!(tally.skips.len(), 4, "and the ignored test without a note");
        // The verdict is in another line.
        let broken = "test P9 ... what the engine logs\nignored, known gap: x\n\
                      test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out\n";
        let notes = Notes { gaps: vec!["P9".to_owned()], ..Notes::default() };
        let tally = tally_of(End::Exited(ExitStatus::default()), broken, notes);
        assert_eq!((tally.passed, tally.skips.len(), tally.gaps.len()), (0, 0, 1));
    }

    #[test]
    fn failures_have_the_names_and_last_lines_of_their_tests_and_a_command() {
        let output = "\
test frames ... FAILED
test keys   ... what another process printed
FAILED

failures:

---- frames stdout ----
1 is not 2
stack backtrace:
   0: frames

---- keys ----
no key

failures:
    frames
    keys

test result: FAILED. 4 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
";
        let tally = exited(101, output);
        assert_eq!(tally.passed, 4);
        let command = "(cargo test -p tcp --lib --all-features)";
        assert_eq!(
            failures(&tally),
            [
                format!("frames {command}\n    | 1 is not 2"),
                format!("keys {command}\n    | no key"),
                format!("a test without a name {command}")
            ]
        );
        assert_eq!(tally.failures[1].test.as_ref().map(|test| test.name.as_str()), Some("keys"));
    }

    #[test]
    fn the_progress_of_a_killed_program_is_counted() {
        let output =
            "test P1 ... ok\ntest P2 ... FAILED\ntest P3 ... ok\nSKIP P4: no; cure: none\n";
        let progress = Progress::of(output);
        assert_eq!((progress.passed, progress.skipped), (2, 1));
        assert_eq!(progress.failures, ["P2"]);
        let output = "---- P2 ----\n1 is not 2\n\n\
                      test result: FAILED. 7 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out\n";
        let progress = Progress::of(output);
        assert_eq!(
            (progress.passed, &*progress.failures),
            (7, &["P2\n    | 1 is not 2".to_owned()][..])
        );
    }

    #[test]
    fn a_program_that_crashes_hangs_or_ends_without_a_result_fails() {
        let fails = |tally: Tally, why: &str| {
            assert!(
                tally.failures.len() == 1 && failures(&tally)[0].starts_with(why),
                "{:?}",
                tally.failures
            );
            assert!(tally.failures[0].test.is_none(), "it cannot be excused");
        };
        fails(exited(134, "test read ... ok\n"), "ended without a result: exit status: 134");
        fails(exited(0, "all is well\n"), "ended without a result: exit status: 0");
        fails(
            exited(139, &format!("---- nobody ----\n{GREEN}")),
            "crashed after its tests: exit status: 139",
        );
        let end = End::TimedOut(Duration::from_secs(1));
        fails(tally_of(end, GREEN, Notes::default()), "killed: still running");
    }
}
