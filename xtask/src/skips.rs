//! Skips: tests that could not run here and say so; and variants of suites that a tier leaves out and that say so too.
//!
//! # The format
//!
//! `cargo xtask test` sets the variable `KVX_SKIPS` to the path of a file for every step and test program. A test that
//! skips appends one line to it, in one `write` call on a file opened for appending (several processes share the file),
//! and a program that leaves something to the whole run one of the second form:
//!
//! ```text
//! SKIP <test name>: <reason>; cure: <what to do>
//! WHOLE <what `--whole` adds>
//! ```
//!
//! The name ends at the first `": "` and may itself contain `::`; it is the name that the test harness prints, or its
//! last part. Reason and cure hold no line break. A reason with the marker `[cannot run here]` says that no package or
//! setting of this machine makes the test run (there is no GPU): `--require all` lets it pass. Without the variable a
//! test prints the same line and is done. A file is used because test harnesses swallow what a passing test prints.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, Write as _};
use std::path::Path;

/// The variable that names the file which tests append their skips to.
pub(crate) const VARIABLE: &str = "KVX_SKIPS";

/// In a reason: no cure on this machine.
const CANNOT_RUN_HERE: &str = "[cannot run here]";

/// A test that did not run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Skip {
    /// The test.
    pub(crate) name: String,
    /// Why it did not run.
    pub(crate) reason: String,
    /// What makes it run.
    pub(crate) cure: String,
}

impl Skip {
    /// A skip from a reason that may carry its cure behind `; cure: `.
    pub(crate) fn new(name: &str, reason: &str) -> Skip {
        let (reason, cure) = reason.rsplit_once("; cure: ").unwrap_or((reason, "none given"));
        Skip { name: name.trim().to_owned(), reason: reason.trim().to_owned(), cure: cure.trim().to_owned() }
    }

    /// Whether the test could run on this machine if the cure were followed.
    pub(crate) fn can_run_here(&self) -> bool {
        !self.reason.contains(CANNOT_RUN_HERE)
    }

    /// Whether a harness means this skip's test by `name`: either may leave out the leading modules.
    pub(crate) fn is_of(&self, name: &str) -> bool {
        let ends = |long: &str, short: &str| {
            long.strip_suffix(short).is_some_and(|before| before.is_empty() || before.ends_with("::"))
        };
        ends(name, &self.name) || ends(&self.name, name)
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; cure: {}", self.name, self.reason, self.cure)
    }
}

/// What begins a line about what the whole run adds.
const WHOLE: &str = "WHOLE ";

/// The skips in the text of such a file. A line of another form is a skip too: nothing is lost by a typing error.
fn parse(text: &str) -> Vec<Skip> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(WHOLE));
    lines
        .map(|line| match line.strip_prefix("SKIP ").and_then(|rest| rest.split_once(": ")) {
            Some((name, reason)) => Skip::new(name, reason),
            None => Skip::new(line, "not a line of the form `SKIP <test>: <reason>; cure: <what to do>`"),
        })
        .collect()
}

/// Empties the file at `path`, creating its folder.
pub(crate) fn clear(path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, "")
}

/// Tells of a skip as a test does: on standard error, and in the file that the variable names.
pub(crate) fn note(skip: &Skip) -> io::Result<()> {
    let line = format!("SKIP {skip}\n");
    eprint!("{line}");
    match std::env::var_os(VARIABLE) {
        Some(path) => {
            std::fs::OpenOptions::new().append(true).create(true).open(path)?.write_all(line.as_bytes())
        }
        None => Ok(()),
    }
}

/// The skips in the file at `path`.
pub(crate) fn read(path: &Path) -> io::Result<Vec<Skip>> {
    Ok(parse(&String::from_utf8_lossy(&std::fs::read(path)?)))
}

/// What the whole run adds, each once, by the file at `path`.
pub(crate) fn left_to_the_whole(path: &Path) -> io::Result<BTreeSet<String>> {
    let text = std::fs::read_to_string(path)?;
    Ok(text.lines().filter_map(|line| line.strip_prefix(WHOLE)).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_name_a_reason_and_a_cure() {
        let text = "SKIP shm::huge_pages: no huge pages: 0 of 8 free; cure: sysctl vm.nr_hugepages=8\n\
                    SKIP gpu: no GPU [cannot run here]; cure: another machine\n\
                    WHOLE UCX 1.13\n";
        let skips = parse(text);
        assert_eq!(skips.len(), 2);
        assert_eq!(skips[0].name, "shm::huge_pages");
        assert_eq!(skips[0].reason, "no huge pages: 0 of 8 free");
        assert_eq!(skips[0].cure, "sysctl vm.nr_hugepages=8");
        assert!(skips[0].can_run_here());
        assert!(!skips[1].can_run_here());
        assert_eq!(format!("SKIP {}", skips[1]), text.lines().nth(1).unwrap());
    }

    #[test]
    fn a_line_of_another_form_still_counts() {
        let skips = parse("SKIP nothing else\n\nwhatever\nSKIP a: b\n");
        assert_eq!(skips.len(), 3);
        assert!(skips[0].reason.contains("form") && skips[1].reason.contains("form"));
        assert!(skips.iter().all(Skip::can_run_here));
        assert_eq!(skips[2], Skip::new("a", "b; cure: none given"));
    }

    #[test]
    fn names_match_with_and_without_modules() {
        let skip = Skip::new("faults::no_route", "x");
        assert!(
            skip.is_of("faults::no_route") && skip.is_of("no_route") && skip.is_of("tests::faults::no_route")
        );
        assert!(!skip.is_of("route") && !skip.is_of("other::no_route") && !skip.is_of("no_route_2"));
    }
}
