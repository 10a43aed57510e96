//! Reads what a test program prints: libtest's lines, which libtest-mimic prints too.

use std::collections::BTreeMap;
use std::fmt;

use crate::process::{End, Finished};
use crate::skips::{Notes, Skip, is_same_test};
use crate::test::programs::TestProgram;

/// How many lines of what a failed test printed are shown again in the summary.
const SHOWN_AGAIN: usize = 12;

/// What the tests of a program, or of a step, came to.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// How many tests passed.
    pub(crate) passed: usize,
    /// One entry per failed test, or for a test program that ended without a result.
    pub(crate) failures: Vec<Failure>,
    /// Tests that failed beside others and passed alone; they count as neither passed nor failed.
    pub(crate) excused: Vec<Failure>,
    /// Trials in which a backend broke a clause as its list of gaps says.
    pub(crate) gaps: Vec<String>,
    /// One entry per skipped test.
    pub(crate) skips: Vec<Skip>,
}

impl Tally {
    /// Adds those of another program.
    pub(crate) fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failures.extend(other.failures);
        self.excused.extend(other.excused);
        self.gaps.extend(other.gaps);
        self.skips.extend(other.skips);
    }
}

/// Something that failed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Failure {
    /// What failed, and the command that repeats it.
    what: String,
    /// The last lines that the test printed.
    pub(crate) said: String,
    /// A test with a name, which can be run alone.
    pub(crate) test: Option<Test>,
}

/// A test, and the program that it is one of.
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
    /// A test that failed, and what it said.
    pub(crate) fn of_test(name: &str, program: &TestProgram, said: &str) -> Failure {
        let test = Test { name: name.to_owned(), program: program.clone() };
        let what = format!("{name} (cargo test {})", program.shown());
        Failure { what, said: said.to_owned(), test: Some(test) }
    }

    /// What a program of tests did instead of telling of its tests.
    pub(crate) fn of_program(program: &TestProgram, what: &str) -> Failure {
        Failure::from(format!("{what} (cargo test {})", program.shown()))
    }

    /// The same, after these words: its step, or why it has failed.
    pub(crate) fn after(self, words: &str) -> Failure {
        Failure { what: format!("{words}: {}", self.what), ..self }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        self.said.lines().try_for_each(|line| write!(f, "\n    | {line}"))
    }
}

/// The counts of one `test result:` line.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    passed: usize,
    failed: usize,
    ignored: usize,
}

/// How many tests passed and were skipped in the `output` of one test program, or of several in a row.
pub(crate) fn ran(output: &str) -> (usize, usize) {
    let passed = output.lines().filter_map(|line| counts(&plain(line))).map(|counts| counts.passed).sum();
    (passed, output.lines().filter(|line| line.starts_with("SKIP ")).count())
}

/// What one test program printed.
#[derive(Default)]
struct Said {
    counts: Counts,
    has_result: bool,
    passed: Vec<String>,
    failed: Vec<String>,
    ignored: Vec<Skip>,
    /// What failed tests printed, by name.
    of: BTreeMap<String, Vec<String>>,
}

/// Sums up the output of a test program that ended in this way, and what its tests noted.
pub(crate) fn read(program: &TestProgram, finished: &Finished, notes: Notes) -> Tally {
    let mut said = said(&finished.output);
    let mut tally = Tally { passed: said.counts.passed, ..Tally::default() };
    if said.has_result && said.counts.failed == 0 {
        said.failed.clear(); // what looked like a name in what a test printed
    }
    for name in &said.failed {
        let lines = said.of.get(name).map(Vec::as_slice).unwrap_or_default();
        let lines = lines[lines.len().saturating_sub(SHOWN_AGAIN)..].join("\n");
        tally.failures.push(Failure::of_test(name, program, &lines));
    }
    let nameless = said.counts.failed.saturating_sub(said.failed.len());
    tally.failures.extend((0..nameless).map(|_| Failure::of_program(program, "a test without a name")));
    if let End::TimedOut(_) = finished.end {
        tally.failures.push(Failure::of_program(program, &finished.end.to_string()));
    } else if said.has_result && !finished.succeeded() && said.counts.failed == 0 {
        tally
            .failures
            .push(Failure::of_program(program, &format!("crashed after its tests: {}", finished.end)));
    } else if !said.has_result && !finished.succeeded() {
        tally
            .failures
            .push(Failure::of_program(program, &format!("ended without a result: {}", finished.end)));
    } else if !said.has_result {
        // A program of its own kind, which passes by its exit status.
        tally.passed += 1;
    }
    said.ignored.resize(said.counts.ignored, Skip::new(&program.title, "ignored"));
    // The harness has counted a test that notes something about itself as ignored, or as passed.
    let mut uncount = |noted: &str| {
        if let Some(at) = said.ignored.iter().position(|known| is_same_test(&known.name, noted)) {
            said.ignored.swap_remove(at);
        } else if let Some(at) = said.passed.iter().position(|name| is_same_test(name, noted)) {
            said.passed.swap_remove(at);
            tally.passed -= 1;
        }
    };
    notes.skips.iter().for_each(|skip| uncount(&skip.name));
    notes.gaps.iter().for_each(|test| uncount(test));
    tally.skips.extend(notes.skips);
    tally.gaps = notes.gaps;
    tally.skips.extend(said.ignored);
    tally
}

