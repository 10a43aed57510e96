//! The ledger of flaky tests: `xtask/flaky.txt`, the tests that failed beside others and passed alone.
//!
//! An excuse holds for one run. A test that was excused belongs into the ledger, with what it printed, until its cause
//! is found; the run prints the entry to commit. Entries are paragraphs of lines `key: value` with an empty line
//! between them; lines that begin with `#` are for people. `fixed` becomes the day and the fix; a test that is excused
//! again after that has failed.

use std::path::PathBuf;

use crate::Result;
use crate::harness::{Tally, Test};

/// A test that was excused once.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    /// Its name.
    test: String,
    /// Its program, as `cargo test` takes it.
    program: String,
    /// Why it failed, or what it said while nobody knows.
    cause: String,
    /// What fixed it; `None` while nothing did.
    fixed: Option<String>,
}

/// The ledger.
pub(crate) struct Ledger(Vec<Entry>);

impl Ledger {
    /// Reads the ledger of this repository.
    pub(crate) fn load() -> Result<Ledger> {
        Ledger::of(concat!(env!("CARGO_MANIFEST_DIR"), "/flaky.txt").into())
    }

    fn of(file: PathBuf) -> Result<Ledger> {
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(Ledger(parse(&text).map_err(|wrong| format!("{}: {wrong}", file.display()))?))
    }

    /// Turns excused tests that are marked as fixed into failures, and returns the entries to commit for new ones.
    pub(crate) fn review(&self, tally: &mut Tally) -> Vec<String> {
        let mut new = Vec::new();
        for failure in std::mem::take(&mut tally.excused) {
            let Some(test) = &failure.test else { continue };
            match self.0.iter().find(|entry| entry.test == test.name && entry.program == test.program.title) {
                Some(Entry { fixed: Some(fixed), .. }) => {
                    tally.failures.push(failure.after(&format!("failed again, though fixed ({fixed})")));
                    continue;
                }
                Some(_) => {}
                None => new.push(entry_for(test, &failure.said)),
            }
            tally.excused.push(failure);
        }
        new
    }
}

fn entry_for(test: &Test, printed: &str) -> String {
    let first = printed.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("nothing");
    let Test { name, program } = test;
    format!(
        "test: {name}\nprogram: {}\ncause: not known yet; it printed: {first}\nfixed: no\n",
        program.title
    )
}

fn parse(text: &str) -> std::result::Result<Vec<Entry>, String> {
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let paragraphs = lines.split(|line| line.trim().is_empty()).filter(|lines| !lines.is_empty());
    paragraphs
        .map(|lines| entry(lines).ok_or_else(|| lines.join(" / ")))
        .collect::<std::result::Result<_, _>>()
        .map_err(|wrong| format!("not an entry of the four lines test, program, cause, fixed: {wrong}"))
}

fn entry(lines: &[&str]) -> Option<Entry> {
    let [test, program, cause, fixed] = lines else { return None };
    let value = |line: &str, key: &str| {
        let value = line.strip_prefix(key)?.strip_prefix(": ")?.trim();
        (!value.is_empty()).then(|| value.to_owned())
    };
    let fixed = value(fixed, "fixed")?;
    Some(Entry {
        test: value(test, "test")?,
        program: value(program, "program")?,
        cause: value(cause, "cause")?,
        fixed: (fixed != "no").then_some(fixed),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Failure;
    use crate::test::programs::TestProgram;

    const TEXT: &str = "\
# For people.

test: known
program: -p tcp --lib
cause: a race in the test
fixed: no

test: fixed
program: -p tcp --lib
cause: a port
fixed: 2026-11-23, asks the kernel for one
";

    #[test]
    fn new_excuses_are_entries_to_commit_and_fixed_ones_fail() {
        let ledger = Ledger(parse(TEXT).unwrap());
        let review = |name: &str| {
            let program = TestProgram::of_nothing("-p tcp --lib");
            let failure = Failure::of_test(name, &program, "\n  1 is not 2\nmore");
            let mut tally = Tally { passed: 1, excused: vec![failure], ..Tally::default() };
            (ledger.review(&mut tally), tally)
        };
        let (entries, tally) = review("known");
        assert!(entries.is_empty() && tally.excused.len() == 1 && tally.passed == 1);
        let (entries, tally) = review("new");
        let wanted =
            "test: new\nprogram: -p tcp --lib\ncause: not known yet; it printed: 1 is not 2\nfixed: no\n";
        assert_eq!((entries[0].as_str(), tally.excused.len()), (wanted, 1));
        assert_eq!(parse(wanted).unwrap()[0].test, "new");
        let (entries, tally) = review("fixed");
        assert!(entries.is_empty() && tally.excused.is_empty());
        assert!(tally.failures[0].to_string().contains("asks the kernel for one"));
    }

    #[test]
    fn an_entry_with_a_line_missing_is_an_error() {
        assert!(parse("test: a\nprogram: b\ncause: c\n").unwrap_err().contains("test: a"));
        assert!(parse("test: a\nprogram: b\ncause: \nfixed: no\n").is_err());
    }

    #[test]
    fn the_ledger_of_this_repository_can_be_read() {
        Ledger::load().unwrap();
    }
}
