//! The ledger of flaky tests: `xtask/flaky.txt`, the tests that failed among others and passed
//! alone.
//!
//! A run prints the entry to commit for each excused test that the ledger does not have. Entries
//! are paragraphs of lines `key: value` with an empty line between them; lines that begin with `#`
//! are comments. `fixed` becomes the day and the fix; a test that is excused again after that has
//! failed.

use crate::Result;
use crate::harness::{Tally, Test};

/// A test that was excused once; `fixed` is `None` until it is fixed. The code does not read its
/// cause.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    test: String,
    program: String,
    fixed: Option<String>,
}

/// The ledger.
pub(crate) struct Ledger(Vec<Entry>);

impl Ledger {
    /// Reads the ledger of this repository.
    pub(crate) fn load() -> Result<Ledger> {
        let text = std::fs::read_to_string(crate::root().join("xtask/flaky.txt"))?;
        Ok(Ledger(parse(&text).map_err(|wrong| format!("xtask/flaky.txt: {wrong}"))?))
    }

    /// Turns excused tests that are marked as fixed into failures, and returns the entries to
    /// commit for new ones.
    pub(crate) fn review(&self, tally: &mut Tally) -> Vec<String> {
        let mut entries = Vec::new();
        for failure in std::mem::take(&mut tally.excused) {
            let Some(Test { name, program }) = &failure.test else { continue };
            let program = &program.title;
            let known =
                self.0.iter().find(|entry| entry.test == *name && entry.program == *program);
            if known.is_none() {
                let mut lines = failure.printed.lines().map(str::trim);
                let first = lines.find(|line| !line.is_empty()).unwrap_or("nothing");
                let cause = format!("not known yet; it printed: {first}");
                entries
                    .push(format!("test: {name}\nprogram: {program}\ncause: {cause}\nfixed: no\n"));
            }
            match known.and_then(|entry| entry.fixed.as_ref()) {
                Some(fixed) => {
                    tally
                        .failures
                        .push(failure.after(&format!("failed again, though fixed ({fixed})")));
                }
                None => tally.excused.push(failure),
            }
        }
        entries
    }
}

fn parse(text: &str) -> std::result::Result<Vec<Entry>, String> {
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let paragraphs = lines.split(|line| line.trim().is_empty()).filter(|lines| !lines.is_empty());
    paragraphs
        .map(|lines| entry(lines).ok_or_else(|| lines.join(" / ")))
        .collect::<std::result::Result<_, _>>()
        .map_err(|wrong| {
            format!("not an entry of the four lines test, program, cause, fixed: {wrong}")
        })
}

fn entry(lines: &[&str]) -> Option<Entry> {
    let value = |line: &str, key: &str| {
        let value = line.strip_prefix(key)?.strip_prefix(": ")?.trim();
        (!value.is_empty()).then(|| value.to_owned())
    };
    let [test, program, cause, fixed] = lines else { return None };
    value(cause, "cause")?;
    let fixed = Some(value(fixed, "fixed")?).filter(|fixed| fixed != "no");
    Some(Entry { test: value(test, "test")?, program: value(program, "program")?, fixed })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Failure;
    use crate::test::programs::TestProgram;

    const TEXT: &str = "\
# A comment.

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
            let program = TestProgram::named("-p tcp --lib");
            let failure = Failure::of_test(name, &program, "\n  1 is not 2\nmore");
            let mut tally = Tally { passed: 1, excused: vec![failure], ..Tally::default() };
            (ledger.review(&mut tally), tally)
        };
        let (entries, tally) = review("known");
        assert!(entries.is_empty() && tally.excused.len() == 1 && tally.passed == 1);
        let (entries, tally) = review("new");
        let wanted = "test: new\nprogram: -p tcp --lib\ncause: not known yet; it printed: 1 is not 2\nfixed: no\n";
        assert_eq!((entries[0].as_str(), tally.excused.len()), (wanted, 1));
        assert_eq!(parse(wanted).unwrap()[0].test, "new");
        let (entries, tally) = review("fixed");
        assert!(entries.is_empty() && tally.excused.is_empty());
        assert!(tally.failures[0].to_string().contains("asks the kernel for one"));
        assert!(
            parse("test: a\nprogram: b\ncause: c\n").unwrap_err().contains("test: a"),
            "incomplete"
        );
    }

    #[test]
    fn entries_of_this_repository_name_programs_that_exist() {
        let workspace = crate::metadata::Metadata::of_members().unwrap();
        for Entry { program, .. } in Ledger::load().unwrap().0 {
            let words: Vec<_> = program.split(' ').collect();
            let package = workspace.packages.iter().find(|package| package.name == words[1]);
            let package = package.unwrap_or_else(|| panic!("no package of {program}"));
            assert!(
                words
                    .get(3)
                    .is_none_or(|target| package.targets.iter().any(|it| it.name == *target)),
                "{program}"
            );
        }
    }
}
