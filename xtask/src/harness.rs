//! Reads what `cargo test` prints: libtest's lines, which libtest-mimic prints too, and cargo's around them.

use std::collections::BTreeMap;
use std::fmt;

use crate::skips::Skip;

/// How many lines of what a failed test printed are shown again in the summary.
const SHOWN_AGAIN: usize = 12;

/// What the tests of one step came to.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// How many tests passed.
    pub(crate) passed: usize,
    /// One entry per failed test, or per test program that ended without a result.
    pub(crate) failures: Vec<Failure>,
    /// Tests that failed beside others and passed alone; they count as passed.
    pub(crate) unsteady: Vec<Failure>,
    /// One entry per skipped test.
    pub(crate) skips: Vec<Skip>,
}

/// Something that failed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Failure {
    /// What failed, and the command that repeats it.
    what: String,
    /// The last lines that the test printed.
    said: String,
    /// For a test with a name: the arguments with which cargo runs it and no other.
    pub(crate) alone: Option<Vec<String>>,
}

impl From<String> for Failure {
    fn from(what: String) -> Failure {
        Failure { what, ..Failure::default() }
    }
}

impl Failure {
    /// A test that failed, in the program that `again` runs.
    pub(crate) fn of_test(name: &str, again: &str, said: &str) -> Failure {
        let alone = again
            .strip_prefix("cargo ")
            .map(|line| line.split(' ').chain(["--", "--exact", name]).map(str::to_owned).collect());
        Failure { what: format!("{name} ({again})"), said: said.to_owned(), alone }
    }