fn said(output: &str) -> Said {
    let mut said = Said::default();
    // The test whose words come, between its headline and the next, its backtrace or the list of names.
    let mut speaker: Option<String> = None;
    for line in output.lines() {
        let line = plain(line);
        if let Some(name) = headline(&line) {
            // Its verdict may stand behind something that another process printed into the line.
            if !said.failed.iter().any(|known| known == name) {
                said.failed.push(name.to_owned());
            }
            speaker = Some(name.to_owned());
        } else if line == "failures:" || line == "stack backtrace:" {
            speaker = None;
        } else if let Some(counts) = counts(&line) {
            speaker = None;
            // A program that starts itself again prints several such lines, and so does rustdoc.
            said.has_result = true;
            said.counts.passed += counts.passed;
            said.counts.failed += counts.failed;
            said.counts.ignored += counts.ignored;
        } else if let Some((name, verdict)) = verdict(&line) {
            match verdict.split_once(", ").unwrap_or((verdict, "")) {
                ("ok", _) => said.passed.push(name.to_owned()),
                ("FAILED", _) => said.failed.push(name.to_owned()),
                ("ignored", reason) => {
                    let reason = if reason.is_empty() { "ignored" } else { reason };
                    said.ignored.push(Skip::new(name, reason));
                }
                _ => {}
            }
        } else if let Some(name) = &speaker
            && !line.trim().is_empty()
        {
            said.of.entry(name.clone()).or_default().push(line);
        }
    }
    said
}

/// `line` without the escape sequences that colour it.
fn plain(line: &str) -> String {
    let mut pieces = line.split('\x1b');
    let mut plain = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        // A sequence ends with its first letter; `ESC ( B` is the one of three characters.
        let rest =
            piece.strip_prefix("(B").or_else(|| piece.split_once(char::is_alphabetic).map(|(_, rest)| rest));
        plain.push_str(rest.unwrap_or_default());
    }
    plain
}

/// `---- name ----` as libtest-mimic prints it above what a failed test said, `---- name stdout ----` as libtest does.
fn headline(line: &str) -> Option<&str> {
    let name = line.strip_prefix("---- ")?.strip_suffix(" ----")?;
    Some(name.strip_suffix(" stdout").unwrap_or(name))
}

/// `test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.00s`
fn counts(line: &str) -> Option<Counts> {
    let (_, list) = line.trim().strip_prefix("test result: ")?.split_once(". ")?;
    let count = |word: &str| {
        let mut entries = list.split("; ");
        entries.find_map(|entry| entry.trim().strip_suffix(word)?.trim().parse().ok())
    };
    Some(Counts { passed: count("passed")?, failed: count("failed")?, ignored: count("ignored")? })
}

