//! Notes of tests: skips, known gaps of backends, and parts that a tier omits.
//!
//! # The format
//!
//! `cargo xtask test` sets the variable `KVX_SKIPS` to the path of a file for every step and test
//! program. Tests append lines to it, each in one `write` call on a file opened for appending
//! (several processes share the file):
//!
//! ```text
//! SKIP <test name>: <reason>; cure: <what to do>
//! GAP <test name>: <reason>
//! WHOLE <what `--whole` adds>
//! ```
//!
//! The name ends at the first `": "` and may itself contain `::`; it is the name that the test
//! harness prints, or its last part. Reason and cure contain no line break. A reason with the
//! marker `[cannot run here]` says that no package or setting of this machine makes the test run
//! (there is no GPU): `--require all` accepts it. A file is used because test harnesses swallow the
//! output of passing tests.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, Write as _};
use std::path::Path;

/// The variable that names the file which tests append their skips to.
pub(crate) const VARIABLE: &str = "KVX_SKIPS";

/// A test that did not run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Skip {
    /// The test.
    pub(crate) name: String,
    /// The reason why the test did not run.
    pub(crate) reason: String,
    /// The remedy.
    pub(crate) cure: String,
}

impl Skip {
    /// Returns a skip, given a reason that may be followed by `; cure: ` and the cure.
    pub(crate) fn new(name: &str, reason: &str) -> Skip {
        let (reason, cure) = reason.rsplit_once("; cure: ").unwrap_or((reason, "none given"));
        Skip {
            name: name.trim().to_owned(),
            reason: reason.trim().to_owned(),
            cure: cure.trim().to_owned(),
        }
    }

    /// Returns whether the test could run on this machine after the cure.
    pub(crate) fn can_run_here(&self) -> bool {
        !self.reason.contains("[cannot run here]")
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; cure: {}", self.name, self.reason, self.cure)
    }
}

/// The notes of the tests of one program.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    pub(crate) skips: Vec<Skip>,
    /// Tests whose backend violated a clause as its list of gaps declares.
    pub(crate) gaps: Vec<String>,
    /// The parts that only the whole tier runs.
    pub(crate) left_to_the_whole: BTreeSet<String>,
}

/// Parses the notes in a file that tests append to. A line of another form is a skip too, so that a
/// typing error hides no skip.
fn parse(text: &str) -> Notes {
    let mut notes = Notes::default();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(what) = line.strip_prefix("WHOLE ") {
            notes.left_to_the_whole.insert(what.to_owned());
        } else if let Some((test, _)) =
            line.strip_prefix("GAP ").and_then(|rest| rest.split_once(": "))
        {
            notes.gaps.push(test.to_owned());
        } else {
            let skip = line.strip_prefix("SKIP ").and_then(|rest| rest.split_once(": "));
            let wrong = "not a line of the form `SKIP <test>: <reason>; cure: <what to do>`";
            notes.skips.push(
                skip.map_or_else(|| Skip::new(line, wrong), |(name, why)| Skip::new(name, why)),
            );
        }
    }
    notes
}

/// Returns whether two names mean the same test: either may leave out the leading modules.
pub(crate) fn is_same_test(one: &str, other: &str) -> bool {
    let ends = |long: &str, short: &str| {
        long.strip_suffix(short).is_some_and(|before| before.is_empty() || before.ends_with("::"))
    };
    ends(one, other) || ends(other, one)
}

/// Empties the file at `path`, creating its folder.
pub(crate) fn clear(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, "")
}

/// Reports a skip in the way that tests do: on standard error, and in the file that the variable
/// names.
pub(crate) fn note(name: &str, reason: &str, cure: &str) -> io::Result<()> {
    let line = format!("SKIP {name}: {reason}; cure: {cure}\n");
    eprint!("{line}");
    let Some(path) = std::env::var_os(VARIABLE) else { return Ok(()) };
    std::fs::OpenOptions::new().append(true).create(true).open(path)?.write_all(line.as_bytes())
}

/// Reads the file at `path`.
pub(crate) fn read(path: &Path) -> io::Result<Notes> {
    Ok(parse(&String::from_utf8_lossy(&std::fs::read(path)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_skips_gaps_and_parts_of_the_whole_tier() {
        let text = "SKIP shm::huge_pages: no huge pages: 0 of 8 free; cure: sysctl vm.nr_hugepages=8\n\
                    SKIP gpu: no GPU [cannot run here]; cure: another machine\n\
                    GAP UCX::two::P11_x: it stays in the queue\n\
                    WHOLE UCX 1.13\n\
                    whatever\nSKIP a: b\n";
        let Notes { skips, gaps, left_to_the_whole } = parse(text);
        let [name, reason, cure] = [&skips[0].name, &skips[0].reason, &skips[0].cure];
        assert_eq!(
            (name.as_str(), reason.as_str()),
            ("shm::huge_pages", "no huge pages: 0 of 8 free")
        );
        assert_eq!(cure, "sysctl vm.nr_hugepages=8");
        assert!(skips[0].can_run_here() && !skips[1].can_run_here());
        assert_eq!(format!("SKIP {}", skips[1]), text.lines().nth(1).unwrap());
        assert!(skips[2].reason.contains("form"));
        assert_eq!(skips[3], Skip::new("a", "b; cure: none given"));
        assert_eq!(
            (gaps[0].as_str(), left_to_the_whole),
            ("UCX::two::P11_x", ["UCX 1.13".to_owned()].into())
        );
    }

    #[test]
    fn names_match_with_and_without_modules() {
        let is = |name| is_same_test("faults::no_route", name);
        assert!(is("faults::no_route") && is("no_route") && is("tests::faults::no_route"));
        assert!(!is("route") && !is("other::no_route") && !is("no_route_2"));
    }
}