    /// The same, in the step of this name.
    pub(crate) fn of_step(self, step: &str) -> Failure {
        Failure { what: format!("{step}: {}", self.what), ..self }
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

/// One test program, between cargo's `Running` or `Doc-tests` and the next.
#[derive(Default)]
struct Program {
    /// How cargo announced it.
    title: String,
    counts: Counts,
    has_result: bool,
    passed: Vec<String>,
    failed: Vec<String>,
    ignored: Vec<Skip>,
    /// What failed tests printed, by name.
    said: BTreeMap<String, Vec<String>>,
    /// The command that runs it again, which cargo prints when it failed.
    again: Option<String>,
}

/// Sums up the `output` of a `cargo test` that exited with 0 or did not, and the skips that its tests `told`.
pub(crate) fn read(output: &str, succeeded: bool, told: Vec<Skip>) -> Tally {
    let programs = programs(output);
    let mut tally = Tally::default();
    let mut passed_names = Vec::new();
    let mut ignored = Vec::new();
    for mut program in programs {
        let again = program.again.as_deref().unwrap_or(&program.title).to_owned();
        tally.passed += program.counts.passed;
        if program.has_result && program.counts.failed == 0 {
            program.failed.clear(); // what looked like a name in what a test printed
        }
        let failed = program.failed.iter().map(|name| {
            let said = program.said.get(name).map(Vec::as_slice).unwrap_or_default();
            Failure::of_test(name, &again, &said[said.len().saturating_sub(SHOWN_AGAIN)..].join("\n"))
        });
        tally.failures.extend(failed);
        if program.has_result {
            let nameless = program.counts.failed.saturating_sub(program.failed.len());
            tally.failures.extend((0..nameless).map(|_| Failure::from(format!("a test ({again})"))));
            if program.again.is_some() && program.counts.failed == 0 {
                tally.failures.push(Failure::from(format!("crashed after its tests ({again})")));
            }
        } else if succeeded {
            // A harness of its own, which passes by its exit status.
            tally.passed += 1;
        } else {
            // A program that crashed or was killed.
            tally.failures.push(Failure::from(format!("ended without a result ({again})")));
        }
        program.ignored.resize(program.counts.ignored, Skip::new(&again, "ignored"));
        passed_names.extend(program.passed);
        ignored.extend(program.ignored);
    }
    for skip in told {
        // The harness counted a test that skips itself by returning early as passed, or as ignored.
        if let Some(at) = ignored.iter().position(|known: &Skip| skip.is_of(&known.name)) {
            ignored.swap_remove(at);
        } else if let Some(at) = passed_names.iter().position(|name: &String| skip.is_of(name)) {
            passed_names.swap_remove(at);
            tally.passed -= 1;
        }
        tally.skips.push(skip);
    }
    tally.skips.extend(ignored);
    tally
}

fn programs(output: &str) -> Vec<Program> {
    let mut programs: Vec<Program> = Vec::new();
    // The test whose words come, between its headline and the next, its backtrace or the list of names.
    let mut speaker: Option<String> = None;
    for line in output.lines() {
        let line = plain(line);
        if let Some(title) = program_title(&line) {
            programs.push(Program { title: title.to_owned(), ..Program::default() });
            speaker = None;
            continue;
        }
        let Some(program) = programs.last_mut() else { continue };
        if let Some(name) = headline(&line) {
            // Its verdict may stand behind something that another process printed into the line.
            if !program.failed.iter().any(|known| known == name) {
                program.failed.push(name.to_owned());
            }
            speaker = Some(name.to_owned());
        } else if line == "failures:" || line == "stack backtrace:" {
            speaker = None;
        } else if let Some(counts) = counts(&line) {
            speaker = None;
            // One program prints several such lines when rustdoc runs merged and single documentation tests.
            program.has_result = true;
            program.counts.passed += counts.passed;
            program.counts.failed += counts.failed;
            program.counts.ignored += counts.ignored;
        } else if let Some((name, verdict)) = verdict(&line) {
            match verdict.split_once(", ").unwrap_or((verdict, "")) {
                ("ok", _) => program.passed.push(name.to_owned()),
                ("FAILED", _) => program.failed.push(name.to_owned()),
                ("ignored", reason) => {
                    let reason = if reason.is_empty() { "ignored" } else { reason };
                    program.ignored.push(Skip::new(name, reason));
                }
                _ => {}
            }
        } else if let Some((_, arguments)) = line.split_once("failed, to rerun pass `") {
            program.again = Some(format!("cargo test {}", arguments.trim_end_matches('`')));
        } else if let Some(name) = &speaker
            && !line.trim().is_empty()
        {
            program.said.entry(name.clone()).or_default().push(line);
        }
    }
    programs
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

/// `Running tests/x.rs (target/debug/deps/x-0123)` or `Doc-tests kvx_core`.
fn program_title(line: &str) -> Option<&str> {
    let line = line.trim();
    let running = line.strip_prefix("Running ").filter(|rest| rest.contains("/deps/") && rest.ends_with(')'));
    running.or_else(|| line.starts_with("Doc-tests ").then_some(line))
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

    const GREEN: &str = "\
   Compiling kvx-core v0.1.0
     Running unittests src/lib.rs (target/debug/deps/kvx_core-0a1b)

running 3 tests
test grid::merges ... ok
test pool::huge_pages ... ok
test gpu::reads ... ignored, no GPU [cannot run here]; cure: another machine
test grid::refuses - should panic ... ok

test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/conformance.rs (target/debug/deps/conformance-2c3d)

running 2 tests
test [SHM] read          ... ok
test [TCP] notify_order  ... ignored

test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 1.25s

   Doc-tests kvx_core

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.30s

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn result_lines_are_summed_up() {
        let tally = read(GREEN, true, Vec::new());
        assert_eq!(tally.passed, 7);
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
        let tally = read(GREEN, true, told.clone());
        assert_eq!(tally.passed, 6);
        assert_eq!(tally.skips[..3], told);
        assert_eq!(tally.skips.len(), 4, "and the test that is ignored without a word");
    }

    #[test]
    fn failures_are_named_with_the_command_that_repeats_them() {
        let output = "\
     Running tests/tcp.rs (target/debug/deps/tcp-0a1b)
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

error: test failed, to rerun pass `-p kvx-native --test tcp`
     Running tests/shm.rs (target/debug/deps/shm-0a1b)
test read ... ok
error: test failed, to rerun pass `-p kvx-native --test shm`
     Running tests/end.rs (target/debug/deps/end-0a1b)
---- nobody ----
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
error: test failed, to rerun pass `-p kvx-native --test end`

Caused by:
  process didn't exit successfully: `target/debug/deps/shm-0a1b` (signal: 11, SIGSEGV: invalid memory reference)
";
        let tally = read(output, false, Vec::new());
        assert_eq!(tally.passed, 5);
        let failures: Vec<_> = tally.failures.iter().map(Failure::to_string).collect();
        assert_eq!(
            failures,
            [
                "frames (cargo test -p kvx-native --test tcp)\n    | 1 is not 2",
                "keys (cargo test -p kvx-native --test tcp)\n    | no key",
                "ended without a result (cargo test -p kvx-native --test shm)",
                "crashed after its tests (cargo test -p kvx-native --test end)",
            ]
        );
        let alone = tally.failures[1].alone.as_ref().expect("a test that has a name runs alone");
        assert_eq!(alone.join(" "), "test -p kvx-native --test tcp -- --exact keys");
        assert_eq!(tally.failures[2].alone, None);
    }

    #[test]
    fn what_ran_is_known_without_cargo() {
        assert_eq!(ran(GREEN), (7, 0));
        assert_eq!(ran("SKIP a: b; cure: c\nall is well\n"), (0, 1));
    }

    #[test]
    fn a_program_without_a_harness_counts_by_its_exit_status() {
        let output = "     Running tests/plain.rs (target/debug/deps/plain-0a1b)\nall is well\n";
        assert_eq!(read(output, true, Vec::new()).passed, 1);
        let tally = read(output, false, Vec::new());
        assert_eq!((tally.passed, tally.failures.len()), (0, 1));
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