/// `test name ... ok`, also padded, with a kind in brackets, or with `- should panic`.
fn verdict(line: &str) -> Option<(&str, &str)> {
    let (name, verdict) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let name = name.trim();
    let name = name.strip_prefix('[').and_then(|rest| rest.split_once("] ")).map_or(name, |(_, name)| name);
    let kinds = [" - should panic", " - compile fail", " - compile"];
    let plain = kinds.iter().find_map(|kind| name.strip_suffix(kind));
    Some((plain.unwrap_or(name), verdict.trim()))
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
test [TCP] notify_order  ... ignored

test result: ok. 3 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.00s

running 1 test
test [SHM] read          ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1.25s
";

    fn ended(code: i32, output: &str) -> Finished {
        Finished { end: End::Exited(ExitStatus::from_raw(code << 8)), output: output.to_owned() }
    }

    fn tally(finished: &Finished, skips: Vec<Skip>) -> Tally {
        let notes = Notes { skips, ..Notes::default() };
        read(&TestProgram::of_nothing("-p tcp --lib"), finished, notes)
    }

    fn failures(tally: &Tally) -> Vec<String> {
        tally.failures.iter().map(Failure::to_string).collect()
    }

    #[test]
    fn result_lines_are_summed_up() {
        let tally = tally(&ended(0, GREEN), Vec::new());
        assert_eq!(tally.passed, 4);
        assert!(tally.failures.is_empty());
        assert_eq!(tally.skips.len(), 2);
        assert_eq!(tally.skips[0].name, "gpu::reads");
        assert_eq!(tally.skips[0].cure, "another machine");
        assert!(!tally.skips[0].can_run_here());
        assert_eq!(tally.skips[1], Skip::new("notify_order", "ignored"));
    }

    #[test]
    fn a_skip_that_a_test_tells_is_not_counted_as_passed_or_twice() {
        let told = vec![
            Skip::new("huge_pages", "none reserved; cure: reserve some"),
            Skip::new("notify_order", "TCP is ordered; cure: none needed"),
            Skip::new("half_a_test", "no network namespaces; cure: run as root"),
        ];
        let tally = tally(&ended(0, GREEN), told.clone());
        assert_eq!(tally.passed, 3);
        assert_eq!(tally.skips[..3], told);
        assert_eq!(tally.skips.len(), 4, "and the test that is ignored without a word");
    }

    #[test]
    fn a_known_gap_is_neither_passed_nor_skipped() {
        let output = "test UCX::P9 ... ignored, known gap: x\ntest UCX::P1 ... ok\n\n\
                      test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out\n";
        let notes = Notes { gaps: vec!["UCX::P9".to_owned()], ..Notes::default() };
        let tally = read(&TestProgram::of_nothing("-p ucx --test it"), &ended(0, output), notes);
        assert_eq!((tally.passed, tally.skips.len(), tally.gaps.len()), (1, 0, 1));
    }

    #[test]
    fn failures_are_named_with_the_command_that_repeats_them() {
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

test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
";
        let tally = tally(&ended(101, output), Vec::new());
        assert_eq!(tally.passed, 4);
        assert_eq!(
            failures(&tally),
            [
                "frames (cargo test -p tcp --lib)\n    | 1 is not 2",
                "keys (cargo test -p tcp --lib)\n    | no key"
            ]
        );
        assert_eq!(tally.failures[1].test.as_ref().map(|test| test.name.as_str()), Some("keys"));
    }

    #[test]
    fn a_program_that_crashes_or_hangs_failed_whatever_its_tests_did() {
        let crashed = tally(&ended(134, "test read ... ok\n"), Vec::new());
        assert_eq!(
            failures(&crashed),
            ["ended without a result: exit status: 134 (cargo test -p tcp --lib)"]
        );
        let late = tally(&ended(139, &format!("---- nobody ----\n{GREEN}")), Vec::new());
        assert_eq!(failures(&late), ["crashed after its tests: exit status: 139 (cargo test -p tcp --lib)"]);
        assert_eq!(late.passed, 4);
        let end = End::TimedOut(Duration::from_secs(1));
        let hung = tally(&Finished { end, output: GREEN.to_owned() }, Vec::new());
        assert!(failures(&hung)[0].contains("still running") && hung.failures.len() == 1);
        assert!(hung.failures[0].test.is_none(), "nothing is looked at again");
    }

    #[test]
    fn what_ran_is_known() {
        assert_eq!(ran(GREEN), (4, 0));
        assert_eq!(ran("SKIP a: b; cure: c\nall is well\n"), (0, 1));
    }

    #[test]
    fn a_program_without_a_harness_counts_by_its_exit_status() {
        assert_eq!(tally(&ended(0, "all is well\n"), Vec::new()).passed, 1);
        let failed = tally(&ended(1, "all is well\n"), Vec::new());
        assert_eq!((failed.passed, failed.failures.len()), (0, 1));
    }

    #[test]
    fn counts_are_read_through_colours_and_nothing_else_looks_like_them() {
        let coloured =
            plain("test result: \x1b[32mok\x1b(B\x1b[m. 5 passed; 0 failed; 2 ignored; 0 measured");
        assert_eq!(counts(&coloured), Some(Counts { passed: 5, failed: 0, ignored: 2 }));
        for line in
            ["test result: ok", "test results: ok. 1 passed; 0 failed; 0 ignored", "5 passed; 0 failed"]
        {
            assert_eq!(counts(line), None, "{line}");
        }
    }
}
