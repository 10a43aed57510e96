//! Records tests that cannot run, both for the runner, which counts them, and for the end of a
//! plain `cargo test` program.

use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// A test that did not run, or a known gap that showed.
pub(crate) struct Note {
    /// The test's name, or its last part.
    pub(crate) test: String,
    /// The reason, with the cure.
    pub(crate) reason: String,
    pub(crate) kind: NoteKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoteKind {
    Skip,
    Gap,
}

/// Records that a test was skipped.
///
/// The program prints the skip at its end, and `cargo xtask test` counts it: it is the line
/// `SKIP <test>: <reason>; cure: <cure>` in the file that `KVX_SKIPS` names.
pub fn skip(test: &str, reason: &str, cure: &str) {
    record(NoteKind::Skip, test, &format!("{reason}; cure: {cure}"));
}

/// Records that a backend failed a test as a list of known gaps says: `GAP <test>: <reason>` in the
/// same file. The test counts as neither passed nor skipped.
pub fn gap_held(test: &str, reason: &str) {
    record(NoteKind::Gap, test, reason);
}

/// The text that the harness prints before the reason of a known gap.
pub(crate) const KNOWN_GAP: &str = "known gap: ";

/// Records why a test was ignored in another process, which has already reported it to the runner.
pub(crate) fn note_ignored(test: &str, reason: &str) {
    let (kind, reason) = match reason.strip_prefix(KNOWN_GAP) {
        Some(reason) => (NoteKind::Gap, reason),
        None => (NoteKind::Skip, reason),
    };
    remember(kind, test.to_owned(), reason.to_owned());
}

/// Returns the recorded reason why the test of this name did not pass, if there is one.
pub(crate) fn noted(test: &str) -> Option<(NoteKind, String)> {
    let notes = notes();
    let note = notes.iter().find(|note| is_same_test(test, &note.test))?;
    Some((note.kind, note.reason.clone()))
}

/// Returns whether two names refer to the same test: either may lack the leading modules.
fn is_same_test(one: &str, other: &str) -> bool {
    let ends_with = |long: &str, short: &str| {
        long.strip_suffix(short).is_some_and(|rest| rest.is_empty() || rest.ends_with("::"))
    };
    ends_with(one, other) || ends_with(other, one)
}

/// Appends a whole line to the file that `KVX_SKIPS` names, if it is set.
pub(crate) fn tell_runner(line: &str) {
    if let Some(path) = std::env::var_os("KVX_SKIPS") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        // One write, so that lines of several processes stay whole.
        file.and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("the file that KVX_SKIPS names is writable");
    }
}

fn record(kind: NoteKind, test: &str, reason: &str) {
    let one_line = |text: &str| text.lines().collect::<Vec<_>>().join(" ");
    let (test, reason) = (one_line(test), one_line(reason));
    let word = if kind == NoteKind::Skip { "SKIP" } else { "GAP" };
    tell_runner(&format!("{word} {test}: {reason}\n"));
    remember(kind, test, reason);
}

fn remember(kind: NoteKind, test: String, reason: String) {
    notes().push(Note { test, reason, kind });
    static AT_EXIT: Once = Once::new();
    // SAFETY: `list_at_exit` is a function without arguments, as `atexit` requires.
    AT_EXIT.call_once(|| _ = unsafe { libc::atexit(list_at_exit) });
}

fn notes() -> MutexGuard<'static, Vec<Note>> {
    static NOTES: Mutex<Vec<Note>> = Mutex::new(Vec::new());
    NOTES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints the skipped tests and the known gaps. The test harness does not capture this output.
extern "C" fn list_at_exit() {
    let notes = notes();
    let mut text = String::new();
    for (kind, title, word) in
        [(NoteKind::Skip, "skipped", "SKIP"), (NoteKind::Gap, "known gaps held", "GAP")]
    {
        let of_kind: Vec<_> = notes.iter().filter(|note| note.kind == kind).collect();
        if !of_kind.is_empty() {
            text += &format!("{} {title}:\n", of_kind.len());
            of_kind
                .iter()
                .for_each(|note| text += &format!("{word} {}: {}\n", note.test, note.reason));
        }
    }
    // The error means that standard error is already closed.
    std::io::stderr().write_all(text.as_bytes()).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_with_and_without_modules() {
        assert!(is_same_test("tcp::faults::cut", "cut") && is_same_test("cut", "tcp::faults::cut"));
        assert!(!is_same_test("tcp::faults::cut", "faults") && !is_same_test("shortcut", "cut"));
    }
}
