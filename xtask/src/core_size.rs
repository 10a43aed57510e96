//! A test that kvx-core stays small, with its `unsafe` in few files.

use std::collections::BTreeMap;

use crate::circles::read;

/// The lines of kvx-core, without comments and tests. Authors of a backend or an engine have to read them, so what
/// exceeds 10,000 moves out of core. Fewer than 5,000 mean that its sources were not read.
const LINES: std::ops::RangeInclusive<usize> = 5_000..=10_000;
/// The files with `unsafe` in them: where core accesses memory, forks and calls the kernel. None means that its sources
/// were not read.
const UNSAFE_FILES: std::ops::RangeInclusive<usize> = 1..=6;

#[test]
fn core_stays_small_and_its_unsafe_code_in_six_files() {
    let mut texts = BTreeMap::new();
    read(&crate::root().join("kvx-core/src"), &mut Vec::new(), &mut texts).unwrap();
    let lines = texts.values().flat_map(|text| text.lines()).filter(|line| !line.trim().is_empty()).count();
    assert!(LINES.contains(&lines), "{lines} lines");
    let is_unsafe =
        |text: &&String| text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
    let files = texts.values().filter(is_unsafe).count();
    assert!(UNSAFE_FILES.contains(&files), "{files} files");
}
