//! The ledger of tests that failed beside others and passed alone: `xtask/unsteady.txt`.
//!
//! A second look excuses a test in this run and no longer: it stands in the ledger from then on, with what it said,
//! until somebody has found why. Paragraphs of lines `key: value`, an empty line between them; lines that begin with
//! `#` are for people. A run adds what is new. `mended` becomes the day and what mended it; a test that is seen again
//! after that has failed.

use std::path::PathBuf;

use crate::Result;
use crate::harness::{Failure, Tally};

/// A test that was excused once.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    /// Its name.
    test: String,
    /// Its program, as `cargo test` takes it.
    program: String,
    /// Why it failed, or what it said while nobody knows.
    cause: String,
    /// What mended it; `None` while nothing did.
    mended: Option<String>,
}

/// The ledger.
pub(crate) struct Ledger {
    file: PathBuf,
    text: String,
    entries: Vec<Entry>,
}

impl Ledger {
    /// Reads the ledger of this repository.
    pub(crate) fn load() -> Result<Ledger> {
        Ledger::of(concat!(env!("CARGO_MANIFEST_DIR"), "/unsteady.txt").into())
    }

    fn of(file: PathBuf) -> Result<Ledger> {
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let entries = parse(&text).map_err(|wrong| format!("{}: {wrong}", file.display()))?;
        Ok(Ledger { file, text, entries })
    }

    /// Enters what a second look has excused. What is marked as mended becomes a failure.
    pub(crate) fn enter(&mut self, tally: &mut Tally) -> Result<()> {
        for failure in std::mem::take(&mut tally.unsteady) {
            match self.known(&failure).map(|entry| &entry.mended) {
                Some(Some(mended)) => {
                    tally.passed -= 1;
                    tally.failures.push(failure.after(&format!("seen again, though mended ({mended})")));
                }
                Some(None) => tally.unsteady.push(failure),
                None => {
                    self.add(&failure)?;
                    tally.unsteady.push(failure);
                }
            }
        }
        Ok(())
    }

    fn known(&self, failure: &Failure) -> Option<&Entry> {
        let test = failure.test.as_ref()?;
        self.entries.iter().find(|entry| entry.test == test.name && entry.program == test.program.title)
    }

    fn add(&mut self, failure: &Failure) -> Result<()> {
        let Some(test) = &failure.test else { return Ok(()) };
        let said = failure.said.lines().map(str::trim).find(|line| !line.is_empty());
        let entry = Entry {
            test: test.name.clone(),
            program: test.program.title.clone(),
            cause: format!("not known yet; it said: {}", said.unwrap_or("nothing")),
            mended: None,
        };
        let Entry { test, program, cause, .. } = &entry;
        self.text.push_str(&format!("\ntest: {test}\nprogram: {program}\ncause: {cause}\nmended: no\n"));
        std::fs::write(&self.file, &self.text)?;
        self.entries.push(entry);
        Ok(())
    }
}

fn parse(text: &str) -> std::result::Result<Vec<Entry>, String> {
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let paragraphs = lines.split(|line| line.trim().is_empty()).filter(|lines| !lines.is_empty());
    paragraphs
        .map(|lines| entry(lines).ok_or_else(|| lines.join(" / ")))
        .collect::<std::result::Result<_, _>>()
        .map_err(|wrong| format!("not an entry of the four lines test, program, cause, mended: {wrong}"))
}

fn entry(lines: &[&str]) -> Option<Entry> {
    let [test, program, cause, mended] = lines else { return None };
    let value = |line: &str, key: &str| {
        let value = line.strip_prefix(key)?.strip_prefix(": ")?.trim();
        (!value.is_empty()).then(|| value.to_owned())
    };
    let mended = value(mended, "mended")?;
    Some(Entry {
        test: value(test, "test")?,
        program: value(program, "program")?,
        cause: value(cause, "cause")?,
        mended: (mended != "no").then_some(mended),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test::programs::TestProgram;

    const TEXT: &str = "\
# For people.

test: known
program: -p tcp --lib
cause: a race in the test
mended: no

test: mended
program: -p tcp --lib
cause: a port
mended: 2026-11-23, asks the kernel for one
";

    fn excused(name: &str) -> Tally {
        let failure =
            Failure::of_test(name, &TestProgram::of_nothing("-p tcp --lib"), "\n  1 is not 2\nmore");
        Tally { passed: 1, unsteady: vec![failure], ..Tally::default() }
    }

    #[test]
    fn what_is_new_is_written_down_and_what_was_mended_fails() {
        let file = std::env::temp_dir().join(format!("kvx-xtask-ledger-{}", std::process::id()));
        std::fs::write(&file, TEXT).unwrap();
        let mut ledger = Ledger::of(file.clone()).unwrap();
        for name in ["known", "new", "new"] {
            let mut tally = excused(name);
            ledger.enter(&mut tally).unwrap();
            assert_eq!((tally.passed, tally.unsteady.len(), tally.failures.len()), (1, 1, 0), "{name}");
        }
        let mut tally = excused("mended");
        ledger.enter(&mut tally).unwrap();
        assert_eq!((tally.passed, tally.unsteady.len(), tally.failures.len()), (0, 0, 1));
        assert!(tally.failures[0].to_string().contains("asks the kernel for one"));
        let written = std::fs::read_to_string(&file).unwrap();
        let new =
            "\ntest: new\nprogram: -p tcp --lib\ncause: not known yet; it said: 1 is not 2\nmended: no\n";
        assert_eq!(written, format!("{TEXT}{new}"));
        assert_eq!(Ledger::of(file.clone()).unwrap().entries, ledger.entries);
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn an_entry_with_a_line_missing_is_an_error() {
        assert!(parse("test: a\nprogram: b\ncause: c\n").unwrap_err().contains("test: a"));
        assert!(parse("test: a\nprogram: b\ncause: \nmended: no\n").is_err());
    }

    #[test]
    fn the_ledger_of_this_repository_can_be_read() {
        Ledger::load().unwrap();
    }
}
