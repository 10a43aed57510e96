//! Tests that cannot run say so where the test runner counts it.

use std::io::Write as _;

/// Notes that a test was skipped: one line `SKIP <test>: <reason>; cure: <cure>` on standard error and, if `KVX_SKIPS`
/// names a file, at its end, where `cargo xtask test` counts it.
pub fn skip(test: &str, reason: &str, cure: &str) {
    let words = format!("SKIP {test}: {reason}; cure: {cure}");
    let line = words.lines().collect::<Vec<_>>().join(" ") + "\n";
    note(&line);
}

/// Prints a whole line, and appends it to the file that `KVX_SKIPS` names.
pub(crate) fn note(line: &str) {
    eprint!("{line}");
    if let Some(path) = std::env::var_os("KVX_SKIPS") {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        // One write, so that lines of several processes stay whole.
        file.and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("the file that KVX_SKIPS names is writable");
    }
}
